"""The script that checks and measures an accelerator, on the CPU with small shapes."""

import json
import re
import sys
from pathlib import Path

import pytest

from transformer.model.attention_backends import BACKENDS, Backend, reference

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "benchmarks"))
import accelerator
import accelerator_speed

FIELDS = {
    "passed": {"error", "allowed", "repeats", "backend", "dtype"},
    "measured": {"seconds"},
    "unsupported": {"why"},
}


def run(tmp_path, *arguments: str) -> tuple[int, dict, str]:
    """Returns the exit status, the JSON file and the table of a run with small shapes."""
    out = tmp_path / "result"
    status = accelerator.main(["--small", "--minutes=5", f"--out={out}", *arguments])
    return (
        status,
        json.loads(out.with_suffix(".json").read_text()),
        out.with_suffix(".md").read_text(),
    )


def test_checks_and_measurements_of_attention_have_the_documented_form(tmp_path):
    status, result, page = run(tmp_path, "--schemes=none,shaw", "--sections=checks,attention")
    rows = result["rows"]
    assert status == 0 and result["machine"]["platform"] == "cpu"
    assert {row["status"] for row in rows} == set(FIELDS)
    for row in rows:
        assert row["section"] in ("checks", "attention") and FIELDS[row["status"]] <= row.keys()
    passed = {(r["backend"], r["dtype"]) for r in rows if r["status"] == "passed"}
    backends = ("blockwise", "ring", "flash")
    assert passed == {(name, dtype) for name in backends for dtype in ("float32", "bfloat16")}
    assert all(0 < row["error"] <= row["allowed"] for row in rows if row["status"] == "passed")
    assert re.search(r"\| checks: flash, bfloat16 \| 1 of 1 passed, \d deterministic \|", page)
    assert re.search(r"\| attention, none: 128 tokens.*, forward \| [\d.e-]+ ms", page)


def test_models_are_measured(tmp_path, monkeypatch):
    file, changes, _ = accelerator_speed.STEPS["decoder_1b with 4 of 24 layers"]
    steps = {"decoder_1b with 4 of 24 layers": (file, changes, ("t5",))}
    monkeypatch.setattr(
        accelerator_speed,
        "STEPS",
        steps | {"vaswani_big": (*accelerator_speed.STEPS["vaswani_big"][:2], ())},
    )
    status, result, page = run(tmp_path, "--sections=step,decoding")
    assert status == 0
    assert [row["name"].split(",")[0] for row in result["rows"]] == [
        "training step", "prefill", "decoding", "4 beams",
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 for row in result["rows"]), page


def test_wrong_results_and_exceptions_are_failures_and_do_not_end_the_run(
    tmp_path, monkeypatch, capsys
):
    def broken(q, k, v, inputs):
        raise RuntimeError("this kernel cannot be compiled")

    wrong = lambda *args: 1.001 * reference(*args)
    monkeypatch.setitem(BACKENDS, "blockwise", Backend(wrong))
    monkeypatch.setitem(BACKENDS, "flash", Backend(broken))
    status, result, page = run(tmp_path, "--schemes=none", "--sections=checks")
    statuses = {(r["backend"], r["dtype"]): r["status"] for r in result["rows"]}
    assert status == 1
    assert statuses["blockwise", "float32"] == "FAILED"
    assert statuses["blockwise", "bfloat16"] == "passed"  # 0.1 % is within its precision
    assert statuses["flash", "float32"] == "error"
    assert "float32: FAILED, error 1.0e-03 of 1.0e-04 allowed (blockwise)" in page
    assert "RuntimeError: this kernel cannot be compiled" in page
    assert "0 skipped" in (out := capsys.readouterr().out) and " 5 failed" in out


def test_cases_without_time_or_memory_are_named(tmp_path):
    status, result, page = run(tmp_path, "--minutes=0", "--schemes=t5", "--sections=attention")
    assert status == 0 and {row["status"] for row in result["rows"]} == {"skipped"}
    assert "- attention, t5: 128 tokens, 2 heads of 16, forward: skipped: no time left" in page
    too_large = accelerator.failure(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    assert too_large["status"] == "does not fit"
    kernel = accelerator.failure(RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in vmem"))
    assert kernel["status"] == "error"


def test_tables_have_a_column_for_each_machine():
    machine = {"device": "TPU v5 lite"}
    row = {"section": "step", "name": "a step", "status": "measured", "seconds": 0.25}
    text = accelerator.table([{"machine": machine, "rows": [row]}], ["a step", "another"])
    assert text.splitlines()[0] == "| measurement | TPU v5 lite |"
    assert text.splitlines()[2:] == ["| a step | 250 ms |", "| another |  |"]
    assert "no TPU or GPU has run it yet" in accelerator.table([], ["a step"])


def test_unknown_sections_are_refused(capsys):
    with pytest.raises(SystemExit):
        accelerator.main(["--sections=steps"])
    assert "choose from checks, attention, step, decoding" in capsys.readouterr().err
