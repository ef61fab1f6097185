"""Every field outside the model, and every option of objectives, has an effect.

test_fields.py describes the method.
"""

import dataclasses
import hashlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fields import (
    BOTH,
    DECODER,
    ENCODER,
    MODEL,
    SPECIAL_TOKENS,
    fields_without_effect,
    program_text,
)

from transformer import ModelConfig, build_model
from transformer.config import (
    DataConfig,
    DecodingConfig,
    Experiment,
    MeshConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer.data.objectives import OBJECTIVES
from transformer.data.objectives.base import Objective
from transformer.data.pipeline import Data
from transformer.data.store import RawText, Texts
from transformer.data.tokenizer import SentencePiece, train_tokenizer
from transformer.decoding.generate import Generator
from transformer.decoding.prefill import decode
from transformer.mapping import from_mapping
from transformer.model.network import abstract_params
from transformer.parallel.mesh import make_mesh, use
from transformer.planning.programs import batch_shapes
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state
from transformer.training.step import batch_sums, training_step

IN_A_RUN = {
    "model.pipeline_microbatches": "rejected without pipeline stages; see tests/test_sharding.py",
    "data.corpus": "selects other files: transformer/data/corpora.py",
    "data.mixture": "which texts are read, and how often: tests/test_mixture.py",
    "data.mixture_temperature": "how often each text is read: tests/test_mixture.py",
    "data.tokenizer": "has its own table",
    "mesh.slices": "needs several TPU slices: transformer/parallel/mesh.py, arrange",
    "train.average_checkpoints": "which parameters are evaluated: tests/test_training.py",
    "train.init_from": "the source of the parameters: tests/test_initialize.py",
    "train.init_new": "which parameters are newly initialized: tests/test_initialize.py",
    "train.init_drop": "which parameters are left out: tests/test_initialize.py",
    "train.init_positions": "how a position table is resized: tests/test_initialize.py",
    "train.init_kv_heads": "how heads are averaged: tests/test_initialize.py",
    "train.init_encoder": "what an encoder starts from: tests/test_initialize.py",
    "train.log_every": "which lines metrics.jsonl contains",
    "train.eval_every": "which lines metrics.jsonl contains",
    "train.eval_batches": "how many batches eval/loss covers",
    "train.evaluators": "has its own table",
    "train.checkpoint_every": "which checkpoints are written",
    "train.keep_checkpoints": "which checkpoints are kept",
    "train.strict_checkpoints": "whether a damaged checkpoint is an error: "
    "tests/faults/test_checkpoints.py",
    "train.tensorboard": "whether event files are written",
    "train.wandb": "where metrics are sent",
    "train.profile": "whether a trace is written",
    "train.step_deadline": "how long a step may take: tests/test_watchdog.py",
    "platform": "on which platform the run may start",
    "seed": "the key of initialization, dropout and data order: tests/test_training.py",
    **{
        name: "has its own table"
        for name in ("model", "data", "optimizer", "train", "decoding", "mesh")
    },
}
"""Fields that affect the files or the start of a run, and their effects.

Programs and batches do not depend on them.
"""


def unlisted_fields(section: str, cls, table: dict) -> set[str]:
    """Returns the fields of a config that are neither in its table nor in IN_A_RUN."""
    path = section and section + "."
    return {
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in table and path + f.name not in IN_A_RUN
    }


def test_every_field_has_an_entry():
    tables = {
        "model": (ModelConfig, MODEL | SPECIAL_TOKENS), "data": (DataConfig, DATA),
        "data.tokenizer": (TokenizerConfig, TOKENIZER), "optimizer": (OptimizerConfig, OPTIMIZER),
        "mesh": (MeshConfig, MESH), "train": (TrainConfig, TRAIN),
        "decoding": (DecodingConfig, DECODING), "": (Experiment, {}),
    }  # fmt: skip
    assert {section: unlisted_fields(section, *entry) for section, entry in tables.items()} == {
        section: set() for section in tables
    }
    assert OBJECTIVE.keys() <= OBJECTIVES.keys()


# ---- Data: the batches


FILES = {"train": "text.tsv", "valid": "", "test": "", "format": "tsv"}
LM = {"length": 12, "batch_size": 2, "held_out": 5, "fields": ("0",)}
PAIRS = LM | {"objective": "seq2seq", "length": 24, "fields": ()}
DOCUMENTS = LM | {"format": "documents", "fields": (), "held_out": 1000}
DOCUMENTS |= {"valid": "more.tsv", "test": "more.tsv"}

DATA = {
    "format": ("text", DOCUMENTS), "train": "more.tsv", "valid": "more.tsv", "test": "more.tsv",
    "fields": (("1",), LM), "reverse": (True, PAIRS),
    "objective": ("prefix_lm", LM), "length": 16, "target_length": (12, PAIRS), "batch_size": 3,
    "packing": False, "buckets": ((6, 12), LM | {"packing": False}), "too_long": ("cut", PAIRS),
    "eval_overlap": 4, "held_out": 7, "max_examples": 9,
}  # fmt: skip


class CharacterStore:
    """A text store with one id per character."""

    def __init__(self, config):
        self.text = RawText(config.data)
        self.tokenizer = types.SimpleNamespace(
            vocab_size=60,
            bos=1,
            eos=2,
            pad=0,
            mask=None,
            source_prefix_ids=[],
            text_ids=np.arange(4, 60),
            starts_word=np.arange(60) % 3 == 0,
            find=lambda piece: None,
        )

    def texts(self, part, side):
        examples = self.text.train() if part == "train" else self.text.read(part)
        ids = [[*(4 + ord(c) % 50 for c in example[side]), 2] for example in examples]
        return Texts(np.concatenate(ids).astype(np.int32), np.cumsum([len(text) for text in ids]))


def open_tree(tree: dict) -> tuple[Experiment, Data]:
    """Returns the experiment and the data of a DataConfig, given as a tree."""
    objective = tree.get("objective", "causal_lm")
    name = objective if isinstance(objective, str) else objective["name"]
    families = OBJECTIVES[name].families
    model = {"decoder": DECODER, "encoder": ENCODER}.get(families[0], BOTH)
    if "encoder_decoder" in families:
        model = BOTH
    if name == "prefix_lm":
        model = DECODER | {"prefix_lm": True}
    if "next_sentence" in objective:
        model = model | {"token_types": 2, "num_labels": 2, "pooling": "cls"}
    config = from_mapping(
        Experiment, {"model": model | {"max_length": 64, "vocab_size": 400}, "data": FILES | tree}
    )
    return config, Data(config, {"": CharacterStore(config)})


def batches_text(tree: dict) -> str:
    """Returns the first batches of each split, and the number of batches."""
    config, data = open_tree(tree)
    values = [config.objective.reserved]
    for part in ("train", "valid", "test"):
        batches = data.batches(part)
        values += [len(batches), batches.per_epoch] + [
            (name, x.shape, x.tobytes())
            for n in range(min(3, len(batches)))
            for name, x in batches[n].items()
        ]
    return repr(values)


def losses_text(tree: dict) -> str:
    """Returns the program that computes the losses of a batch."""
    config, data = open_tree(tree)
    model, params = build_model(config.model), abstract_params(config.model)
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        losses = lambda params, batch: batch_sums(model, params, batch, config, mesh)
        return str(jax.make_jaxpr(losses)(params, data.batches("train")[0]))


@pytest.fixture
def text_files(tmp_path, monkeypatch):
    """Writes two files of word pairs to a new folder, and changes to this folder."""

    def write(name: str, seed: int) -> None:
        generator = np.random.default_rng(seed)
        word = lambda: "".join(generator.choice(list("abcdefghij"), generator.integers(3, 16)))
        lines = [f"{word()} {word()}\t{word()}" for _ in range(60)]
        (tmp_path / name).write_text("\n".join(lines))

    write("text.tsv", 0)
    write("more.tsv", 1)
    monkeypatch.chdir(tmp_path)


def test_every_data_field_has_an_effect(text_files):
    tree = {"objective": "causal_lm"}
    table = {
        f: x if isinstance(x, tuple) and isinstance(x[-1], dict) else (x, LM)
        for f, x in DATA.items()
    }
    assert not fields_without_effect(
        {f: (x, tree | base) for f, (x, base) in table.items()}, batches_text, LM
    )


OBJECTIVE = {"masked_lm": {"mask": 0.2}}
"""Option values, where twice the default is not valid."""


def another_value(value):
    return not value if isinstance(value, bool) else 2 * value or 1


def test_every_objective_option_has_an_effect(text_files):
    """An option changes the batches or, if the objective has its own losses, their program."""
    unused = []
    for name, cls in OBJECTIVES.items():
        for field in dataclasses.fields(cls):
            value = OBJECTIVE.get(name, {}).get(field.name, another_value(field.default))
            tree = LM | {"length": 32, "packing": field.name != "next_sentence"}
            trees = [tree | {"objective": x} for x in (name, {"name": name, field.name: value})]
            differs = len(set(map(batches_text, trees))) == 2
            if not differs and cls.losses is not Objective.losses:
                differs = len(set(map(losses_text, trees))) == 2
            unused += [] if differs else [f"{name}.{field.name}"]
    assert not unused


TOKENIZER = {
    "kind": "bpe", "path": "other.model", "pad_id": (5, {"path": "some.model"}),
    "bos_id": (5, {"path": "some.model"}), "eos_id": (5, {"path": "some.model"}),
    "source_bos_id": (5, {"path": "some.model"}), "byte_fallback": False,
    "character_coverage": 0.99, "max_sentences": 40,
}  # fmt: skip


def test_every_tokenizer_field_has_an_effect():
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefghé"), 6)) for _ in range(80)] + ["ñandú"]
    trained = {
        name: train_tokenizer(TokenizerConfig(), size, words).content
        for name, size in (("some.model", 300), ("other.model", 310))
    }

    def of_tokenizer(tree):
        config = TokenizerConfig(**tree)
        if config.path:
            tokenizer = SentencePiece(trained[config.path], config)
            tokens = (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.source_prefix_ids)
            return repr((tokens, len(trained[config.path])))
        return hashlib.sha256(
            train_tokenizer(config, 300 if config.byte_fallback else 60, words).content
        ).hexdigest()

    assert not fields_without_effect(TOKENIZER, of_tokenizer, {})


# ---- Programs other than the forward pass


OPTIMIZER = {
    "name": "lion", "learning_rate": 2e-3, "schedule": "linear", "warmup_steps": 7,
    "decay_fraction": (0.5, {"schedule": "wsd"}),
    "decay_ends": ((1500,), {"schedule": "wsd"}), "final_fraction": 0.5, "b1": 0.8, "b2": 0.9,
    "epsilon": 1e-6, "momentum": (0.5, {"name": "sgd"}), "weight_decay": 0.1, "clip_norm": 1.0,
}  # fmt: skip


def test_every_optimizer_field_has_an_effect():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}

    def of_update(tree):
        optimizer = build_optimizer(OptimizerConfig(**tree), 2000, ModelConfig(**DECODER))
        return program_text(
            optimizer.update, params, jax.eval_shape(optimizer.init, params), params
        )

    assert not fields_without_effect(OPTIMIZER, of_update, {})


TRAIN = {"steps": 50, "label_smoothing": 0.1, "z_loss": 0.1, "accumulate": 2, "ema_decay": 0.9}


def test_every_train_field_that_a_step_reads_has_an_effect():
    def of_step(tree):
        tree = {
            "model": DECODER,
            "data": {"corpus": "pydoc", "length": 4, "batch_size": 2},
            "optimizer": {"warmup_steps": 3},
            "train": tree,
        }
        config = from_mapping(Experiment, tree)
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, config.train.steps, config.model),
        )
        with use(make_mesh(MeshConfig(data=1))) as mesh:
            state, _ = abstract_state(config, model, optimizer, mesh)
            return program_text(
                training_step(config, model, optimizer, mesh), state, batch_shapes(config, mesh)
            )

    assert not fields_without_effect(TRAIN, of_step, {})


DECODING = {
    "beam_size": 2, "length_penalty": (1.0, {"beam_size": 2}), "temperature": 0.5,
    "top_k": (3, {"temperature": 1.0}), "top_p": (0.5, {"temperature": 1.0}), "max_extra": 3,
    "batch_size": 2,
}  # fmt: skip


def test_every_decoding_field_has_an_effect():
    special_tokens = types.SimpleNamespace(pad=0, bos=1, eos=2, source_prefix_ids=[])
    params = jax.eval_shape(
        build_model(ModelConfig(**DECODER)).init, jax.random.key(0), jnp.ones((1, 4), jnp.int32)
    )

    def of_decoding(tree):
        config = from_mapping(
            Experiment,
            {
                "model": DECODER,
                "data": {"corpus": "pydoc", "length": 4},
                "decoding": {"max_extra": 4, "batch_size": 1} | tree,
            },
        )
        generate = Generator(config, params, special_tokens)
        batch = config.decoding.batch_size
        shape = lambda dtype, *length: jax.ShapeDtypeStruct((batch, *length), dtype)
        inputs = shape(jnp.int32, 4), shape(bool, 4), shape(jnp.int32), shape(jnp.uint32)

        def run(params, *inputs):
            state, search = generate._begin(params, *inputs), generate._search
            length = search.texts(state).shape[1]
            return decode(search, generate._model, params, state, length)

        return program_text(run, params, *inputs)

    assert not fields_without_effect(DECODING, of_decoding, {})


MESH = {"data": 2, "stage": 2, "fsdp": 2, "expert": 2, "context": 2, "tensor": 2}


def test_every_mesh_axis_has_an_effect():
    assert not fields_without_effect(
        MESH, lambda tree: repr(make_mesh(MeshConfig(**tree)).shape), {"data": 1}
    )
