"""Coordinate check: do updates have the same size at every width and depth?

    python experiments/benchmarks/coordinates.py                  # all tables: 30 minutes
    python experiments/benchmarks/coordinates.py --placements pre --figure=coordinates.png

For each norm placement and parametrization, it trains models of several sizes for a few steps on
one batch, with the same hyperparameters, and prints how measured quantities grow with the size: the
slope of log2(quantity) over log2(size). A quantity with slope 0 is the same at every size. Rows
named "predicted" have the slopes that theory predicts. A star marks a measured slope whose 95 %
interval misses the prediction by more than 0.02, that is, by more than 4 % from one end of the
depths to the other. The standard parametrization is the control, whose changes must grow. The
figure shows the change of the features after the steps 2 to 5.

Theory predicts the limit of many layers, each of which changes the stream little. The base of the
depths therefore has one layer, and the smallest measured model 16. With a base of 4 layers and
depths from 4 to 64, slopes deviate by up to 0.2: (1 + 1/16)^16 is larger than 1 + 1.

A sublayer's output changes with its weights, which learn by m_L^(alpha - 1), and with its input,
which changes equally at every depth. For alpha = 1/2, the slope of its change is therefore between
-1/2 and 0.

All quantities are means of absolute values, and over layers. Changes are those since
initialization.

    attention         output of an attention sublayer, before any norm, gate or multiplier
    feed-forward      the same for a feed-forward sublayer
    features          the last hidden state, after the final norm
    attention logits  scale * q k in the last layer
    initial logits    the logits at initialization. For all other quantities, the unembedding starts
                      at zero, and with it the logits.

An interval is computed from the means of the sizes (Student's t, sizes - 2 degrees of freedom), so
that it includes deviations from a power law.

Yang et al. 2022 (Tensor Programs V), app. D.1; Dey et al. 2025 (CompleteP).
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from scipy import stats

from transformer import ModelConfig, build_model
from transformer.config import OptimizerConfig
from transformer.model.layout import flatten
from transformer.training.optimizer import build_optimizer

WIDTHS, DEPTHS, BASE_DEPTH = (32, 64, 128, 256, 512), (16, 32, 64, 128), 1
HEAD, STEPS, SEEDS = 16, 5, 3
RATES = {"width": 3e-4, "depth": 1e-4}
"""Learning rates at which the normed features of the control still grow. At higher rates, their
change is limited by the norm."""

PLACEMENTS = ("pre", "post", "peri", "res_post", "deepnorm", "rezero")
QUANTITIES = (
    "attention", "attention change", "feed-forward", "feed-forward change", "features change",
    "attention logits", "initial logits", "logits change",
)  # fmt: skip


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
        scan_layers=True,
        parametrization={**parametrization, "unembedding": {"init": 0.0}},
    )


def batch(sequences: int = 8, length: int = 64) -> jax.Array:
    """Returns tokens of a text: the bytes of the license."""
    text = (Path(__file__).parents[2] / "LICENSE").read_bytes()[: sequences * length]
    return jnp.asarray(np.frombuffer(text, np.uint8).reshape(sequences, length), jnp.int32)


def observe(config: ModelConfig, params, tokens) -> dict[str, jax.Array]:
    """Returns the outputs of all sublayers, q k in the last layer, the last hidden state, and the
    logits."""
    names = ("self_attention", "feed_forward", "query", "key")
    seen = lambda module, method: method == "__call__" and module.name in names
    (h, head), state = build_model(config).apply(
        params, tokens, method="features", capture_intermediates=seen, mutable=["intermediates"]
    )
    found = {path: x[0] for path, x in flatten(state["intermediates"]).items()}
    output = lambda name: jax.tree.leaves(found[f"decoder/layers/{name}/__call__"])[0]
    q, k = (output(f"self_attention/{name}")[-1] for name in ("query", "key"))
    return {
        "attention": output("self_attention"),
        "feed-forward": output("feed_forward"),
        "features": h * (config.d_model / config.base.d_model),  # without muP's division
        "attention logits": jnp.einsum("BTNH,BSNH->BNTS", q, k) * config.head_size**-0.5,
        "logits": head(h),
    }


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def measure(config: ModelConfig, optimizer: OptimizerConfig, key, steps: int) -> dict:
    """Returns each quantity, and the loss, after 1 to `steps` updates on one batch: [steps]."""
    tokens = batch()
    size = lambda x: jnp.mean(jnp.abs(x))
    option = {**config.parametrization, "unembedding": {"init": 1.0}}
    random = build_model(dataclasses.replace(config, parametrization=option))
    initial = size(random.apply(random.init(key, tokens), tokens))
    network = build_model(config)
    params = network.init(key, tokens)
    start = observe(config, params, tokens)
    rule = build_optimizer(optimizer, steps, config)

    def loss(params):
        logits = network.apply(params, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(carry, _):
        params, state = carry
        updates, state = rule.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        seen = observe(config, params, tokens)
        sizes = {name: size(x) for name, x in seen.items()}
        sizes |= {f"{name} change": size(x - start[name]) for name, x in seen.items()}
        return (params, state), sizes | {"initial logits": initial, "loss": loss(params)}

    return jax.lax.scan(step, (params, rule.init(params)), length=steps)[1]


def measure_sizes(configs: dict[int, ModelConfig], rate: float, seeds=SEEDS, steps=STEPS) -> dict:
    """Returns each quantity, and the loss: [sizes, seeds, steps]."""
    optimizer = OptimizerConfig(
        schedule="constant", warmup_steps=0, learning_rate=rate, epsilon=1e-12
    )
    keys = [jax.random.key(seed) for seed in range(seeds)]
    of_size = lambda config: jax.tree.map(
        lambda *x: np.stack(x), *(measure(config, optimizer, key, steps) for key in keys)
    )
    return jax.tree.map(lambda *x: np.stack(x), *map(of_size, configs.values()))


def slope(sizes, values_by_size_and_seed) -> tuple[float, float]:
    """Returns the slope of log2(value) over log2(size), and half of its 95 % interval."""
    means = np.log2(values_by_size_and_seed).mean(1)
    fit = stats.linregress(np.log2(sizes), means)
    return fit.slope, stats.t.ppf(0.975, max(len(means) - 2, 1)) * fit.stderr


def predicted(case: str) -> dict[str, tuple[float, float]]:
    """Returns the lowest and the highest slope of each quantity under muP or CompleteP.

    Logits of random weights shrink with width, because muP divides their sum of d_model terms by
    d_model."""
    of_sublayers = dict.fromkeys(("attention change", "feed-forward change"), (-0.5, 0))
    logits = {"initial logits": (-0.5, -0.5)}
    exceptions = {"width, mup": logits, "depth, completep 1/2": of_sublayers}
    return {name: (0, 0) for name in QUANTITIES} | exceptions.get(case, {})


def cases() -> dict[str, tuple[str, dict]]:
    """Returns the rows of each table: name -> (axis, the option `parametrization`)."""
    width, depth = {"d_model": WIDTHS[0]}, {"num_decoder_layers": BASE_DEPTH}
    return {
        "width, standard": ("width", {"name": "standard"}),
        "width, mup": ("width", {"name": "mup", "base": width}),
        "depth, standard": ("depth", {"name": "standard"}),
        "depth, completep 1/2": ("depth", {"name": "completep", "base": depth, "alpha": 0.5}),
        "depth, completep 1": ("depth", {"name": "completep", "base": depth}),
    }


def configs(placement: str, axis: str, parametrization: dict) -> dict[int, ModelConfig]:
    """Returns the models of a row: size -> config."""
    if axis == "width":
        return {width: model(placement, width, 4, parametrization) for width in WIDTHS}
    return {depth: model(placement, 64, depth, parametrization) for depth in DEPTHS}


def row(placement: str, case: str) -> tuple[str, np.ndarray]:
    """Measures a row. Returns its text, and the change of the features: [sizes, steps]."""
    axis, parametrization = cases()[case]
    models = configs(placement, axis, parametrization)
    seen = measure_sizes(models, RATES[axis])
    cells = []
    for name, (low, high) in predicted(case).items():
        fitted, half = slope(list(models), seen[name][..., -1])
        missed = "standard" not in case and max(low - fitted, fitted - high) > half + 0.02
        cells.append(f"{fitted:+.2f} ± {half:.2f}{'*' if missed else ''}")
    losses = seen["loss"][..., -1].mean(1)
    text = f"| {placement} | {case} | {' | '.join(cells)} | {losses[0]:.2f} to {losses[-1]:.2f} |"
    return text, seen["features change"].mean(1)


def draw(path: str, changes: dict[tuple[str, str], np.ndarray]) -> None:
    """Draws the change of the features over the size, with a line per step."""
    placements, names = (list(dict.fromkeys(key[i] for key in changes)) for i in (0, 1))
    shape = len(placements), len(names)
    figure, axes = plt.subplots(
        *shape, figsize=(2.1 * shape[1], 1.9 * shape[0]), sharey=True, squeeze=False
    )
    for (placement, name), lines in changes.items():
        plot = axes[placements.index(placement), names.index(name)]
        sizes = WIDTHS if name.startswith("width") else DEPTHS
        for step in range(2, len(lines.T) + 1):  # the first step changes the unembedding alone
            color = plt.get_cmap("viridis")(0.9 - 0.3 * (step - 2))
            plot.plot(sizes, lines[:, step - 1], color=color, marker=".", label=f"{step}")
        plot.set_xscale("log", base=2)
        plot.set_yscale("log", base=2)
        plot.set_xticks(sizes, sizes)
        plot.set_title(f"{placement}: {name}", fontsize=8)
        plot.tick_params(labelsize=7)
    for plot in axes[-1]:
        plot.set_xlabel("d_model" if plot.get_title().split(": ")[1][0] == "w" else "layers")
    figure.supylabel("change of the features", fontsize=9)
    lines = axes[0, 0].get_legend_handles_labels()
    figure.legend(*lines, title="step", ncols=5, loc="upper right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / figure.get_figheight()))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--placements", nargs="+", default=PLACEMENTS, choices=PLACEMENTS)
    parser.add_argument("--figure", help="a file for the figure, such as coordinates.png")
    args = parser.parse_args()
    heading = " | ".join(QUANTITIES)
    print(f"| placement | parametrization | {heading} | loss, smallest to largest |")
    print("|---" * (len(QUANTITIES) + 3) + "|")
    for case in cases():
        if "standard" not in case:
            limits = predicted(case).values()
            slopes = (f"{low:g}" + f" to {high:g}" * (low < high) for low, high in limits)
            print(f"| predicted | {case} | {' | '.join(slopes)} | |")
    changes = {}
    for placement in args.placements:
        for case in cases():
            text, changes[placement, case] = row(placement, case)
            print(text, flush=True)
            jax.clear_caches()  # hundreds of programs exceed the memory maps of a process
    if args.figure:
        draw(args.figure, changes)


if __name__ == "__main__":
    main()
