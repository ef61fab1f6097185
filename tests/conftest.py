"""Eight simulated devices, a shared compilation cache, and small models."""

import contextlib
import os

from xla_flags import known_flags

os.environ["XLA_FLAGS"] = f"{known_flags()} {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # models are made here, none is fetched

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from transformer import ModelConfig, UserError, build_model
from transformer.config import Experiment
from transformer.decoding.prefill import prefill
from transformer.mapping import from_mapping
from transformer.model.attention_backends import BACKENDS
from transformer.model.positions import SCHEMES

jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("TRANSFORMER_TEST_CACHE", "/tmp/transformer-test-cache"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_numpy_rank_promotion", "allow")

SMALL = {
    "vocab_size": 37, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_kv_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 24,
}  # fmt: skip

TINY = {
    "vocab_size": 40, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 16,
}  # fmt: skip
"""The sizes of models that tests train: divisible by every mesh of eight devices."""


ALONE = [name for name in BACKENDS if name not in ("ring", "splash", "cudnn")]
"""Attention backends that need no mesh, and serve tokens and heads of any size."""


def sized(family: str, sizes: dict = TINY, **fields) -> dict:
    """The fields of a small model: those of `sizes` that have an effect in its family, and `fields`."""
    sides = [side for side in ("encoder", "decoder") if side in family]
    absent = {"num_encoder_layers", "num_decoder_layers"} - {f"num_{s}_layers" for s in sides}
    kept = {name: value for name, value in sizes.items() if name not in absent}
    return {"family": family, **kept, **fields}


def small(family: str, **fields) -> ModelConfig:
    """A model of a few thousand parameters."""
    return ModelConfig(**sized(family, SMALL, **fields))


def schemes(*families: str) -> list[tuple[str, str]]:
    """(family, position) for every scheme that serves it: some need a causal mask."""
    served = []
    for family in families:
        for name in SCHEMES:
            with contextlib.suppress(UserError):
                small(family, position=name)
                served.append((family, name))
    return served


def tokens(seed: int, batch: int, length: int, vocab: int = 37) -> jax.Array:
    """Random ids, none of them special."""
    return jnp.asarray(np.random.default_rng(seed).integers(4, vocab, (batch, length)), jnp.int32)


def make(config: ModelConfig, seed: int = 0, noise: float = 0.3):
    """(model, params) of random numbers: gains near 1, everything else near 0, so that gains, offsets, biases, gates and tables
    matter. Nothing is compiled: an initialisation takes longer to compile than all the rest of a test."""
    model, args = (
        build_model(config),
        (jnp.zeros((1, 1), jnp.int32),) * (1 + (config.is_encoder_decoder)),
    )
    abstract = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *args))
    generator = np.random.default_rng(seed)

    def draw(path, x):
        start = 1.0 if path[-1].key == "gain" and not config.norm_zero_centered else 0.0
        return jnp.asarray(start + noise * generator.standard_normal(x.shape), x.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, abstract)


def initialised(config: ModelConfig, seed: int = 0):
    """(model, params) as training starts with them."""
    model, args = (
        build_model(config),
        (jnp.zeros((1, 1), jnp.int32),) * (1 + (config.is_encoder_decoder)),
    )
    return model, meta.unbox(jax.jit(model.init)(jax.random.key(seed), *args))


def masks(*sides) -> dict:
    """The padding masks of tokens, or of source and target, that a test has padded with 0."""
    names = ("source_padding_mask", "padding_mask")[-len(sides) :]
    return {name: x != 0 for name, x in zip(names, sides, strict=True)}


def start_decoding(model, params, prompt, slots: int, source=None):
    """(logits, memory) after the prompt, as `prefill` gives them, compiled as one program. What was padded, was with 0."""

    def run(params, prompt, source):
        return prefill(model, params, prompt, slots, source, *(x != 0 for x in given))

    given = (prompt,) if source is None else (prompt, source)
    return jax.jit(run)(params["params"], prompt, source)


def pytest_sessionfinish(session, exitstatus):
    """A run in which no test was executed has failed, whatever ended it (a worker that XLA ends says nothing)."""
    is_worker = hasattr(session.config, "workerinput")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if is_worker or reporter is None or session.config.option.collectonly:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error")):
        reporter.write_line("no test was executed", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def own_data_home(tmp_path_factory, monkeypatch):
    """Token stores of tests stay out of the user's cache, and are shared between tests of one session."""
    monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path_factory.getbasetemp() / "data"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Texts, each with a label (does it speak of a cat?) and tags (is the word an animal?)."""
    folder = tmp_path_factory.mktemp("text")
    words, draw = (
        ["cat", "dog", "house", "runs", "sleeps", "wonderful", "the", "under", "seldom"],
        np.random.default_rng(0),
    )
    texts = {" ".join(draw.choice(words, draw.integers(3, 14))) for _ in range(900)}
    texts = [f"{text} {i % 7}{i // 7}" for i, text in enumerate(sorted(texts))]
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "label.tsv").write_text(
        "\n".join(f"{t}\t{'cat' if 'cat' in t else 'none'}" for t in texts)
    )
    tag = lambda word: "animal" if word in ("cat", "dog") else "other"
    (folder / "tags.tsv").write_text(
        "\n".join(f"{t}\t{' '.join(map(tag, t.split()))}" for t in texts)
    )
    return folder


@pytest.fixture
def run_config():
    """A small language model, to be trained for 12 steps on two devices."""
    return from_mapping(Experiment, {
        "model": sized("decoder", vocab_size=512, dropout=0.1, max_length=32),
        "data": {"corpus": "pydoc", "length": 32, "batch_size": 8, "held_out": 4, "tokenizer": {"kind": "bpe"}},
        "optimizer": {"warmup_steps": 5}, "mesh": {"data": 2},
        "train": {"steps": 12, "log_every": 4, "eval_every": 6, "eval_batches": 3, "checkpoint_every": 5, "keep_checkpoints": 4, "tensorboard": False, "ema_decay": 0.9},
    })  # fmt: skip
