"""Conversion of Hugging Face directories to runs and back.

A converted run generates what PyTorch generates, and can initialize training.
"""

import dataclasses
import json
import resource
from pathlib import Path

import jax
import numpy as np
import pytest
from exchange_models import TEXTS, bart, bert, gpt2, marian, save, t5

from transformer import cli, load_hf
from transformer.config import Experiment, MeshConfig
from transformer.decoding.generate import Generator
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import evaluate, load_trained
from transformer.runs.loop import train
from transformer.runs.rundir import load_config

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")
tokenizers = pytest.importorskip("tokenizers", reason="the test extra brings it")


def convert(*args) -> None:
    assert cli.main(["convert", *map(str, args)]) == 0


def run_generation(workdir: Path, texts: list[str], **decoding) -> tuple[list[str], Generator]:
    config = load_config(workdir)
    config = dataclasses.replace(
        config, decoding=dataclasses.replace(config.decoding, max_extra=8, batch_size=4, **decoding)
    )
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        trained = load_trained(workdir, config, mesh)
        generate = Generator(config, trained.params, trained.tokenizer)
        return generate(texts), trained


def test_decoder_generates_like_pytorch(gpt2, tmp_path):
    convert(f"--from={gpt2}", f"--workdir={tmp_path / 'run'}")
    prompts = ["the cat", "my friend sings", "!a dog"]
    continuations, trained = run_generation(tmp_path / "run", prompts)
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2).eval()
    eos = model.config.eos_token_id
    assert (trained.tokenizer.pad, trained.tokenizer.bos, trained.tokenizer.eos) == (eos, eos, eos)
    for prompt, answer in zip(prompts, continuations, strict=True):
        ids = [eos, *trained.tokenizer.encode([prompt])[0]]
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=eos
            )[0, len(ids) :]
        assert answer == trained.tokenizer.decode([*ids[1:], *out.tolist()])[len(prompt) :]
    assert len(set(continuations)) == 3 and all(continuations)


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoder_generates_like_pytorch(t5, tmp_path, beams):
    convert(f"--from={t5}", f"--workdir={tmp_path / 'run'}", "--config.model.scan_layers=False")
    sources = ["the cat sleeps", "a dog runs at home"]
    decoding = {"beam_size": beams, "length_penalty": 0.0} if beams > 1 else {}
    ours, trained = run_generation(tmp_path / "run", sources, **decoding)
    assert (trained.tokenizer.pad, trained.tokenizer.bos, trained.tokenizer.eos) == (0, 0, 1)
    assert not trained.config.model.scan_layers
    model = transformers.T5ForConditionalGeneration.from_pretrained(t5).eval()
    for source, answer in zip(sources, ours, strict=True):
        ids = [*trained.tokenizer.encode([source])[0], 1]
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=len(ids) + 8,
                do_sample=False,
                num_beams=beams,
                length_penalty=0.0,
                bad_words_ids=[[0]],
            )[0, 1:]
        assert answer == trained.tokenizer.decode(out.tolist())
    assert all(ours)


def pytorch_greedy(model, ids: list[int], pad: int, extra: int = 8) -> list[int]:
    """Returns the greedy output of PyTorch, without the start token of the decoder."""
    with torch.no_grad():
        options = {
            "max_new_tokens": len(ids) + extra,
            "do_sample": False,
            "num_beams": 1,
            "bad_words_ids": [[pad]],
        }
        return model.generate(torch.tensor([ids]), **options)[0, 1:].tolist()


def test_tokenizer_pair_round_trips(marian, tmp_path):
    convert(f"--from={marian}", f"--workdir={tmp_path / 'run'}")
    sources = ["the cat sleeps", ">>deu<< a dog runs at home", "zebra"]
    ours, trained = run_generation(tmp_path / "run", sources)
    reference = transformers.MarianTokenizer.from_pretrained(marian)
    assert trained.tokenizer.encode(sources) == [reference(s)["input_ids"][:-1] for s in sources]
    assert trained.tokenizer.encode(sources) != trained.tokenizer.encode_targets(sources)
    targets = ["THE CAT SLEEPS", "A DOG"]
    assert trained.tokenizer.encode_targets(targets) == [
        reference(text_target=t)["input_ids"][:-1] for t in targets
    ]
    model, pad = transformers.MarianMTModel.from_pretrained(marian).eval(), reference.pad_token_id
    for source, answer in zip(sources, ours, strict=True):
        assert answer == reference.decode(
            pytorch_greedy(model, reference(source)["input_ids"], pad), skip_special_tokens=True
        )
    assert any(ours)
    convert(f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'back'}")
    exported = transformers.MarianTokenizer.from_pretrained(tmp_path / "back")
    assert exported(sources)["input_ids"] == reference(sources)["input_ids"]


def test_source_begins_with_bos(bart, tmp_path):
    convert(f"--from={bart}", f"--workdir={tmp_path / 'run'}")
    sources = ["the cat sleeps", "a dog runs at home"]
    ours, trained = run_generation(tmp_path / "run", sources)
    assert trained.tokenizer.source_prefix_ids == [0] and trained.tokenizer.bos == 2
    model = transformers.BartForConditionalGeneration.from_pretrained(bart).eval()
    for source, answer in zip(sources, ours, strict=True):
        ids = trained.tokenizer.encode([source])[0]
        assert pytorch_greedy(model, [*ids, 2], 1) != pytorch_greedy(model, [0, *ids, 2], 1)
        assert answer == trained.tokenizer.decode(pytorch_greedy(model, [0, *ids, 2], 1))
    convert(f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'back'}")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["bos_token_id"], config["decoder_start_token_id"], config["eos_token_id"]) == (
        0,
        2,
        2,
    )


def test_converted_run_initializes_training_in_another_directory(bert, tmp_path):
    run, mesh = tmp_path / "run", ("--config.mesh.fsdp=2", "--config.mesh.data=1")
    convert(f"--from={bert}", f"--workdir={run}", *mesh)
    source = load_config(run)
    vocabulary = json.loads((bert / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "text.txt").write_text("".join(f"{t} {i}\n" for i in range(8) for t in TEXTS))
    (tmp_path / "label.tsv").write_text(
        "".join(f"{t} {i}\t{t.split()[1]}\n" for i in range(8) for t in TEXTS)
    )

    def experiment(objective, file, format, model, **train_fields):
        data = {
            "objective": objective, "train": str(tmp_path / file), "format": format,
            "length": 32, "batch_size": 8, "held_out": 10, "packing": False,
            "tokenizer": {"path": str(run / "tokenizer.json")},
        }  # fmt: skip
        return from_mapping(Experiment, {
            "model": {**vars(source.model), **model}, "data": data, "mesh": {"data": 1},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
            "train": {"steps": 4, "tensorboard": False, "init_from": str(run), **train_fields},
        })  # fmt: skip

    masked = experiment("masked_lm", "text.txt", "text", {})
    assert train(masked, tmp_path / "masked") == 4
    from transformer.data.pipeline import open_data

    data = open_data(masked)
    assert data.tokenizer.mask == vocabulary["[MASK]"]
    assert (data.batches("train")[0]["inputs"] == vocabulary["[MASK]"]).any()
    assert (data.tokenizer.bos, data.tokenizer.eos, data.tokenizer.pad) == (
        vocabulary["[CLS]"],
        vocabulary["[SEP]"],
        vocabulary["[PAD]"],
    )
    classes = len({t.split()[1] for t in TEXTS})
    head_fields = {
        "num_labels": classes, "pooling": "cls", "lm_head": False, "head_transform": False,
        "logit_bias": False,
    }  # fmt: skip
    labels = experiment(
        "classification",
        "label.tsv",
        "tsv",
        head_fields,
        init_new=("classifier/*",),
        init_drop=("unembedding/*",),
    )
    assert train(labels, tmp_path / "labels") == 4
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        assert 0 <= evaluate(load_trained(tmp_path / "labels", labels, mesh), mesh)["accuracy"] <= 1
    in_same_directory = dataclasses.replace(
        source,
        data=dataclasses.replace(source.data, train=str(tmp_path / "text.txt"), format="text"),
    )
    (run / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"model: must be set"):
        train(in_same_directory, run)


def test_training_inside_a_converted_run_raises(gpt2, tmp_path):
    run = tmp_path / "run"
    convert(f"--from={gpt2}", f"--workdir={run}")
    with pytest.raises(UserError, match=r"data\.corpus or data\.train: set one of them"):
        train(load_config(run), run)
    from transformer.mapping import to_mapping

    config = load_config(run)
    data = dataclasses.replace(
        config.data, corpus="pydoc", held_out=8, length=32,
        tokenizer=dataclasses.replace(config.data.tokenizer, path=str(run / "tokenizer.json")),
    )  # fmt: skip
    config = dataclasses.replace(config, data=data, mesh=MeshConfig(data=1))
    (run / "config.json").write_text(json.dumps(to_mapping(config)))
    with pytest.raises(
        UserError,
        match=r"contains only converted parameters; start from them in another --workdir",
    ):
        train(config, run)


def test_round_trip_keeps_weights_tokenizer_and_special_tokens(t5, tmp_path, capsys):
    convert(f"--from={t5}", f"--workdir={tmp_path / 'run'}")
    convert(f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'back'}")
    assert "load it with transformers.T5ForConditionalGeneration.from_" in capsys.readouterr().err
    original, exported = (
        transformers.T5ForConditionalGeneration.from_pretrained(folder).state_dict()
        for folder in (t5, tmp_path / "back")
    )
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (
        t5 / "spiece.model"
    ).read_bytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["decoder_start_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        0,
        1,
        0,
    )


def test_file_size_limit_leaves_no_partial_export(gpt2, tmp_path, capsys):
    """Tests an OS error in safetensors, which raises an exception class of safetensors."""
    convert(f"--from={gpt2}", f"--workdir={tmp_path / 'run'}")
    capsys.readouterr()
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        code = cli.main(["convert", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'back'}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {tmp_path / 'back'}: a file is larger than this process may")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("pad", [None, "eos"])
def test_export_keeps_the_pad_token(gpt2, tmp_path, pad):
    source = tmp_path / "source"
    source.mkdir()
    for file in gpt2.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    original = json.loads((source / "config.json").read_text())
    if pad:
        (source / "config.json").write_text(
            json.dumps(original | {"pad_token_id": original["eos_token_id"]})
        )
    convert(f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert load_config(tmp_path / "run").model.pad_id == original["eos_token_id"]
    convert(f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'back'}")
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (
        exported["model_type"] == "gpt2"
        and exported["pad_token_id"] == exported["bos_token_id"] == original["eos_token_id"]
    )


def test_decoder_may_have_several_eos_tokens(gpt2, tmp_path):
    """As in Llama 3.1: generation stops at any end token, and a converted config keeps them all."""
    source = tmp_path / "source"
    source.mkdir()
    for file in gpt2.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    # Its end token takes precedence over that of config.json.
    (source / "generation_config.json").unlink()
    original = json.loads((source / "config.json").read_text())
    eos_id = original["eos_token_id"]
    convert(f"--from={gpt2}", f"--workdir={tmp_path / 'run'}")
    (text,), trained = run_generation(tmp_path / "run", ["the cat"])
    ids = [eos_id, *trained.tokenizer.encode(["the cat"])[0]]
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2).eval()
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=eos_id
        )
    generated_ids = out[0, len(ids) :].tolist()
    eos_ids = [eos_id, generated_ids[2]]
    (source / "config.json").write_text(json.dumps(original | {"eos_token_id": eos_ids}))
    convert(f"--from={source}", f"--workdir={tmp_path / 'again'}")
    assert load_config(tmp_path / "again").model.eos_id == tuple(eos_ids)
    (shorter,), _ = run_generation(tmp_path / "again", ["the cat"])
    stop_index = generated_ids.index(eos_ids[1])
    expected = trained.tokenizer.decode([*ids[1:], *generated_ids[: stop_index + 1]])
    assert shorter == expected[len("the cat") :] and shorter != text
    convert(f"--workdir={tmp_path / 'again'}", f"--to={tmp_path / 'back'}")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == eos_ids


def test_converted_run_is_evaluated_on_text_of_the_command_line(gpt2, tmp_path, monkeypatch):
    convert(f"--from={gpt2}", f"--workdir={tmp_path / 'run'}")
    (tmp_path / "text.txt").write_text("".join(f"{t} {i}\n" for i in range(4) for t in TEXTS))
    flags = [
        f"--config.data.train={tmp_path / 'text.txt'}",
        "--config.data.format=text",
        "--config.data.held_out=10",
        "--config.data.length=32",
    ]
    assert (
        cli.main(
            ["evaluate", f"--workdir={tmp_path / 'run'}", *flags, "--config.decoding.max_extra=2"]
        )
        == 0
    )
    assert json.loads((tmp_path / "run" / "test.json").read_text())["bits_per_byte"] > 0


def test_converted_parameters_are_created_sharded(gpt2, tmp_path, monkeypatch):
    arrays = []
    original = jax.make_array_from_callback
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *a: arrays.append(original(*a)) or arrays[-1]
    )
    convert(
        f"--from={gpt2}",
        f"--workdir={tmp_path / 'run'}",
        "--config.mesh.data=1",
        "--config.mesh.fsdp=4",
    )
    assert any(
        len(x.sharding.device_set) == 4 and not x.sharding.is_fully_replicated for x in arrays
    )
    config, params = load_hf(gpt2)
    with use(make_mesh(MeshConfig(data=2))) as mesh:
        trained = load_trained(tmp_path / "run", load_config(tmp_path / "run"), mesh)
    assert trained.config.model.d_model == config.d_model
    jax.tree.map(np.testing.assert_array_equal, trained.params, params)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["converted_from"] == str(
        gpt2
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workdir=x"], "one of the arguments --from --to is required"),
        (["--from=none", "--workdir=x"], "none: no config.json"),
        (
            ["--from={gpt2}", "--workdir=full"],
            "--workdir: full exists and is not an empty folder",
        ),
        (["--from={gpt2}", "--workdir=x", "--family=gpt2"], "--family: applies to --to only"),
        (
            ["--from={gpt2}", "--workdir=x", "--config.train.steps=3"],
            "--config.train.steps: a converted model has no training",
        ),
        (
            ["--from={gpt2}", "--workdir=x", "--config.model.d_model=64"],
            "its shape is",
        ),
        (["--to=y", "--workdir=x"], "no run in x"),
    ],
)
def test_invalid_arguments_leave_no_files(gpt2, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    assert cli.main(["convert", *(a.format(gpt2=gpt2) for a in args)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*")) == [
        "full",
        "full/thesis.tex",
    ]


def test_unreadable_or_missing_tokenizer_raises(tmp_path, gpt2, monkeypatch):
    from transformer.data.tokenizer import load_tokenizer

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the extra \[hf\]"):
        load_tokenizer(tmp_path / "tokenizer.json")
    # Without the tokenizers package, only the weights are converted.
    convert(f"--from={gpt2}", f"--workdir={tmp_path / 'run'}")
    with pytest.raises(UserError, match="this run has no tokenizer"):
        run_generation(tmp_path / "run", ["a"])
