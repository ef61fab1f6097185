"""Measurements of accelerator.py: attention, training steps, prefill and decoding on one device.

A time is the median of five rounds. In a round, calls are queued for at least 0.1 s, if one is
shorter, so that the time to start a program is hidden.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from accelerator import ROOT, Case
from accelerator_checks import TRACING, bound, compiled, programs

from transformer.config_io import load_experiment
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import prefill
from transformer.decoding.sampling import sample
from transformer.model.attention_backends import BACKENDS, Inputs, choose, record
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.planning.chips import CHIPS
from transformer.planning.model_flops import model_flops
from transformer.planning.programs import batch_shapes
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, init_state
from transformer.training.step import make_train_step

KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}  # fmt: skip
"""Chips by JAX's name of the device. The names of GPUs contain those of their chips."""

WIDTH = 2048
"""Head size times heads in attention."""

PASSES = ("forward", "forward and backward")
USUAL = (8192, 128)
"""The length and the head size that the manual prints."""

STEPS = {
    # name -> file, changes, schemes
    "decoder_1b with 4 of 24 layers": (
        "experiments/scale/decoder_1b.py",
        {"model.num_decoder_layers": "4", "data.batch_size": "4", "mesh.fsdp": "1"},
        ("rotary", "none", "alibi", "t5"),
    ),
    "vaswani_big": ("experiments/vaswani_big.py", {"data.batch_size": "16"}, ("sinusoidal",)),
}
SMALL = {
    "model.d_model": "32",
    "model.d_ff": "64",
    "model.num_heads": "2",
    "model.num_decoder_layers": "1",
    "model.max_length": "64",
    "model.vocab_size": "64",
    "data.length": "32",
    "data.batch_size": "2",
}
"""Changes to both experiments with --small."""


def peak() -> float:
    """Returns the bfloat16 operations per second of a device, 0 if unknown."""
    kind = jax.devices()[0].device_kind
    names = [chip for name, chip in KINDS.items() if name == kind]
    names += [chip for chip in ("h100", "h200", "a100", "b200") if chip in kind.lower()]
    return CHIPS[names[0]].flops / CHIPS[names[0]].devices if names else 0.0


def measured(seconds: float, **facts) -> dict:
    """Returns the facts of a measured row, with the share of the chip's rate if FLOPs are given."""
    row = {"status": "measured", "seconds": seconds} | facts
    if "flops" in facts:
        row["flops_per_second"] = row.pop("flops") / seconds
        if peak():
            row["peak_share"] = row["flops_per_second"] / peak()
    return row


def timed(call: Callable, rounds: int = 5, least: float = 0.1) -> float:
    """Returns the seconds of a call, which returns arrays. The first two calls do not count."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = min(int(least / max(time.perf_counter() - start, 1e-6)) + 1, 100)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def cases(small: bool, schemes: list[str] | None) -> tuple[list[Case], list[Case]]:
    """Returns the measurements that the manual prints, and all others."""
    shapes = [(T, H) for H in (128, 64) for T in (2048, 32_768, 4096, 16_384, 8192)]
    usual, others = USUAL, [shape for shape in shapes if shape != USUAL]
    if small:
        usual, others = (128, 16), []
    attend = lambda shape, *backend: [
        attention(position, *shape, part, *backend)
        for position in programs(schemes)
        for part in PASSES
    ]
    models = [step(name, position, small) for name, (*_, all) in STEPS.items() for position in all]
    some = [name for name in ("none", "t5") if not schemes or name in schemes]
    backends = [
        attention(position, *usual, part, backend)
        for backend in BACKENDS
        for position in some
        for part in PASSES[small:]
    ]
    peer = [cudnn(with_bias, *usual, part) for with_bias in (False, True) for part in PASSES]
    more = [case for shape in others for case in attend(shape)]
    return [*attend(usual), *models, *decoding(small)], [*backends, *peer, *more]


def headline() -> list[str]:
    """Returns the names of the measurements that the manual prints."""
    return [case.name for case in cases(False, None)[0]]


def attention(position: str, T: int, H: int, part: str, backend: str = "auto") -> Case:
    """Returns the measurement of causal attention over one document, in bfloat16."""
    N, forced = max(WIDTH // H, 1) if T > 128 else 2, "" if backend == "auto" else f", {backend}"
    name = f"attention, {position}{forced}: {T:,} tokens, {N} heads of {H}, {part}"
    tokens = lambda: Tokens(jnp.arange(T)[None], jnp.ones((1, T), jnp.int32), order="contiguous")

    def build():
        where = tokens()
        scheme = bound(position, where, N, H, causal=True)
        inputs = Inputs(SAME_SEGMENT & CAUSAL, where, where, scheme, H**-0.5)
        shape = jax.ShapeDtypeStruct((1, T, N, H), jnp.bfloat16)
        with TRACING, record() as used:
            q, k = jax.eval_shape(scheme.rotate, shape, shape)
            attend = choose(backend, q, k, shape, inputs)
        ((chosen, why),) = used.items()
        if backend not in ("auto", chosen):
            return why

        def run(q, k, v, scheme):
            q, k = scheme.rotate(q, k)
            return attend(q, k, v, inputs.replace(position=scheme))

        def gradients(*args):
            loss = lambda *args: jnp.sum(run(*args).astype(jnp.float32) ** 2)
            return jax.grad(loss, (0, 1, 2, 3), allow_int=True)(*args)

        function = run if part == PASSES[0] else gradients
        return compiled(function, shape, shape, shape, scheme), scheme, chosen, why

    def run(built) -> Iterator[dict]:
        if isinstance(built, str):
            yield {"status": "unsupported", "why": built}
            return
        program, scheme, chosen, why = built
        qkv = [_normal(i, (1, T, N, H)) for i in range(3)]
        flops = 2.0 * N * H * T**2 * (1 if part == PASSES[0] else 3.5)  # half of all pairs
        took = timed(lambda: program(*qkv, scheme))
        yield measured(took, flops=flops, backend=chosen) | ({"why": why} if why else {})

    return Case("attention", name, build, run)


def cudnn(with_bias: bool, T: int, H: int, part: str) -> Case:
    """Returns the measurement of cuDNN's causal attention with the mask that packed documents need,
    and with a bias, as JAX offers it: with an element for each pair of tokens."""
    N, more = max(WIDTH // H, 1), ("mask", "bias")[: 1 + with_bias]
    name = f"attention, cuDNN with a {' and a '.join(more)}: {T:,} tokens, {N} heads of {H}, {part}"
    shapes = {"mask": ((1, 1, T, T), bool), "bias": ((1, N, T, T), jnp.bfloat16)}
    chosen = [shapes[x] for x in more]

    def attend(q, k, v, *arrays):
        options = dict(zip(more, arrays, strict=True), implementation="cudnn", is_causal=True)
        return jax.nn.dot_product_attention(q, k, v, **options)

    def gradients(*args):
        loss = lambda *args: jnp.sum(attend(*args).astype(jnp.float32) ** 2)
        return jax.grad(loss, (0, 1, 2, 4)[: 3 + with_bias])(*args)

    def build():
        if jax.default_backend() != "gpu":
            return None
        qkv = [((1, T, N, H), jnp.bfloat16)] * 3
        function = attend if part == PASSES[0] else gradients
        return compiled(function, *(jax.ShapeDtypeStruct(*x) for x in (*qkv, *chosen)))

    def run(program) -> Iterator[dict]:
        if program is None:
            yield {"status": "unsupported", "why": "it runs on GPUs"}
            return
        arrays = [jnp.ones(*x) for x in chosen]
        qkv = [_normal(i, (1, T, N, H)) for i in range(3)]
        flops = 2.0 * N * H * T**2 * (1 if part == PASSES[0] else 3.5)
        yield measured(timed(lambda: program(*qkv, *arrays)), flops=flops)

    return Case("attention", name, build, run)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _experiment(name: str, small: bool, **changes: str):
    """Returns an experiment of STEPS for one device."""
    file, overrides, _ = STEPS[name]
    overrides = overrides | (SMALL if small else {}) | changes | {"platform": "auto"}
    if small:
        only = {"vaswani_big": "num_encoder_layers"}.get(name, "num_kv_heads")
        overrides[f"model.{only}"] = "1"
    config = load_experiment(str(ROOT / file), overrides)
    return config, make_mesh(config.mesh, jax.devices()[:1])


def step(name: str, position: str, small: bool) -> Case:
    """Returns the measurement of a training step on random tokens."""

    def build():
        config, mesh = _experiment(name, small, **{"model.position": position})
        with TRACING, use(mesh), record() as used:
            model = build_model(config.model)
            optimizer = build_optimizer(config.optimizer, config.train.steps, config.model)
            state, shardings = abstract_state(config, model, optimizer, mesh)
            batch = batch_shapes(config, mesh)
            lowered = make_train_step(config, model, optimizer, mesh, shardings).lower(state, batch)
            flops = model_flops(config, batch, state.params)
        init = lambda: init_state(config, model, optimizer, shardings)
        return lowered.compile(), (mesh, init), batch, flops, " ".join(used)

    def run(built) -> Iterator[dict]:
        program, (mesh, init), shapes, flops, backends = built
        with use(mesh):
            state, batch = init(), {k: _fill(k, x) for k, x in shapes.items()}

            def once():
                nonlocal state
                state, metrics = program(state, batch)
                return metrics

            took = timed(once)
        tokens = sum(batch[side].size for side in ("inputs", "source") if side in batch)
        yield measured(took, tokens_per_second=tokens / took, flops=flops, backend=backends)

    sequences = STEPS[name][1]["data.batch_size"]
    return Case("step", f"training step, {name}, {sequences} sequences, {position}", build, run)


def _fill(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns one document of random tokens per sequence, for this array of a batch."""
    if name.endswith("positions"):
        x = np.broadcast_to(np.arange(shape.shape[1]), shape.shape)
    elif name.endswith(("segments", "weights")):
        x = np.ones(shape.shape)
    else:
        x = np.random.default_rng(0).integers(3, 64, shape.shape)
    return jax.device_put(x.astype(shape.dtype), shape.sharding)


def decoding(small: bool) -> list[Case]:
    """Returns the measurements of prefill, greedy decoding and beam search."""
    decoder, translator = STEPS
    sizes = (2, 16, 8) if small else (8, 1024, 128)  # sequences, prompt or source, new tokens
    return [
        _generation("prefill", decoder, *sizes, small),
        _generation("decoding", decoder, *sizes, small),
        _generation("4 beams", translator, *sizes[:1], min(sizes[1], 64), min(sizes[2], 64), small),
    ]


def _generation(kind: str, name: str, B: int, length: int, new: int, small: bool) -> Case:
    """Returns the measurement of one kind of generation, without the time to read the prompts."""

    def build():
        config, mesh = _experiment(name, small)
        model = build_model(config.model)
        tokens = jnp.asarray(np.random.default_rng(0).integers(3, 64, (B, length)), jnp.int32)
        limits, keys = jnp.full(B, new), jax.random.split(jax.random.key(0), B)
        sides = [tokens[:, :1]] * len(config.model.sides)
        no_eos = {"max_new": new, "eos_id": 2, "suppress_tokens": [2]}
        functions = {"prefill": lambda params: prefill(model, params, tokens, length + new)}
        if kind == "decoding":
            functions[kind] = lambda params: sample(model, params, tokens, limits, keys, **no_eos)
        if kind == "4 beams":
            functions = {
                kind: lambda params: beam_search(
                    model,
                    params,
                    tokens[:, :1],
                    limits,
                    beam_size=4,
                    alpha=0.6,
                    source_BxS=tokens,
                    **no_eos,
                )
            }
        with use(mesh):
            init = compiled(lambda: model.init(jax.random.key(0), *sides))
            shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *sides))
            return init, {k: compiled(f, shapes) for k, f in functions.items()}, mesh

    def run(built) -> Iterator[dict]:
        init, functions, mesh = built
        with use(mesh):
            params = init()
            took = {k: timed(functools.partial(f, params), 3) for k, f in functions.items()}
        seconds, tokens = took[kind], B * (length if kind == "prefill" else new)
        if kind == "decoding":  # the last token is not read
            seconds, tokens = seconds - took["prefill"], B * (new - 1)
        yield measured(seconds, tokens_per_second=tokens / seconds)

    sizes = f"{B} sequences of {length:,} tokens"
    detail = sizes if kind == "prefill" else f"{new} tokens after {sizes}"
    return Case("decoding", f"{kind}, {name}: {detail}", build, run)
