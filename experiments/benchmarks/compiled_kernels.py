"""Does the TPU compiler accept the kernels of fused attention, with each scheme and option?

    python experiments/benchmarks/compiled_kernels.py --chips=v5e,v5p,v6e

The TPU compiler in libtpu (extra [tpu]) compiles the output and all gradients of `flash`, for every
position scheme that acts inside attention, with a causal mask and without one; for one scheme of
each kind, with every other mask and option, head size and type. No TPU is needed, and no kernel is
executed. Prints a line for each program that fails, and a summary. Exits with 1 if one fails.

Shapes    2 sequences of 640 tokens, which are two documents and padding, 4 heads of queries and 2
          of keys and values, d_head 64, bfloat16, unless the line says otherwise
Hardware  any Linux x86-64 machine
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
from accelerator_checks import bound, masks, packed, programs
from kernels import device_of

from transformer.model.attention_backends import BACKENDS, Inputs
from transformer.parallel.config import MeshConfig
from transformer.parallel.mesh import make_mesh, use

KINDS = ("none", "t5", "fire", "shaw")
"""One scheme outside of attention, and functions of distance, of position, and of content."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Attention with one scheme and one of `masks`. `groups` is the heads of keys and values."""

    position: str
    mask: str = "causal"
    size: int = 64
    v_size: int = 64
    groups: int = 2
    dtype: str = "bfloat16"
    tokens: int = 640

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = {x: y for x, y in dataclasses.asdict(self).items() if y != defaults[x]}
        changed.pop("position")
        mask = changed.pop("mask", "causal")
        return ", ".join([self.position, mask, *(f"{x} {y}" for x, y in changed.items())])

    def lower(self, device):
        """Returns the lowered program, or a string with the reason why there is none."""
        where, flash, N = packed(self.tokens), BACKENDS["flash"], 4
        causal = not self.mask.endswith("both ways")
        scheme = bound(self.position, where, N, self.size, causal)
        if scheme is None:
            return f"{self.position} requires a causal mask"
        rule, (q_tokens, k_tokens), options = masks(where, N)[self.mask]
        inputs = Inputs(rule, q_tokens, k_tokens, scheme, self.size**-0.5, **options)
        S, sharding = k_tokens.positions_BxT.shape[1], jax.sharding.SingleDeviceSharding(device)
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        shapes = (
            (2, self.tokens, N, self.size),
            (2, S, self.groups, self.size),
            (2, S, self.groups, self.v_size),
        )
        q, k, v = (jnp.zeros(shape, self.dtype) for shape in shapes)
        rotated = scheme.rotate(q, k)  # on the CPU
        with use(make_mesh(MeshConfig(data=1), [device])):
            if why := flash.why_not(*rotated, v, inputs):
                return why

            def loss(q, k, v, scheme, sink_N):
                q, k = scheme.rotate(q, k)
                out = flash.attend(q, k, v, inputs.replace(position=scheme, sink_N=sink_N))
                return jnp.sum(out.astype(jnp.float32))

            gradients = jax.value_and_grad(loss, (0, 1, 2, 3, 4), allow_int=True)
            args = jax.tree.map(place, (q, k, v, scheme, inputs.sink_N))
            lowered = jax.jit(gradients).lower(*args)
        assert lowered.as_text().count("tpu_custom_call") >= 2, "there is no kernel in the program"
        return lowered


def combinations() -> list[Program]:
    """Returns all programs."""
    every = [Program(name, mask) for name in programs() for mask in ("causal", "both ways")]
    options = ("window", "window both ways", "prefix", "soft cap", "sink", "dropout")
    every += [Program(name, mask) for name in KINDS for mask in options]
    every += [Program("none", "other keys, both ways")]
    changes = [dict(size=size, v_size=size) for size in (128, 256)]
    changes += [dict(groups=1), dict(groups=4), dict(tokens=333), dict(dtype="float32")]
    # The second has the largest blocks that fit in the memory of a v5p.
    changes += [dict(tokens=tokens, size=128, v_size=128) for tokens in (8192, 21_504)]
    every += [Program(name, **change) for name in KINDS for change in changes]
    long = dict(tokens=8192, size=128, v_size=128)  # the tiles of a v6e are larger
    every += [Program("transformer_xl", **long)]
    every += [Program("t5", mask, **long) for mask in ("dropout", "window", "prefix")]
    return every + [Program(name, v_size=128) for name in ("none", "t5")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    args = parser.parse_args()
    failed = 0
    for chip in args.chips.split(","):
        device, began = device_of(chip), time.perf_counter()
        count, unsupported = 0, {}
        for program in combinations():
            if args.only not in str(program):
                continue
            lowered = program.lower(device)
            if isinstance(lowered, str):
                unsupported[str(program)] = lowered
                continue
            try:
                lowered.compile()
                count += 1
            except Exception as e:  # the compiler's
                failed += 1
                print(f"{chip}: {program}: {str(e).splitlines()[0]}", flush=True)
        seconds = time.perf_counter() - began
        print(f"{chip}: {count} programs compiled in {seconds:.0f} s", flush=True)
        for name, why in unsupported.items():
            print(f"{chip}: {name} is not fused: {why}", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
