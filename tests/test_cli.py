"""The command line from end to end, in separate processes; and its errors."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from xla_flags import one_device_flags

from transformer import cli
from transformer.output import event

ROOT = Path(__file__).parent.parent

TRANSLATOR = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder", vocab_size=300, d_model=16, d_ff=32, num_heads=2,
        num_encoder_layers=1, num_decoder_layers=1, max_length=64,
    )
    config.data = dict(train="pairs.tsv", objective="seq2seq", length=64, batch_size=4, held_out=10)
    config.optimizer = dict(warmup_steps=2)
    samples = dict(name="translation", sentences=4, samples=2)
    config.train = dict(
        steps=6, log_every=2, eval_every=3, checkpoint_every=3, evaluators=[samples],
    )
    config.mesh = dict(data=1)
    config.decoding = dict(beam_size=2, max_extra=4, batch_size=8)
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A translator trained through the command line alone."""
    folder = tmp_path_factory.mktemp("cli")
    subjects, verbs = (
        ["the cat", "a dog", "the bird", "my friend"],
        ["sleeps", "eats", "runs", "sings", "reads"],
    )
    lines = [
        f"{s} {v} {n}\tX {s[::-1]} {v[::-1]} {n}" for s in subjects for v in verbs for n in range(6)
    ]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    (folder / "config.py").write_text(TRANSLATOR)
    result = run(folder, "train", "--config=config.py", "--workdir=run")
    assert result.returncode == 0, result.stderr
    (folder / "train.log").write_text(result.stderr)
    return folder


def run(folder, *args, stdin=""):
    env = os.environ | {
        "TRANSFORMER_DATA": str(folder / "data"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": one_device_flags(),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-m", "transformer", *args],
        cwd=folder,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_run_directory_records_manifest_metrics_and_samples(folder):
    files = {f.name for f in (folder / "run").iterdir()}
    assert files >= {
        "config.json",
        "manifest.json",
        "tokenizer.model",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "loss.png",
    }
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    assert (
        manifest["versions"]["jax"]
        and manifest["data"]["train"]["sha256"]
        and manifest["attention_backends"] == {"reference": ""}
    )
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4, 6]
    evaluations = {line["step"]: line for line in lines if "eval/loss" in line}
    assert list(evaluations) == [0, 3, 6]  # with evaluators, also before the first step
    assert all(0 <= line["eval/translation/bleu"] <= 100 for line in evaluations.values())
    samples = sorted((folder / "run" / "samples").iterdir())
    assert [file.name for file in samples] == ["00000000.txt", "00000003.txt", "00000006.txt"]
    assert samples[-1].read_text().count("source  ") == 2
    log = (folder / "train.log").read_text()
    assert "step 6/6  100%  loss" in log
    before = log[: log.index("step ")].splitlines()
    assert len(before) <= 5 and before[0].startswith("model       encoder_decoder, ")
    assert "(" in before[0] and before[0].endswith("per device), 1 cpu device")


def test_evaluate_and_generate(folder):
    result = run(folder, "evaluate", "--workdir=run")
    assert result.returncode == 0, result.stderr
    assert "bleu_signature         nrefs:" in result.stdout
    assert result.stdout.startswith("bleu ")  # the headline
    report = json.loads((folder / "run" / "test.json").read_text())
    assert report["step"] == 6 and report["sentences"] >= 10 and 0 <= report["bleu"] <= 100
    assert (folder / "run" / "samples.txt").read_text().count("source  ") == report["sentences"]

    text = "the cat sleeps 3\n\na dog\u2028runs 1 and eats 2\r\n" + "long " * 100 + "\n"
    result = run(folder, "generate", "--workdir=run", stdin=text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 4
    assert "1 of 4 lines exceeded the model's maximum length and was cut" in result.stderr
    (folder / "input.txt").write_text(text)
    from_file = run(folder, "generate", "--workdir=run", "--input=input.txt", "--output=out.txt")
    assert (folder / "out.txt").read_text() == result.stdout and from_file.stdout == ""
    interactive = run(
        folder, "generate", "--workdir=run", "--interactive", stdin="the cat sleeps 3\n"
    )
    assert interactive.returncode == 0 and "The model translates" in interactive.stdout


def test_repeating_a_finished_run_changes_nothing(folder):
    before = (folder / "run" / "metrics.jsonl").read_text()
    result = run(folder, "train", "--config=config.py", "--workdir=run")
    assert result.returncode == 0, result.stderr
    assert "resumed     at step 6" in result.stderr
    assert (folder / "run" / "metrics.jsonl").read_text() == before


TRAIN = ["train", "--config=config.py", "--workdir=x"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "no verb 'trian'; did you mean 'train'?"),
        (["train", "--config=none.py", "--workdir=x"], "no file 'none.py'"),
        (
            [*TRAIN, "--config.model.d_modle=3"],
            "config.model.d_modle: no such field; did you mean 'd_model'?",
        ),
        ([*TRAIN, "--steps=3"], "no argument '--steps=3'"),
        (
            [*TRAIN, "--config.model.num_heads=3"],
            "model.d_model: 16 is not divisible by model.num_heads = 3",
        ),
        ([*TRAIN, "--config.mesh.data=64"], "mesh: mesh.data=64 needs 64 devices"),
        (
            [*TRAIN, "--config.platform=tpu"],
            "platform: the config sets 'tpu', but JAX runs on 'cpu'; to train on the CPU, set "
            "--config.platform=cpu",
        ),
        ([*TRAIN, "--config.platform=accelerator"], "JAX runs on 'cpu'"),
        (
            [*TRAIN, "--config.data.train=no.tsv"],
            "data.train: no file 'no.tsv'; the path is relative to ",
        ),
        (
            ["train", "--config=config.py", "--workdir=run", "--config.seed=4"],
            "contains a different experiment: seed was 0, is 4",
        ),
        (
            ["train", "--config=config.py", "--workdir=run", "--config.train.steps=9"],
            "workdir: train.steps was 6 in run, and schedule 'cosine' depends on it; "
            "restore the old value, or start a new run with train.init_from=run",
        ),
        (["train", "--config=config.py", "--workdir="], "argument --workdir: empty; name a folder"),
        (
            ["train", "--config=config.py"],
            "required: --workdir; see python -m transformer train --help",
        ),
        (["evaluate", "--workdir=run", "--part=tset"], "argument --part: invalid choice: 'tset'"),
        ([*TRAIN, "--config.train.wandb=p"], "train.wandb needs the extra [wandb]"),
        (["generate", "--workdir=run", "--output=run"], "--output: run is a folder; name a file"),
        (["evaluate", "--workdir=nothing"], "no run in nothing"),
        (["evaluate", "--workdir=config.py"], "workdir: config.py is a file; choose a folder"),
        (
            ["train", "--config=config.py", "--workdir=http://x"],
            "workdir: http:/x is not a folder; use a local one, or gs://BUCKET/FOLDER",
        ),
        (["generate", "--workdir=run", "--input=no.txt"], "--input: no file 'no.txt'"),
        (
            ["generate", "--workdir=run", "--config.model.d_model=8"],
            "a trained run keeps its config",
        ),
        (["data", "wikitext2", "--min_chars=5"], "data: options are for `data prepare`"),
        (["sweep", "--workdir=run", "--runs=a/seed-0", "--dry-run"], "leave out the other options"),
        (["data", "wikitext"], "data.corpus: unknown value 'wikitext'; did you mean 'wikitext2'?"),
    ],
)
def test_invalid_arguments_print_one_line_and_leave_no_files(
    folder, args, message, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("transformer.parallel.mesh.accelerator", lambda: "")
    before = sorted(folder.rglob("*"))
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert sorted(f for f in folder.rglob("*") if "/data/" not in str(f)) == [
        f for f in before if "/data/" not in str(f)
    ]


def test_auto_platform_refuses_cpu_if_there_is_an_accelerator(monkeypatch):
    from transformer.errors import UserError
    from transformer.parallel import mesh

    monkeypatch.setattr(mesh, "accelerator", lambda: "an NVIDIA GPU")
    with pytest.raises(
        UserError, match="this machine has an NVIDIA GPU, but JAX found only the CPU"
    ):
        mesh.check_platform("auto")
    assert mesh.check_platform("cpu") == "cpu"


@pytest.mark.parametrize(
    "args", [[], ["--help"], ["train", "--help"], ["generate", "--help"], ["data"]]
)
def test_help_prints_usage(args, capsys):
    if "--help" in args:
        with pytest.raises(SystemExit, match="0"):
            cli.main(args)
    else:
        assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert "python -m transformer" in out or "tatoeba" in out


def test_progress_line_stays_above_notes_and_ends_once():
    from transformer.runs.metrics import Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    progress = Progress(20, stream := Terminal())
    progress.show(10, 1.0, 1e-3, 0, 0, 0)
    progress.note("validation loss 2")
    progress.show(20, 0.5, 1e-3, 0, 0, 0)
    progress.close()
    progress.close()
    lines = [line.removeprefix("\r\x1b[K") for line in stream.getvalue().split("\n")]
    assert [line[:10] for line in lines] == ["step 10/20", "validation", "step 20/20", ""]


def test_events_of_one_are_singular():
    assert event(1, "examples longer than 9 tokens were cut") == (
        "1 example longer than 9 tokens was cut"
    )
    assert event(2000, "texts are too short") == "2,000 texts are too short"
    assert event(1, "texts are too short") == "1 text is too short"


@pytest.mark.parametrize(
    ("variable", "accelerator", "calls"),
    [("", "", 3), ("system", "", 0), ("", "a TPU", 0)],
)
def test_import_keeps_freed_memory_unless_prevented(variable, accelerator, calls):
    program = f"""
import ctypes, glob, types
made = []
ctypes.CDLL = lambda name: types.SimpleNamespace(mallopt=lambda *option: made.append(option) or 1)
glob.glob = lambda pattern: ["/dev/accel0"] * ({accelerator!r} == "a TPU" and "accel" in pattern)
import transformer
print(len(made))
"""
    environment = os.environ | {"TRANSFORMER_ALLOCATOR": variable}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert int(printed) == calls
