"""The fault campaign: faults of every kind for as long as you say, and what held.

    make faults                                        an hour
    cd tests && python -m faults --minutes=5           five minutes
    cd tests && python -m faults --only=kills --seed=7 --minutes=10

Each campaign is a module with `cases(seed)`, which never ends, and `check(case)`, which returns what came of the case or raises
AssertionError. Every campaign has a process of its own and a share of the time; two run at once. The exit code is 1 if a case
failed. A failure names its case, which the seed gives again.
"""

import argparse
import collections
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from xla_flags import known_flags

CAMPAIGNS = {
    "kills": "training, evaluation, sweeps and one of two processes killed or stopped at random moments",
    "checkpoints": "files of a checkpoint with a bit flipped, cut, overwritten or deleted",
    "combinations": "random valid models, two real steps each, and their invariances",
    "hf_directories": "altered and damaged Hugging Face directories",
    "data_files": "text files of every format, damaged or odd",
    "overrides": "random fields and values on the command line",
    "run_directories": "files of a run directory damaged, missing or of another kind",
}
"""Module -> what it does, the slow ones first."""

SHARES = {"kills": 3, "combinations": 2}
"""Of the time, where it is not one. Cases of these take half a minute and more."""

SHOWN = 20
"""Failures of a campaign that are printed."""


def campaign(name: str, seed: int, seconds: float) -> dict:
    """Runs cases of one campaign for so long; counts of outcomes, and the failures."""
    import jax

    module = importlib.import_module(f"faults.{name}")
    outcomes: collections.Counter[str] = collections.Counter()
    failures, began = [], time.monotonic()
    for number, case in enumerate(module.cases(seed)):
        if time.monotonic() - began > seconds:
            break
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                outcome = module.check(case)
            outcomes[_kind_of(outcome)] += 1
        except AssertionError as e:
            failures.append(str(e)[:3000])
        except Exception as e:
            failures.append(f"{case}: {type(e).__name__}: {str(e)[:1000]}")
        if number % 50 == 49:
            jax.clear_caches()
    return {"outcomes": dict(outcomes), "failures": failures, "seconds": time.monotonic() - began}


def _kind_of(outcome: str | None) -> str:
    """What is counted: of a message only that there was one."""
    return (
        "accepted" if outcome is None else outcome if len(outcome) < 40 else "refused in one line"
    )


def main(options: argparse.Namespace) -> int:
    names = options.only.split(",") if options.only else list(CAMPAIGNS)
    share = 60 * options.minutes * min(options.jobs, len(names))
    share /= sum(SHARES.get(name, 1) for name in names)
    if len(names) == 1:
        print(json.dumps(campaign(names[0], options.seed, 60 * options.minutes)))
        return 0
    waiting, running, results = list(names), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": known_flags(),  # compiling is most of a case's time
            "TRANSFORMER_DATA": f"{folder}/data",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        while waiting or running:
            while waiting and len(running) < options.jobs:
                name = waiting.pop(0)
                log = Path(folder) / f"{name}.log"
                command = [
                    sys.executable,
                    "-m",
                    "faults",
                    f"--only={name}",
                    f"--seed={options.seed}",
                    f"--minutes={SHARES.get(name, 1) * share / 60}",
                ]
                running[name] = (
                    subprocess.Popen(
                        command, env=env, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
                    ),
                    log,
                )
            for name, (process, log) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    results[name] = _result(name, process, log)
            time.sleep(0.5)
    failed = sum(len(result["failures"]) for result in results.values())
    tried = sum(sum(result["outcomes"].values()) for result in results.values()) + failed
    print(f"{tried:,} cases, {failed} failed (seed {options.seed}, {options.minutes:g} minutes)")
    return 1 if failed else 0


def _result(name: str, process: subprocess.Popen, log: Path) -> dict:
    """What a campaign's process has found, printed."""
    try:
        result = json.loads(process.stdout.read().strip().splitlines()[-1])
    except (ValueError, IndexError):
        result = {
            "outcomes": {},
            "failures": [f"ended with exit code {process.returncode}: {log.read_text()[-2000:]}"],
            "seconds": 0,
        }
    tried = sum(result["outcomes"].values()) + len(result["failures"])
    print(f"{name}: {CAMPAIGNS[name]}")
    print(f"  {tried:,} cases in {result['seconds']:.0f} s, {len(result['failures'])} failed")
    for outcome, count in sorted(result["outcomes"].items(), key=lambda item: -item[1]):
        print(f"  {count:7,}  {outcome}")
    for failure in result["failures"][:SHOWN]:
        print(f"  FAILED  {failure}")
    sys.stdout.flush()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="for all campaigns together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"one of {', '.join(CAMPAIGNS)}, or several")
    parser.add_argument("--jobs", type=int, default=2, help="campaigns at once")
    sys.exit(main(parser.parse_args()))
