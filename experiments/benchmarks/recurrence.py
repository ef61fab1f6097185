"""What does attention save over recurrence: time and sequential steps against length?

    python experiments/benchmarks/recurrence.py

The reading of a source by an encoder, forward and backward: LSTMs (model.mixer) against a Transformer's encoder of the same width and
depth. Sequential steps are matrix products that wait for one another: the longest chain of them in the traced program, loops by their
trips. Time: the best of seven, the two interleaved, compiled, on this machine.

Seen (two cores of an AMD EPYC 9005):

    length   attention ms    steps   recurrent ms    steps   ratio of time
        32          155.6       24          113.5      132            0.73
       128          169.3       24          100.9      516            0.60
       512          416.7       24          158.1    2,052            0.38
     1,024          931.4       24          233.0    4,100            0.25

So attention takes as many steps for any length and recurrence four for each token (two layers, forward and backward), but two cores, which do little
at a time, do not wait for steps: there the work counts, which grows with the square of the length only in attention. On a machine that does thousands
of products at once it is the steps that count; none was at hand.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from transformer import ModelConfig, build_model
from transformer.parallel.mesh import disable_tpu_search

MODELS = {
    "attention": {"position": "rotary", "attention_backend": "reference", "d_ff": 512, "num_heads": 4},
    "recurrent": {"mixer": "lstm", "position": "none", "norm_placement": "none", "feed_forward": "none"},
}  # fmt: skip
LENGTHS = (32, 64, 128, 256, 512, 1024)
TOKENS = 4096
"""In a batch, whatever the length."""


def longest_chain(jaxpr, depth_of=None) -> int:
    """Matrix products on the longest path through a program."""
    depth = dict(zip(jaxpr.invars, depth_of or [0] * len(jaxpr.invars), strict=True))
    get = lambda x: depth.get(x, 0) if not hasattr(x, "val") else 0
    for one in jaxpr.eqns:
        before = [get(x) for x in one.invars]
        start, name = max(before, default=0), one.primitive.name
        inner = [
            x
            for x in (
                one.params.get("jaxpr"),
                one.params.get("call_jaxpr"),
                one.params.get("fun_jaxpr"),
            )
            if x is not None
        ]
        if name == "scan":
            after = start + one.params["length"] * longest_chain(one.params["jaxpr"].jaxpr)
        elif inner:
            body = getattr(inner[0], "jaxpr", inner[0])
            after = start + longest_chain(body)
        else:
            after = start + (name == "dot_general")
        depth.update(dict.fromkeys(one.outvars, after))
    return max((get(x) for x in jaxpr.outvars), default=0)


def reading(model: dict, length: int):
    """(step, its arguments): the gradient of the encoder's output by its parameters."""
    config = ModelConfig(
        family="encoder", vocab_size=512, d_model=128, num_encoder_layers=2, max_length=length, **model
    )  # fmt: skip
    module, tokens = (
        build_model(config),
        jnp.asarray(
            np.random.default_rng(0).integers(4, 512, (TOKENS // length, length)), jnp.int32
        ),
    )
    params = jax.jit(module.init)(jax.random.key(0), tokens[:, :8])
    loss = lambda params, tokens: jnp.sum(
        jnp.square(module.apply(params, tokens, method="hidden")[0])
    )
    return jax.grad(loss), (params, tokens)


def main():
    disable_tpu_search()
    head = (
        f"{'length':>7}  "
        + "  ".join(f"{name + ' ms':>13}  {'steps':>7}" for name in MODELS)
        + f"  {'ratio of time':>14}"
    )
    print(
        f"{TOKENS:,} tokens a batch, forward and backward, on {jax.devices()[0].device_kind}\n{head}"
    )
    for length in LENGTHS:
        programs = {name: reading(model, length) for name, model in MODELS.items()}
        chains = {
            name: longest_chain(jax.make_jaxpr(step)(*args).jaxpr)
            for name, (step, args) in programs.items()
        }
        compiled = {name: jax.jit(step) for name, (step, _) in programs.items()}
        seconds = {name: [] for name in MODELS}
        for trial in range(8):
            for name, (_, args) in programs.items():
                began = time.perf_counter()
                jax.block_until_ready(compiled[name](*args))
                if trial:
                    seconds[name].append(time.perf_counter() - began)
        best = {name: min(x) for name, x in seconds.items()}
        print(
            f"{length:>7,}  "
            + "  ".join(f"{1e3 * best[name]:>13.1f}  {chains[name]:>7,}" for name in MODELS)
            + f"  {best['recurrent'] / best['attention']:>14.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
