"""What does attention save over recurrence? Time and sequential steps against length.

    python experiments/benchmarks/recurrence.py

The program is an encoder, forward and backward: LSTMs (model.mixer) against a Transformer of the
same width and depth. The number of sequential steps is the length of the longest chain of matrix
products in the traced program, each of which depends on the one before it. The body of a loop
counts once per iteration. The time is the best of seven runs of the compiled programs, which run in
turn on this machine.

Measured (two cores of an AMD EPYC 9005):

    length   attention ms    steps   recurrent ms    steps   ratio of time
        32          155.6       24          113.5      132            0.73
       128          169.3       24          100.9      516            0.60
       512          416.7       24          158.1    2,052            0.38
     1,024          931.4       24          233.0    4,100            0.25

Attention takes the same number of steps at any length. Recurrence takes four steps for each token
(two layers, forward and backward). Two cores compute little at a time, so the time depends on the
amount of work, which grows with the square of the length only in attention. On a machine that
computes thousands of products at once, the sequential steps would determine the time; this was not
measured, for lack of such a machine.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from transformer import ModelConfig, build_model
from transformer.parallel.mesh import disable_tpu_search

MODELS = {
    "attention": {
        "position": "rotary",
        "attention_backend": "reference",
        "d_ff": 512,
        "num_heads": 4,
    },
    "recurrent": {
        "mixer": "lstm",
        "position": "none",
        "norm_placement": "none",
        "feed_forward": "none",
    },
}
LENGTHS = (32, 64, 128, 256, 512, 1024)
TOKENS = 4096
"""The number of tokens in a batch, at every length."""


def longest_chain(jaxpr, depth_of=None) -> int:
    """Returns the number of matrix products on the longest path through a program."""
    depth = dict(zip(jaxpr.invars, depth_of or [0] * len(jaxpr.invars), strict=True))
    get = lambda x: depth.get(x, 0) if not hasattr(x, "val") else 0
    for equation in jaxpr.eqns:
        depths = [get(x) for x in equation.invars]
        start, name = max(depths, default=0), equation.primitive.name
        inner = [
            x
            for x in (
                equation.params.get("jaxpr"),
                equation.params.get("call_jaxpr"),
                equation.params.get("fun_jaxpr"),
            )
            if x is not None
        ]
        if name == "scan":
            end = start + equation.params["length"] * longest_chain(equation.params["jaxpr"].jaxpr)
        elif inner:
            body = getattr(inner[0], "jaxpr", inner[0])
            end = start + longest_chain(body)
        else:
            end = start + (name == "dot_general")
        depth.update(dict.fromkeys(equation.outvars, end))
    return max((get(x) for x in jaxpr.outvars), default=0)


def reading(model: dict, length: int):
    """Returns a function and its arguments.

    The function computes the gradient of the encoder's squared output with respect to its
    parameters.
    """
    config = ModelConfig(
        family="encoder",
        vocab_size=512,
        d_model=128,
        num_encoder_layers=2,
        max_length=length,
        **model,
    )
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
    header = (
        f"{'length':>7}  "
        + "  ".join(f"{name + ' ms':>13}  {'steps':>7}" for name in MODELS)
        + f"  {'ratio of time':>14}"
    )
    print(
        f"{TOKENS:,} tokens per batch, forward and backward, on "
        f"{jax.devices()[0].device_kind}\n{header}"
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
                start = time.perf_counter()
                jax.block_until_ready(compiled[name](*args))
                if trial:
                    seconds[name].append(time.perf_counter() - start)
        best = {name: min(x) for name, x in seconds.items()}
        print(
            f"{length:>7,}  "
            + "  ".join(f"{1e3 * best[name]:>13.1f}  {chains[name]:>7,}" for name in MODELS)
            + f"  {best['recurrent'] / best['attention']:>14.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
