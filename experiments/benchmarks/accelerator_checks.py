"""Checks of accelerator.py: attention by every backend equals the plain path.

The expected values and gradients are those of `reference` in float32, with products at the highest
precision. Inputs are bfloat16 numbers, so that bfloat16 programs compute the same function. The
error of an array is |actual - expected| / |expected|, in Euclidean norms. If the expected norm is
less than a tenth of the largest one, that tenth divides: some gradients are zero but for rounding.
The error of a case is the largest of the output and of all gradients. Allowed are

    float32    1e-4. A wrong pair of tokens causes more than 1e-2.
    bfloat16   2^-5, eight times its precision: fused backward passes read outputs that are rounded
               to bfloat16, and gradients of biases are small differences of large sums

Schemes that give backends the same inputs (such as `none`, `learned` and `sinusoidal`, which act
outside of attention) share a check.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from accelerator import Case, failure

from transformer.errors import UserError
from transformer.model import positions
from transformer.model.attention_backends import BACKENDS, Backend, Inputs
from transformer.model.config import ModelConfig
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens, window
from transformer.model.positions import SCHEMES, Position
from transformer.parallel.config import MeshConfig
from transformer.parallel.mesh import make_mesh, use

ALLOWED = {"float32": 1e-4, "bfloat16": 2.0**-5}
DTYPES = tuple(ALLOWED)
TRACING = threading.RLock()
"""Programs are traced one at a time, and compiled in parallel."""


def compiled(
    function: Callable, *args, precision: str | None = None, compiler_options=None, **options
):
    """Compiles a function for these arguments or shapes."""
    with TRACING, jax.default_matmul_precision(precision):
        lowered = jax.jit(function, **options).lower(*args)
    return lowered.compile(compiler_options)


def programs(schemes: list[str] | None = None) -> dict[str, list[str]]:
    """Returns scheme -> the schemes that give backends the same inputs, itself included."""
    groups: dict[str, list[str]] = {}
    for name, scheme in SCHEMES.items():
        inside = scheme().hooks - {"embed"}
        groups.setdefault(name if inside else "none", []).append(name)
    return {name: group for name, group in groups.items() if not schemes or name in schemes}


def bound(position: str, tokens: Tokens, heads: int, size: int, causal: bool) -> Position | None:
    """Returns a scheme with random parameters, or None if it requires a causal mask."""
    family = "decoder" if causal else "encoder"
    widths = {"d_model": heads * size, "num_heads": heads, "d_head": size}
    try:
        config = ModelConfig(
            family=family, vocab_size=8, position=position, max_length=512, **widths
        )
    except UserError:
        return None
    draw, facts = np.random.default_rng(0), config.stack_facts(family)
    param = lambda name, init, shape, dtype: jnp.asarray(0.5 * draw.standard_normal(shape), dtype)
    scheme = positions.build(position).bind(param, facts).bind_layer(param, facts)
    return scheme.at(tokens.positions_BxT)


def packed(T: int) -> Tokens:
    """Two sequences: one of two documents and padding, and one of a single document."""
    first, second = T // 4 + 3, T // 2 + 5
    lengths = (first, second, T - first - second)
    positions_T = np.concatenate([np.arange(n) for n in lengths])
    segments_T = np.repeat((1, 2, 0), lengths)
    at, of = np.stack([positions_T, np.arange(T)]), np.stack([segments_T, np.ones(T, int)])
    return Tokens(jnp.asarray(at, jnp.int32), jnp.asarray(of, jnp.int32), order="contiguous")


def masks(where: Tokens, heads: int) -> dict[str, tuple]:
    """Returns name -> (mask, tokens of queries and of keys, other inputs)."""
    past, both = SAME_SEGMENT & CAUSAL, (where, where)
    prefix = where.replace(until_BxT=jnp.maximum(where.positions_BxT, 40))
    half = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], where)
    return {
        "causal": (past, both, {}),
        "both ways": (SAME_SEGMENT, both, {}),
        "window": (past & window(70), both, {}),
        "window both ways": (SAME_SEGMENT & window(70), both, {}),
        "prefix": (past, (prefix, prefix), {}),
        "soft cap": (past, both, {"soft_cap": 2.0}),
        "sink": (past, both, {"sink_N": jnp.linspace(-1.0, 2.0, heads)}),
        "dropout": (past, both, {"dropout": 0.2, "dropout_key": jax.random.key(3)}),
        "other keys, both ways": (SAME_SEGMENT, (where, half), {}),
    }


def cases(small: bool, schemes: list[str] | None) -> tuple[list[Case], list[Case]]:
    """Returns the checks of all schemes, and those of other masks, options and sizes."""
    every = [Check(name, mask) for name in programs(schemes) for mask in ("causal", "both ways")]
    # One scheme outside of attention, one function of distance, and one of content
    some = [name for name in ("none", "t5", "shaw") if not schemes or name in schemes]
    others = ("window", "window both ways", "prefix", "soft cap", "sink", "dropout")
    more = [Check(name, mask) for name in some for mask in others]
    more += [Check("none", "other keys, both ways")]
    more += [Check(name, size=size) for name in some for size in (128, 256)]
    more += [Check(name, tokens=32_768, plain="blockwise", size=128, heads=2) for name in some]
    if small:
        every = [
            Check(name, tokens=144, dtypes=DTYPES[: 1 + (name == "none")])
            for name in programs(schemes)
        ]
        more = [Check("none", "window both ways", tokens=144, dtypes=DTYPES[:1])]
    to_cases = lambda checks: [x.case for x in checks if x.scheme is not None]
    return to_cases(every), to_cases(more)


@dataclasses.dataclass(frozen=True)
class Check:
    """The check of a scheme and a mask by all backends.

    plain: the backend to compare with; for long sequences `blockwise`, whose memory is linear.
    """

    position: str
    mask: str = "causal"
    tokens: int = 640
    plain: str = "reference"
    size: int = 64
    heads: int = 4
    dtypes: tuple[str, ...] = DTYPES

    @property
    def case(self) -> Case:
        name = f"{self.position}, {self.mask}, {self.tokens:,} tokens, d_head {self.size}"
        return Case("checks", f"check of {name}", self.build, self.run)

    @property
    def scheme(self) -> Position | None:
        """The scheme with random parameters, or None if it is not defined for the mask."""
        causal = not self.mask.endswith("both ways")
        return bound(self.position, packed(self.tokens), self.heads, self.size, causal)

    def build(self) -> dict:
        """Compiles (backend, type) -> (program, arguments).

        If a backend does not support the case, its value is the reason, and if a program cannot be
        compiled, the exception.
        """
        where, (N, H) = packed(self.tokens), (self.heads, self.size)
        rule, (q_tokens, k_tokens), options = masks(where, N)[self.mask]
        inputs = Inputs(rule, q_tokens, k_tokens, self.scheme, H**-0.5, **options)
        T, S = self.tokens, k_tokens.positions_BxT.shape[1]
        shapes = [(2, T, N, H), (2, S, N // 2, H), (2, S, N // 2, H), (2, T, N, H)]
        arrays = [
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
            for i, shape in enumerate(shapes)
        ]

        def program(backend: str, dtype: str):
            with on_devices(backend) if backend != self.plain else contextlib.nullcontext():
                return _program(BACKENDS[backend], inputs, [x.astype(dtype) for x in arrays])

        others = [name for name in BACKENDS if name not in ("reference", self.plain)]
        keys = [(name, dtype) for name in others for dtype in self.dtypes]
        return {key: program(*key) for key in [(self.plain, "float32"), *keys]}

    def run(self, built: dict) -> Iterator[dict]:
        """Yields a row for every backend and type."""
        expected = results(built.pop((self.plain, "float32")))
        for (backend, dtype), program in built.items():
            row = {"name": f"{self.case.name}, {backend}, {dtype}", "position": self.position}
            row |= {"backend": backend, "dtype": dtype}
            if isinstance(program, str):
                yield row | {"status": "unsupported", "why": program}
                continue
            try:
                actual, again = results(program), results(program)
            except Exception as e:  # of one backend
                yield row | failure(e)
                continue
            found, limit = error(actual, expected), ALLOWED[dtype]
            status = "passed" if found <= limit else "FAILED"  # also if it is not a number
            same = all(map(np.array_equal, actual, again))
            yield row | {"status": status, "error": found, "allowed": limit, "repeats": same}


def on_devices(backend: str) -> contextlib.AbstractContextManager:
    """Returns a context in which `ring` shards sequences over all devices."""
    if backend != "ring" or jax.device_count() == 1:
        return contextlib.nullcontext()
    return use(make_mesh(MeshConfig(data=1, context=-1)))


def _program(backend: Backend, inputs: Inputs, arrays: list) -> tuple | str | Exception:
    """Compiles the output and the gradients of a weighted sum of it."""
    q, k, v, weight = arrays
    scheme = inputs.position
    with TRACING:
        why = backend.why_not(*scheme.rotate(q, k), v, inputs)
    if why:
        return why

    def loss(q, k, v, scheme, sink_N):
        q, k = scheme.rotate(q, k)
        out = backend.attend(q, k, v, inputs.replace(position=scheme, sink_N=sink_N))
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

    def run(*args):
        (_, out), grads = jax.value_and_grad(loss, (0, 1, 2, 3, 4), True, allow_int=True)(*args)
        return out, grads

    args = (q, k, v, scheme, inputs.sink_N)
    try:
        precision = "highest" if q.dtype == jnp.float32 else None
        # Autotuning takes most of the time on GPUs.
        fast = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
        return compiled(run, *args, precision=precision, compiler_options=fast), args
    except Exception as e:  # raised again where the results are read
        return e


def results(program: tuple | Exception) -> list[np.ndarray]:
    """Runs a program. Returns the output and the gradients as float32 arrays."""
    if isinstance(program, Exception):
        raise program
    run, args = program
    leaves = [x for x in jax.tree.leaves(run(*args)) if x.dtype != jax.dtypes.float0]
    return [np.asarray(x.astype(jnp.float32)) for x in leaves]


def error(actual: list, expected: list) -> float:
    """Returns the largest relative error of these arrays."""
    norms = [float(np.linalg.norm(x)) for x in expected]
    differences = [np.linalg.norm(a - e) for a, e in zip(actual, expected, strict=True)]
    errors = [d / max(n, max(norms) / 10) for d, n in zip(differences, norms, strict=True)]
    return float(np.max(errors))  # not a number if one of them is not
