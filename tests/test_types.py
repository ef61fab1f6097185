"""Type checkers: the public surface has no errors, and types reach the code that uses it."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import transformer

ROOT = Path(__file__).parents[1]
USER = """
from collections.abc import Mapping

import jax
import transformer

config = transformer.ModelConfig(family="decoder", vocab_size=11)
model = transformer.build_model(config)
params = model.init(jax.random.key(0), jax.numpy.zeros((1, 1), int))
run: transformer.LoadedRun = transformer.train("FILE.py", "runs/a", {"model.d_model": 8})
metrics: Mapping[str, float] = transformer.evaluate(run, part="valid")
texts: list[str] = transformer.generate("runs/a", ["a"], beam_size=2)

@transformer.PLACEMENTS.register("mine")
class Mine(transformer.Placement):
    factor: float = 2.0

scale: float = Mine().factor
transformer.generate("runs/a", 3)
transformer.evaluate(run, split="valid")
wrong: int = Mine().factor
wrong = config.d_head_size
"""
ERRORS = ["[arg-type]", "[call-arg]", "[assignment]", "[attr-defined]"]  # of the last lines


def test_public_api_is_typed(tmp_path):
    names = re.findall(r"from (transformer\S+) import", inspect.getsource(transformer))
    modules = {transformer, *map(importlib.import_module, names)}
    files = sorted(inspect.getsourcefile(module) for module in modules)
    user = tmp_path / "user.py"
    user.write_text(USER)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports"),
            *("--no-error-summary", f"--cache-dir={tmp_path}", *files, user),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    errors = [line.split() for line in result.stdout.splitlines() if ": error: " in line]
    assert [line[-1] for line in errors] == ERRORS, result.stdout + result.stderr
    assert all(line[0].startswith(str(user)) for line in errors), result.stdout
