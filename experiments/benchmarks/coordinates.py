"""Coordinate check: do updates have the same size at every width and depth?

    python experiments/benchmarks/coordinates.py                  # all tables: 20 minutes
    python experiments/benchmarks/coordinates.py --placements pre

For each norm placement and parametrization, it trains models of several sizes for a few steps on
one batch, with the same hyperparameters, and prints how measured quantities grow with the size: the
slope of log2(quantity) over log2(size) with its 95 % interval, over all sizes and seeds. A slope of
0 means that the quantity is the same at every size. In a parametrization that transfers, the
changes of all quantities have slope 0. The standard parametrization is the control, whose changes
must grow.

    branch            root mean square of a residual branch, the mean over layers
    branch change     root mean square of its change since initialization
    features change   the same for the last hidden state, after the final norm
    attention logits  mean absolute value of scale * q k in the last layer
    logits change     root mean square of the change of the logits, which are 0 at initialization

Yang et al. 2022 (Tensor Programs V), app. D.1; Dey et al. 2025 (CompleteP).
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from transformer import ModelConfig, build_model
from transformer.config import OptimizerConfig
from transformer.model.layout import flatten
from transformer.training.optimizer import build_optimizer

WIDTHS, BASE_WIDTH = (32, 64, 128, 256), 32
DEPTHS, BASE_DEPTH = (2, 4, 8, 16), 2
HEAD, STEPS, SEEDS = 16, 5, 3
RATES = {"width": 3e-4, "depth": 1e-3}
"""Learning rates at which the normed features of the control still grow. At higher rates, their
change is limited by the norm."""

PLACEMENTS = ("pre", "post", "peri", "res_post", "deepnorm", "rezero")
QUANTITIES = ("branch", "branch change", "features change", "attention logits", "logits change")


def model(placement: str, width: int, depth: int, parametrization: dict) -> ModelConfig:
    """Returns a decoder with heads of size 16 and an untied unembedding that starts at zero."""
    return ModelConfig(
        family="decoder",
        vocab_size=256,
        d_model=width,
        num_heads=width // HEAD,
        num_decoder_layers=depth,
        max_length=64,
        norm_placement=placement,
        position="learned",
        initializer="lecun_normal",
        embedding_init_std=1.0,
        tie_embeddings=False,
        scan_layers=False,
        parametrization={**parametrization, "unembedding": {"init": 0.0}},
    )


def batch(sequences: int = 8, length: int = 64) -> jax.Array:
    """Returns tokens of a text: the bytes of the license."""
    text = (Path(__file__).parents[2] / "LICENSE").read_bytes()[: sequences * length]
    return jnp.asarray(np.frombuffer(text, np.uint8).reshape(sequences, length), jnp.int32)


def observe(config: ModelConfig, params, tokens) -> dict[str, jax.Array]:
    """Returns the branches of all sublayers, the last hidden state, q k in the last layer, and the
    logits."""
    model = build_model(config)
    names = ("self_attention", "feed_forward", "query", "key")
    seen = lambda module, method: method == "__call__" and module.name in names
    (h, head), state = model.apply(
        params, tokens, method="features", capture_intermediates=seen, mutable=["intermediates"]
    )
    found = {path: x[0] for path, x in flatten(state["intermediates"]).items()}
    branches = [
        x[0] if isinstance(x, tuple) else x
        for path, x in found.items()
        if path.split("/")[-2] in ("self_attention", "feed_forward")
    ]
    last = f"decoder/layers_{config.num_decoder_layers - 1}/self_attention"
    q, k = (found[f"{last}/{name}/__call__"] for name in ("query", "key"))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * config.head_size**-0.5
    unscaled = h * (config.d_model / config.base.d_model)
    return {"branch": jnp.stack(branches), "features": unscaled, "scores": scores,
            "logits": head(h)}  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def measure(config: ModelConfig, optimizer: OptimizerConfig, key, steps: int) -> dict:
    """Returns each quantity after `steps` updates on one batch."""
    network, tokens = build_model(config), batch()
    params = network.init(key, tokens)
    rule = build_optimizer(optimizer, steps, config)

    def loss(params):
        logits = network.apply(params, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(carry, _):
        params, state = carry
        updates, state = rule.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    start = observe(config, params, tokens)
    (params, _), _ = jax.lax.scan(step, (params, rule.init(params)), length=steps)
    end = observe(config, params, tokens)
    size = lambda x: jnp.sqrt(jnp.mean(jnp.square(x)))
    return {
        "branch": size(end["branch"]),
        "branch change": size(end["branch"] - start["branch"]),
        "features change": size(end["features"] - start["features"]),
        "attention logits": jnp.mean(jnp.abs(end["scores"])),
        "logits change": size(end["logits"] - start["logits"]),
        "loss": loss(params),
    }


def slopes(configs: dict[int, ModelConfig], rate: float, seeds: int = SEEDS, steps: int = STEPS):
    """Returns (slope, half-width of its 95 % interval) of each quantity, and the losses by size."""
    optimizer = OptimizerConfig(
        schedule="constant", warmup_steps=0, learning_rate=rate, epsilon=1e-12
    )
    rows = {
        size: [measure(config, optimizer, jax.random.key(seed), steps) for seed in range(seeds)]
        for size, config in configs.items()
    }
    x = np.repeat(np.log2(list(rows)), seeds)
    fits = {}
    for name in QUANTITIES:
        y = np.log2([max(float(row[name]), 1e-30) for of_size in rows.values() for row in of_size])
        fit = stats.linregress(x, y)
        fits[name] = (fit.slope, stats.t.ppf(0.975, len(x) - 2) * fit.stderr)
    losses = [float(np.mean([row["loss"] for row in of_size])) for of_size in rows.values()]
    return fits, losses


def cases() -> dict[str, tuple[str, dict]]:
    """Returns the rows of each table: name -> (axis, the option `parametrization`)."""
    width, depth = {"d_model": BASE_WIDTH}, {"num_decoder_layers": BASE_DEPTH}
    return {
        "width, standard": ("width", {"name": "standard"}),
        "width, mup": ("width", {"name": "mup", "base": width}),
        "depth, standard": ("depth", {"name": "standard"}),
        "depth, completep 1/2": ("depth", {"name": "completep", "base": depth, "alpha": 0.5}),
        "depth, completep 1": ("depth", {"name": "completep", "base": depth}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--placements", nargs="+", default=PLACEMENTS, choices=PLACEMENTS)
    args = parser.parse_args()
    heading = "".join(f" | {name}" for name in QUANTITIES)
    print(f"| placement | parametrization{heading} | loss, smallest to largest |")
    print("|---" * (len(QUANTITIES) + 3) + "|")
    for placement in args.placements:
        for name, (axis, parametrization) in cases().items():
            configs = {
                size: model(
                    placement,
                    size if axis == "width" else 64,
                    size if axis == "depth" else 4,
                    parametrization,
                )
                for size in (WIDTHS if axis == "width" else DEPTHS)
            }
            fits, losses = slopes(configs, RATES[axis])
            cells = [f"{slope:+.2f} ± {half:.2f}" for slope, half in fits.values()]
            print(f"| {placement} | {name} | {' | '.join(cells)} | "
                  f"{losses[0]:.2f} to {losses[-1]:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
