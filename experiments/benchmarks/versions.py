"""Is the quickstart as fast as in an earlier version of this repository?

    python experiments/benchmarks/versions.py REVISION [--steps=60] [--rounds=5]

Checks out the revision beside this one. The commands `train` (for `steps` steps), `evaluate` (on
100 sources) and `generate` of experiments/quickstart.py then run in turn in both versions, each
version with its own file. Prints the median seconds of a command, those of 10 training steps (from
the log, without compilation), and the ratio of this version to the other (median, min, max).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUESTIONS = "Where is the library?\nI have never seen such a beautiful house.\n"


def run(checkout: Path, workdir: Path, options: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds of each command, and of 10 training steps."""
    (workdir.parent / "questions.txt").write_text(QUESTIONS)
    limits = {"data.max_examples": 20_000, "train.steps": options.steps, "train.log_every": 10}
    limits |= {"train.eval_every": 0, "data.held_out": 100}
    commands = {
        "train": ["--config=experiments/quickstart.py"]
        + [f"--config.{field}={value}" for field, value in limits.items()],
        "evaluate": [],
        "generate": [f"--input={workdir.parent / 'questions.txt'}"],
    }
    seconds = {}
    for verb, arguments in commands.items():
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "transformer", verb, f"--workdir={workdir}", *arguments],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            check=True,
            capture_output=True,
        )
        seconds[verb] = time.perf_counter() - start
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "time/tokens_per_second" in line]
    taken = [line["train/tokens"] / line["time/tokens_per_second"] for line in timed]
    return seconds | {"10 steps": statistics.median(taken[1:])}


def main(options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(other)], check=True)
        subprocess.run(["git", "checkout", "--quiet", options.revision], cwd=other, check=True)
        for number in range(options.rounds + 1):
            for name, checkout in {"this": ROOT, "other": other}.items():
                seconds = run(checkout, Path(folder) / f"{name}{number}", options)
                if number:  # the first round prepares the data
                    found[name].append(seconds)
    for what in found["this"][0]:
        this, other = ([seconds[what] for seconds in found[name]] for name in ("this", "other"))
        ratios = [a / b for a, b in zip(this, other, strict=True)]
        print(
            f"{what:<9} {statistics.median(this):7.3f} s, {options.revision} "
            f"{statistics.median(other):7.3f} s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args())
