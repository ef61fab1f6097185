"""Test setup: eight simulated devices, a shared compilation cache, and small models."""

import contextlib
import functools
import gc
import os
import threading
from pathlib import Path

from xla_flags import known_flags

os.environ["XLA_FLAGS"] = f"{known_flags()} {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests create their models; none is downloaded
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch's threads would wait for each other
# Also for the processes that tests start. Each program is compiled once.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get(
    "TRANSFORMER_TEST_CACHE", "/tmp/transformer-test-cache"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax._src.interpreters import mlir

from transformer import ModelConfig, UserError, build_model
from transformer.config import Experiment
from transformer.decoding.prefill import prefill
from transformer.mapping import from_mapping
from transformer.model.attention_backends import BACKENDS
from transformer.model.network import abstract_params
from transformer.model.positions import SCHEMES

jax.config.update("jax_numpy_rank_promotion", "allow")


def share_contexts(count: int = 100) -> None:
    """Lets each thread lower `count` programs in one MLIR context, and the next ones in another.

    JAX 0.10 creates a context for each program and loads all dialects into it. For a small program,
    such as a single operation, this takes longer than to lower it. JAX 0.11 uses a context ten
    times.
    """
    make, own = mlir.make_ir_context, threading.local()

    def shared():
        own.number = getattr(own, "number", -1) + 1
        if own.number % count == 0:
            own.context = make()
        return own.context

    mlir.make_ir_context = shared


share_contexts()


LONGEST = (
    "test_training", "test_processes", "test_oracle", "test_model", "test_flash", "test_docs",
    "test_bucket_runs", "test_mixers", "test_extending", "test_convert", "test_kernel_cycles",
    "test_evaluators", "test_runs", "test_parametrizations", "test_attention_backends", "test_lab",
    "test_planned_kernels",
)  # fmt: skip
"""The files that take longest, which are run first so that all workers end at the same time."""


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish(session):
    """Makes garbage collection rare. Tracing allocates many objects, and a fifth of its time was
    spent looking for garbage among them."""
    jnp.zeros(1)  # JAX decides to use its compilation cache, which a plan later disables
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # the default is 700, 10, 10


SMALL = {
    "vocab_size": 37, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_kv_heads": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 24,
}  # fmt: skip

TINY = {
    "vocab_size": 40, "d_model": 16, "d_ff": 32, "num_heads": 4,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 16,
}  # fmt: skip
"""Sizes of the models that tests train; divisible by every mesh of eight devices."""


GENERAL_BACKENDS = [name for name in BACKENDS if name not in ("ring", "flash")]
"""Attention backends that need no mesh and support any sequence length and head size."""


def model_fields(family: str, sizes: dict = TINY, **fields) -> dict:
    """Returns the fields of a small model: the `sizes` that affect its family, and `fields`."""
    sides = [side for side in ("encoder", "decoder") if side in family]
    absent = {"num_encoder_layers", "num_decoder_layers"} - {f"num_{s}_layers" for s in sides}
    effective = {name: value for name, value in sizes.items() if name not in absent}
    return {"family": family, **effective, **fields}


def small(family: str, **fields) -> ModelConfig:
    """Returns the config of a model of a few thousand parameters.

    The placement "hybrid_norm" gets the norms that it needs in attention.
    """
    if fields.get("norm_placement") == "hybrid_norm":
        fields = {"qk_norm": True, "v_norm": True} | fields
    return ModelConfig(**model_fields(family, SMALL, **fields))


def unrolled(family: str, **fields) -> ModelConfig:
    """Returns the config of a small model with unrolled layers, to run operation by operation.

    JAX compiles each operation once for all tests with arrays of the same shapes, but a jitted
    function or a scan anew for each model. This is faster where many tests share shapes.
    """
    return small(family, scan_layers=False, **fields)


def jit_if_scanned(model, function):
    """Returns the function, jitted if the model scans its layers; see `unrolled`."""
    return jax.jit(function) if model.config.scan_layers else function


def schemes(*families: str) -> list[tuple[str, str]]:
    """Returns (family, position) for each scheme a family supports; some need a causal mask."""
    supported = []
    for family in families:
        for position in SCHEMES:
            with contextlib.suppress(UserError):
                small(family, position=position)
                supported.append((family, position))
    return supported


def tokens(seed: int, batch: int, length: int, vocab: int = 37) -> jax.Array:
    """Returns random token ids, none of them a special token."""
    return jnp.asarray(np.random.default_rng(seed).integers(4, vocab, (batch, length)), jnp.int32)


@functools.lru_cache(maxsize=256)
def shapes_of_params(config: ModelConfig):
    """Returns the same as `abstract_params`, without tracing the initial values."""

    def param(module, name, init, *shape_and_dtype):
        return module.variable("params", name, jnp.zeros, *shape_and_dtype).value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "param", param)
        return abstract_params.__wrapped__(config)


def make(config: ModelConfig, seed: int = 0, noise: float = 0.3):
    """Returns (model, params) with random parameters: gains near 1, all others near 0.

    With these values gains, offsets, biases, gates and tables affect the results. Nothing is
    compiled: compiling the initialization takes longer than the rest of a test.
    """
    abstract, draw = shapes_of_params(config), drawing(config, seed, noise)
    draw_at = lambda path, x: draw(path[-1].key, x.shape, x.dtype)
    return build_model(config), jax.tree_util.tree_map_with_path(draw_at, abstract)


def drawing(config: ModelConfig, seed: int, noise: float):
    """Returns draw(name, shape, dtype), which returns the random values of the next parameter."""
    generator = np.random.default_rng(seed)

    def draw(name, shape, dtype="float32"):
        mean = 1.0 if name == "gain" and not config.norm_zero_centered else 0.0
        return jnp.asarray(mean + noise * generator.standard_normal(shape), dtype)

    return draw


def run_random(config: ModelConfig, *inputs, **options):
    """Returns (logits, params) of a model with random parameters, as `make` draws them.

    Each parameter is drawn when the model first reads it, so that nothing has to be traced before.
    """
    # With seed 0, one token (FIRE, hyper-connections) is too ill-conditioned for the tolerance.
    draw = drawing(config, seed=1, noise=0.3)

    def param(module, name, init, *shape_and_dtype):
        return module.variable("params", name, draw, name, *shape_and_dtype).value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "param", param)
        model = build_model(config)
        run = nn.Module.init_with_output
        logits, variables = run(model, jax.random.key(0), *inputs, **options)
    return logits, variables["params"]


def init_model(config: ModelConfig, seed: int = 0):
    """Returns (model, params) with the parameters that training starts from."""
    model, args = build_model(config), [jnp.zeros((1, 1), jnp.int32)] * len(config.sides)
    return model, jax.jit(model.init)(jax.random.key(seed), *args)


def masks(*sides) -> dict:
    """Returns the padding masks of tokens, or of source and target, whose padding is 0."""
    names = ("source_padding_mask", "padding_mask")[-len(sides) :]
    return {name: x != 0 for name, x in zip(names, sides, strict=True)}


def start_decoding(model, params, prompt, slots: int, source=None):
    """Returns (logits, cache) after the prompt, from `prefill`.

    Padding in the prompt and the source is 0.
    """

    def run(params, prompt, source):
        return prefill(model, params, prompt, slots, source, *(x != 0 for x in padded))

    padded = (prompt,) if source is None else (prompt, source)
    return jit_if_scanned(model, run)(params, prompt, source)


def pytest_sessionfinish(session, exitstatus):
    """Fails a run in which no test was executed, whatever ended it.

    A worker that XLA terminates reports nothing.
    """
    is_worker = hasattr(session.config, "workerinput")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if is_worker or reporter is None or session.config.option.collectonly:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error")):
        reporter.write_line("no test was executed", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def isolate_data_home(tmp_path_factory, monkeypatch):
    """Keeps token stores out of the user's cache; the tests of a session share them."""
    monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path_factory.getbasetemp() / "data"))


@pytest.fixture
def isolate_registries(monkeypatch):
    """Forgets the classes that a test's experiment files register."""
    from transformer import EVALUATORS, OBJECTIVES

    for registry in (EVALUATORS, OBJECTIVES):
        monkeypatch.setattr(registry, "_classes", dict(registry))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Texts, each with a label (does it mention a cat?) and a tag per word (is it an animal?)."""
    folder = tmp_path_factory.mktemp("text")
    words, rng = (
        ["cat", "dog", "house", "runs", "sleeps", "wonderful", "the", "under", "seldom"],
        np.random.default_rng(0),
    )
    texts = {" ".join(rng.choice(words, rng.integers(3, 14))) for _ in range(900)}
    texts = [f"{text} {i % 7}{i // 7}" for i, text in enumerate(sorted(texts))]
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "label.tsv").write_text(
        "\n".join(f"{t}\t{'cat' if 'cat' in t else 'none'}" for t in texts)
    )
    tag = lambda word: "animal" if word in ("cat", "dog") else "other"
    (folder / "tags.tsv").write_text(
        "\n".join(f"{t}\t{' '.join(map(tag, t.split()))}" for t in texts)
    )
    (folder / "answers.tsv").write_text("\n".join(f"{t}\t{answer_tags(t)}" for t in texts))
    return folder


def answer_tags(text: str) -> str:
    """Returns the tags of words: "answer" for the first "cat" and animals after it, or "-"."""
    words = text.split()
    first = words.index("cat") if "cat" in words else len(words)
    after = [n for n in range(first, len(words)) if words[n] not in ("cat", "dog")]
    last = after[0] if after else len(words)
    return " ".join("answer" if first <= n < last else "-" for n in range(len(words)))


@pytest.fixture
def run_config():
    """The experiment of a small language model, trained for 12 steps on two devices."""
    return from_mapping(
        Experiment,
        {
            "model": model_fields("decoder", vocab_size=512, dropout=0.1, max_length=32),
            "data": {
                "corpus": "pydoc",
                "length": 32,
                "batch_size": 8,
                "held_out": 4,
                "tokenizer": {"kind": "bpe"},
            },
            "optimizer": {"warmup_steps": 5},
            "mesh": {"data": 2},
            "train": {
                "steps": 12,
                "log_every": 4,
                "eval_every": 6,
                "eval_batches": 3,
                "checkpoint_every": 5,
                "keep_checkpoints": 4,
                "tensorboard": False,
                "ema_decay": 0.9,
            },
        },
    )


@pytest.fixture
def fake_tool(tmp_path):
    """Writes fake programs: tools("gcloud", script) returns the folder to add to PATH."""

    def write(name: str, script: str) -> Path:
        (tmp_path / name).write_text("#!/bin/bash\n" + script)
        (tmp_path / name).chmod(0o755)
        return tmp_path

    return write
