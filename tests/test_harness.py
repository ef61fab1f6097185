"""Scores of texts, and runs as models of lm-evaluation-harness: compared with its own backend."""

import json
import subprocess

import numpy as np
import pytest
from exchange_models import TEXTS, bert, gpt2, t5
from test_processes import ROOT, TRAIN, launch

import transformer
from transformer import load_run
from transformer.cli import main
from transformer.errors import UserError
from transformer.evaluation.scorer import windows

lm_eval = pytest.importorskip("lm_eval", reason="the test extra brings it")


class Request:
    """A request of the harness."""

    def __init__(self, *args):
        self.args = args


PAIRS = [
    ("the cat sleeps", " today"),
    ("a dog", " eats at home"),
    ("my friend runs ", "here"),  # the space moves to the continuation
    ("", "the bird sings now!"),
    (" ".join(TEXTS[:6]), " the cat eats here"),  # longer than the model's positions
]


@pytest.fixture(scope="module")
def backends(gpt2, tmp_path_factory):
    """(ours, the harness's own) for the same weights."""
    from lm_eval.models.huggingface import HFLM

    from transformer.harness import HarnessLM

    workdir = tmp_path_factory.mktemp("run") / "gpt2"
    assert main(["convert", "--from", str(gpt2), "--workdir", str(workdir)]) == 0
    return HarnessLM(str(workdir)), HFLM(pretrained=str(gpt2), device="cpu", batch_size=3)


def test_log_likelihoods(backends):
    requests = [Request(*pair) for pair in PAIRS]
    (ours, greedy), (theirs, expected) = (
        zip(*backend.loglikelihood(requests), strict=True) for backend in backends
    )
    assert len({round(x, 2) for x in theirs}) == len(PAIRS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert greedy == expected


def test_greedy_continuations_are_recognized(backends):
    """The tokens that the model generates are greedy, and no others are."""
    import torch

    context = backends[0].tok_encode("the cat sleeps")
    generated = backends[1].model.generate(
        torch.tensor([context]), max_new_tokens=4, do_sample=False
    )
    best = generated[0, len(context) :].tolist()
    requests = [(None, context, best), (None, context, [*best[:3], best[3] - 1])]
    for backend in backends:
        assert [x for _, x in backend._loglikelihood_tokens(requests)] == [True, False]


def test_rolling_log_likelihoods(backends):
    requests = [Request(" ".join(TEXTS[:n])) for n in (1, 7, 20)]
    ours, theirs = (backend.loglikelihood_rolling(requests) for backend in backends)
    assert len(backends[0].tok_encode(requests[2].args[0])) > 2 * backends[0].max_length
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_generation_until(backends):
    options = [{"max_gen_toks": 8}, {"max_gen_toks": 12, "until": ["a"]}]
    requests = [Request(text, x) for x in options for text, _ in PAIRS[:3] + PAIRS[4:]]
    ours, theirs = (backend.generate_until(requests) for backend in backends)
    assert len(set(theirs)) > 2
    assert ours == theirs


def test_generation_ignores_the_decoding_of_the_run(backends):
    """A task sets all options. Without a temperature, sampling uses 1."""
    import dataclasses

    from transformer.decoding.config import DecodingConfig
    from transformer.harness import HarnessLM

    run, context = backends[0].run, "the cat sleeps"
    beams = DecodingConfig(beam_size=4, length_penalty=1.0)
    beams = dataclasses.replace(run, config=dataclasses.replace(run.config, decoding=beams))
    greedy, sampled = {"max_gen_toks": 8}, {"max_gen_toks": 8, "do_sample": True, "top_k": 3}
    first, others = (
        lm.generate_until([Request(context, greedy), Request(context, sampled)])
        for lm in (backends[0], HarnessLM(beams))
    )
    assert first == others


def test_encoder_decoder(t5, tmp_path):
    import sentencepiece
    import transformers
    from lm_eval.models.huggingface import HFLM

    from transformer.harness import HarnessLM

    assert main(["convert", "--from", str(t5), "--workdir", str(tmp_path / "run")]) == 0
    ours = HarnessLM(str(tmp_path / "run"))
    # T5Tokenizer gets the pieces: it cannot read spiece.model here, because sentencepiece 0.2.3
    # parses it with protobuf 7 and Apache Beam needs protobuf 6.
    pieces = sentencepiece.SentencePieceProcessor(str(t5 / "spiece.model"))
    vocab = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
    tokenizer = transformers.T5Tokenizer(vocab, extra_ids=0)
    theirs = HFLM(pretrained=str(t5), tokenizer=tokenizer, device="cpu", backend="seq2seq")
    requests = [Request(*pair) for pair in PAIRS[:2]]
    expected = theirs.loglikelihood(requests)
    np.testing.assert_allclose(ours.loglikelihood(requests), expected, rtol=1e-4)


def write_task(folder) -> None:
    """Writes a multiple-choice task, "animals", stored in local files."""
    rows = [{"text": text.rsplit(" ", 1)[0], "answer": i % 3} for i, text in enumerate(TEXTS[:12])]
    (folder / "animals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "animals.yaml").write_text(f"""
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "animals.jsonl"}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["today", "at home", "here"]
doc_to_target: answer
metric_list: [{{metric: acc}}]
""")


def test_evaluate_runs_tasks(backends, tmp_path, monkeypatch, capsys):
    """Items have the scores of the harness's backend, and results are in the run directory."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_task(tmp_path)
    workdir = backends[0].run.workdir
    arguments = ["--tasks=animals", f"--include-path={tmp_path}", "--limit=10"]
    assert main(["evaluate", f"--workdir={workdir}", *arguments]) == 0
    assert "animals" in capsys.readouterr().out
    manager = TaskManager(include_path=str(tmp_path))
    options = {"tasks": ["animals"], "task_manager": manager, "limit": 10, "log_samples": True}
    expected = lm_eval.simple_evaluate(backends[1], **options)
    saved = json.loads((workdir / "tasks.json").read_text())
    scores = lambda results: [sample["resps"] for sample in results["samples"]["animals"]]
    flat = lambda results: np.array(
        [float(x) for resps in scores(results) for ((logp, _),) in resps for x in [logp]]
    )
    np.testing.assert_allclose(flat(saved), flat(expected), rtol=1e-4)
    assert len(flat(saved)) == 30
    assert saved["results"]["animals"]["acc,none"] == expected["results"]["animals"]["acc,none"]
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    assert "tasks/animals/acc" in json.loads(lines[-1])


def test_tasks_of_the_harness_on_several_processes(tmp_path, monkeypatch, capsys):
    """Each process must build its part of the same batches. Only the first writes results."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ("import", "class", "list", "name", "value", "file", "string")
    texts = [f"The {noun} of a {other}" for noun in words for other in words]
    lines = [json.dumps({"text": text, "answer": i % 2}) for i, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    tasks = {
        "choose": {
            "output_type": "multiple_choice", "doc_to_text": "{{text}}",
            "doc_to_target": "answer", "doc_to_choice": ["is used", "may be"],
        },
        "roll": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{text}}, and other words that do not fit into one window of it",
        },
        "continue": {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "x",
            "generation_kwargs": {"max_gen_toks": 3},
        },
    }  # fmt: skip
    for name, fields in tasks.items():
        files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
        about = {"task": name, "dataset_path": "json", "dataset_kwargs": files}
        task = about | {"test_split": "test"} | fields
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    assert main([*TRAIN, f"--workdir={run}", "--config.train.steps=2"]) == 0
    command = ["evaluate", f"--tasks={','.join(tasks)}", f"--include-path={tmp_path}", *TRAIN[-2:]]
    results = []
    for count in (1, 2):  # one process is this one
        if count == 1:
            capsys.readouterr()
            assert main([*command, f"--workdir={run}"]) == 0 and "choose" in capsys.readouterr().out
        else:
            started = launch(count, run, command=command, stderr=subprocess.PIPE)
            outputs = [process.communicate(timeout=150) for process in started]
            assert [process.returncode for process in started] == [0] * count, outputs
            assert ["choose" in out for out, _ in outputs] == [True, False]
        saved = json.loads((run / "tasks.json").read_text())["samples"]
        results.append({name: [item["resps"] for item in saved[name]] for name in tasks})
        (run / "tasks.json").unlink()
    assert [len(items) for items in results[0].values()] == [len(texts)] * 3
    assert len({json.dumps(item) for item in results[0]["choose"]}) > len(texts) // 2
    assert results[0] == results[1]


@pytest.mark.parametrize("count", [1, 4, 9, 23])
def test_windows_are_those_of_the_harness(count):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    ids = list(range(100, 100 + count))
    theirs = get_rolling_token_windows(ids, prefix_token=1, max_seq_len=5, context_len=1)
    expected = [make_disjoint_window(pair) for pair in theirs]
    assert [tuple(map(list, pair)) for pair in windows(1, ids, 5)] == expected


def test_score_adds_up_and_depends_on_the_context(backends, tmp_path, capsys):
    """The probability of a text is that of its parts, each after the parts before it."""
    run = backends[0].run
    (whole,) = transformer.score(run, ["the cat eats here"])
    assert len(whole.logp) == len(run.tokenizer.encode(["the cat eats here"])[0])
    first, last = transformer.score(run, ["the cat", " eats here"], ["", "the cat"])
    np.testing.assert_allclose(whole.logp, [*first.logp, *last.logp], rtol=1e-4)
    (alone,) = transformer.score(run, [" eats here"])
    assert abs(alone.logp.sum() - last.logp.sum()) > 0.1
    (tmp_path / "text.txt").write_text("the cat eats here\n" + " ".join(TEXTS[:20]) + "\n")
    arguments = ["score", f"--workdir={run.workdir}", f"--input={tmp_path / 'text.txt'}"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in out.splitlines()]
    assert float(lines[0][0]) == pytest.approx(whole.logp.sum(), rel=1e-3)
    assert int(lines[0][1]) == len(whole.logp)
    total = sum(float(line[0]) for line in lines)
    size = sum(len(line[2].encode()) for line in lines)
    assert f"{-total / np.log(2) / size:.4f} bits per byte" in err
    assert main([*arguments, "--tokens"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows[: len(whole.logp)]] == whole.pieces


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--limit=3"], "--limit: no effect without --tasks; name tasks"),
        (["evaluate", "--tasks=animols"], "--tasks: no task 'animols'; "),
        (["score", "--input=missing.txt"], "--input: no file 'missing.txt'"),
    ],
)
def test_mistakes_give_one_line(backends, arguments, message, capsys):
    verb, *rest = arguments
    assert main([verb, f"--workdir={backends[0].run.workdir}", *rest]) == 2
    assert message in capsys.readouterr().err


def test_empty_texts(backends):
    """They have no tokens, and thus probability 1."""
    run = backends[0].run
    assert [len(scores.logp) for scores in transformer.score(run, ["", "a dog", ""])] == [0, 3, 0]
    assert transformer.score(run, []) == []
    assert transformer.embed(run, []).shape == (0, run.config.model.d_model)
    assert transformer.embed(run, [""]).shape == (1, run.config.model.d_model)
    assert backends[0].loglikelihood([Request("a dog", "")]) == [(0.0, True)]
    with pytest.raises(UserError, match="contexts: expected a list of strings, got str"):
        transformer.score(run, ["a"], "b")


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_embeddings_are_pooled_hidden_states(name, request, tmp_path):
    """The pooling of sentence-transformers, computed by PyTorch one text at a time."""
    import torch
    import transformers

    folder = request.getfixturevalue(name)
    assert main(["convert", "--from", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    run = load_run(tmp_path / "run")
    tokenizer, texts = run.tokenizer, [TEXTS[0], " ".join(TEXTS[1:4]), TEXTS[5]]
    kind = {"bert": "BertModel", "t5": "T5EncoderModel", "gpt2": "GPT2Model"}[name]
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    hidden = []
    for ids in tokenizer.encode(texts):
        ids = [*[tokenizer.bos] * (name != "t5"), *ids, *[tokenizer.eos] * (name != "gpt2")]
        with torch.no_grad():
            hidden.append(model(torch.tensor([ids])).last_hidden_state[0].numpy())
    pool = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
    for pooling, of in pool.items():
        expected = np.stack([of(h) for h in hidden])
        actual = transformer.embed(run, texts, pooling)
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(actual[0] - actual[2]).max() > 1e-3


def test_an_encoder_has_no_probability_of_texts(bert, tmp_path):
    assert main(["convert", "--from", str(bert), "--workdir", str(tmp_path / "run")]) == 0
    with pytest.raises(UserError, match="'masked_lm' does not model the probability of texts"):
        transformer.score(tmp_path / "run", ["a text"])
