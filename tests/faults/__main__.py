"""Runs the fault campaigns for a given time and reports their outcomes and failures.

    make faults                                        an hour
    cd tests && python -m faults --minutes=5           five minutes
    cd tests && python -m faults --only=kills --seed=7 --minutes=10

Each campaign is a module with `cases(seed)`, an endless iterator, and `check(case)`, which returns
the outcome of the case or raises AssertionError. Each campaign runs in a separate process for a
share of the time, two at once. The exit code is 1 if a case failed. A failure contains its case,
which the same seed reproduces.
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
    "kills": "SIGKILL or SIGTERM at random times: training, evaluation, sweeps, two processes",
    "checkpoints": "checkpoint files with a flipped bit, truncated, overwritten or deleted",
    "combinations": "random valid models: two training steps each, then their invariances",
    "hf_directories": "altered and damaged Hugging Face directories",
    "data_files": "text files of every format, damaged or unusual",
    "overrides": "random fields and values on the command line",
    "run_directories": "files of a run directory damaged, missing or of another kind",
}
"""Module -> description. Slow campaigns come first."""

SHARES = {"kills": 3, "combinations": 2}
"""Campaign -> share of the time (default: 1). Cases of these campaigns take 30 seconds or more."""

SHOWN = 20
"""Maximum number of failures printed per campaign."""


def campaign(name: str, seed: int, seconds: float) -> dict:
    """Runs cases of a campaign for `seconds`. Returns the outcome counts and the failures."""
    import jax

    module = importlib.import_module(f"faults.{name}")
    outcomes: collections.Counter[str] = collections.Counter()
    failures, start = [], time.monotonic()
    for number, case in enumerate(module.cases(seed)):
        if time.monotonic() - start > seconds:
            break
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
                outcome = module.check(case)
            outcomes[_kind_of(outcome)] += 1
        except AssertionError as e:
            failures.append(str(e)[:3000])
        except Exception as e:
            failures.append(f"{case}: {type(e).__name__}: {str(e)[:1000]}")
        if number % 50 == 49:
            jax.clear_caches()
    return {"outcomes": dict(outcomes), "failures": failures, "seconds": time.monotonic() - start}


def _kind_of(outcome: str | None) -> str:
    """Returns the label under which an outcome is counted. All messages share one label."""
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
            "XLA_FLAGS": known_flags(),  # compilation takes most of a case's time
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
    """Prints and returns the result of a campaign's process."""
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
    parser.add_argument("--minutes", type=float, default=60, help="total time for all campaigns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"one or more of {','.join(CAMPAIGNS)}")
    parser.add_argument("--jobs", type=int, default=2, help="number of campaigns that run at once")
    sys.exit(main(parser.parse_args()))
