"""Describes a study for a report: its arms, its provenance and the commands to reproduce it."""

import hashlib
import shlex
from collections.abc import Mapping

from transformer.lab.profiles import measured_text
from transformer.lab.results import Results, RunResult
from transformer.lab.study import Study, load_study
from transformer.output import count, event
from transformer.units import kind, of_tokens, unit


def about(results: Results) -> list[str]:
    """Returns sentences on the setup: varied fields, seeds, metric and declared differences."""
    sweep, runs = results.sweep, sum(len(arm.runs) for arm in results.arms.values())
    fields = [field for field in sweep.fields if field != "arm"]
    lines = [f"Varied: {', '.join(fields)}." if fields else "Individual runs are compared."]
    same_seeds = all(set(arm.runs) == set(sweep.seeds) for arm in results.arms.values())
    same_text = (
        len({str(_reads(run)) for arm in results.arms.values() for run in arm.runs.values()}) == 1
    )
    paired = (
        "; all arms have the same seeds"
        if same_seeds
        else "; some arms lack seeds, so each comparison uses the seeds that both arms have"
    )
    paired += ", and therefore the same text in the same order" if same_seeds and same_text else ""
    sizes = f"{count(len(results.arms), 'arm')}, {count(runs, 'run')}"
    lines.append(
        f"{sizes}, seeds {', '.join(map(str, sweep.seeds))}{paired}."
        if len(sweep.seeds) > 1
        else f"{sizes} of one seed: the variation between seeds is unknown, so there are no "
        "intervals."
    )
    metric = [
        sweep.metric,
        unit(sweep.metric, results.predicts_tokens),
        f"on {part}" if (part := measured_text(results, sweep.metric)) else "",
    ]
    lines.append(
        f"Primary metric: {', '.join(filter(None, metric))}; "
        f"{'higher' if sweep.higher_is_better else 'lower'} is better."
    )
    lines += _texts(results)
    lines += [
        f"Declared difference in {name}: {reason}." for name, reason in sweep.declared.items()
    ]
    lines += [f"Control arm {arm}: {reason}." for arm, reason in sweep.controls.items()]
    lines += (
        [
            "Arms match the baseline in "
            f"{'FLOPs per token' if sweep.match == 'flops' else sweep.match}."
        ]
        if sweep.match
        else []
    )
    return lines


def _texts(results: Results) -> list[str]:
    """Returns sentences on arms that are tested on different texts, tokens or parts of a text."""
    sweep, lines = results.sweep, []
    texts = {
        str(run.manifest.get("data", {}).get("test", {}).get("sha256"))
        for arm in results.arms.values()
        for run in arm.runs.values()
    }
    lines += (
        ["Arms are tested on different texts, as the sweep varies or declares."]
        if len(texts) > 1
        else []
    )
    objectives = {
        str(run.manifest.get("data", {}).get("objective"))
        for arm in results.arms.values()
        for run in arm.runs.values()
    }
    if len(objectives) > 1 and of_tokens(sweep.metric, results.predicts_tokens):
        lines.append(
            f"Arms have different objectives ({', '.join(sorted(objectives))}), "
            f"so {sweep.metric} is not measured on the same tokens in all arms."
        )
    excluded = {
        arm.name: next(
            (
                _counts(run.tested["left_out"])
                for run in arm.runs.values()
                if run.tested.get("left_out")
            ),
            "nothing",
        )
        for arm in results.arms.values()
    }
    if len(set(excluded.values())) > 1:
        lines.append(
            "Excluded from the test text, by arm: "
            f"{'; '.join(f'{name} ({counts})' for name, counts in excluded.items())}."
        )
    return lines


def _counts(counts: Mapping) -> str:
    return ", ".join(event(number, text) for text, number in counts.items())


def _reads(run: RunResult) -> tuple:
    """Returns everything that determines the order of a run's text, except its seed."""
    data = run.manifest.get("data", {})
    model = run.config.model
    return (
        data.get("train", {}).get("sha256"),
        data.get("tokenizer_sha256"),
        data.get("objective"),
        run.config.data,
        model.family,
        model.prefix_lm,
    )


def provenance(results: Results) -> list[tuple[str, str]]:
    """Returns (name, value) pairs: file, code, versions, devices, test text and tokenizer."""
    runs = [run for arm in results.arms.values() for run in arm.runs.values()]
    recorded = lambda key: sorted({str(run.manifest.get(key, "")) for run in runs} - {""})
    versions = sorted(
        {
            f"{name} {version}"
            for run in runs
            for name, version in run.manifest.get("versions", {}).items()
        }
    )
    devices = sorted(
        {
            f"{len(run.manifest.get('devices', []))} x {(run.manifest.get('devices') or ['?'])[0]}"
            for run in runs
        }
    )
    test = runs[0].manifest.get("data", {}).get("test", {}) if runs else {}
    study = _study(results)
    return [
        *(
            [
                (
                    "experiment",
                    f"{study.file}, sha256 {hashlib.sha256(study.text.encode()).hexdigest()[:16]}",
                )
            ]
            if study and study.text
            else []
        ),
        (
            "code",
            ", ".join(f"transformer {version}" for version in recorded("transformer")) + "; commit "
            f"{', '.join(x[:12] + '+' * x.endswith('+') for x in recorded('commit'))}",
        ),
        ("versions", f"Python {', '.join(recorded('python'))}; {', '.join(versions)}"),
        ("devices", ", ".join(devices)),
        (
            "tested on",
            f"{test.get('examples', '?')} examples, sha256 {str(test.get('sha256', '?'))[:16]}",
        ),
        (
            "tokenizer",
            ", ".join(
                sorted(
                    {
                        str(run.manifest.get("data", {}).get("tokenizer_sha256", "?"))[:16]
                        for run in runs
                    }
                )
            ),
        ),
    ]


def reproduction_commands(results: Results) -> str:
    """Returns the commands that reproduce the report."""
    where = " ".join(map(str, results.folders))
    compare = ["python", "-m", "transformer", "compare", *map(str, results.folders)]
    sweep = (study := _study(results)) and study.sweep
    if not sweep or sweep.metric != results.sweep.metric:
        compare.append(f"--metric={results.sweep.metric}")
    if not sweep or sweep.baseline != results.sweep.baseline:
        compare.append(f"--baseline={results.sweep.baseline}")
    if (
        metric_kind := kind(results.sweep.metric)
    ) is None or metric_kind.higher != results.sweep.higher_is_better:
        compare.append(
            "--higher-is-better" if results.sweep.higher_is_better else "--lower-is-better"
        )
    lines = [shlex.join(compare)]
    if study:
        options = [f"--config={study.file}"] * bool(study.file) + [
            f"--config.{key}={value}" for key, value in study.overrides.items()
        ]
        lines.insert(
            0, shlex.join(["python", "-m", "transformer", "sweep", *options, f"--workdir={where}"])
        )
    return "\n".join(lines)


def _study(results: Results) -> Study | None:
    is_sweep = len(results.folders) == 1 and (results.folders[0] / "sweep.json").exists()
    return load_study(results.folders[0]) if is_sweep else None
