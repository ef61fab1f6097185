"""What a report says of a study: its arms, where its numbers are from, and how to run it again."""

import hashlib
import shlex
from collections.abc import Mapping

from transformer.lab.profiles import reads
from transformer.lab.results import Results, Run
from transformer.lab.study import Study, load_study
from transformer.units import kind, of_tokens, unit


def about(results: Results) -> list[str]:
    """What was asked and what varied."""
    sweep, runs = results.sweep, sum(len(arm.runs) for arm in results.arms.values())
    fields = [field for field in sweep.fields if field != "arm"]
    lines = [f"Varied: {', '.join(fields)}." if fields else "Runs compared with each other."]
    same = all(set(arm.runs) == set(sweep.seeds) for arm in results.arms.values())
    same_text = (
        len({str(_reads(run)) for arm in results.arms.values() for run in arm.runs.values()}) == 1
    )
    paired = (
        "; all arms have the same seeds"
        if same
        else "; not every arm has every seed, and those that both have are compared"
    )
    paired += ", and so the same text in the same order" if same and same_text else ""
    lines.append(
        f"{len(results.arms)} arms, {runs} runs, seeds {', '.join(map(str, sweep.seeds))}{paired}."
        if len(sweep.seeds) > 1
        else f"{len(results.arms)} arms, {runs} runs of one seed: nothing is known of how much another seed would change, so there are no intervals."
    )
    said = [
        sweep.metric,
        unit(sweep.metric, results.asks_for_tokens),
        f"on {part}" if (part := reads(results, sweep.metric)) else "",
    ]
    lines.append(
        f"Decides: {', '.join(filter(None, said))}; {'higher' if sweep.higher_is_better else 'lower'} is better."
    )
    lines += _texts(results)
    lines += [f"Declared: arms differ in {name}: {why}." for name, why in sweep.declared.items()]
    lines += [f"Control: {arm}: {why}." for arm, why in sweep.controls.items()]
    lines += (
        [f"Arms were sized equal in {'FLOPs a token' if sweep.match == 'flops' else sweep.match}."]
        if sweep.match
        else []
    )
    return lines


def _texts(results: Results) -> list[str]:
    """Where arms are judged on other texts, on other tokens of a text, or on parts of it."""
    sweep, lines = results.sweep, []
    texts = {
        str(run.manifest.get("data", {}).get("test", {}).get("sha256"))
        for arm in results.arms.values()
        for run in arm.runs.values()
    }
    lines += (
        ["Arms are judged on texts of their own, which belongs to what was asked."]
        if len(texts) > 1
        else []
    )
    objectives = {
        str(run.manifest.get("data", {}).get("objective"))
        for arm in results.arms.values()
        for run in arm.runs.values()
    }
    if len(objectives) > 1 and of_tokens(sweep.metric, results.asks_for_tokens):
        lines.append(
            f"Arms have objectives of their own ({', '.join(sorted(objectives))}), so {sweep.metric} is not of the same tokens in all of them."
        )
    dropped = {
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
    if len(set(dropped.values())) > 1:
        lines.append(
            f"Of the test text arms leave out: {'; '.join(f'{name} {what}' for name, what in dropped.items())}."
        )
    return lines


def _counts(of: Mapping) -> str:
    return ", ".join(f"{why} {count:,}" for why, count in of.items())


def _reads(run: Run) -> tuple:
    """What the order of a run's text hangs on, beside its seed."""
    told = run.manifest.get("data", {})
    model = run.config.model
    return (
        told.get("train", {}).get("sha256"),
        told.get("tokenizer_sha256"),
        told.get("objective"),
        run.config.data,
        model.family,
        model.prefix_lm,
    )


def provenance(results: Results) -> list[tuple[str, str]]:
    """Where the numbers come from."""
    runs = [run for arm in results.arms.values() for run in arm.runs.values()]
    told = lambda key: sorted({str(run.manifest.get(key, "")) for run in runs} - {""})
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
            ", ".join(f"transformer {version}" for version in told("transformer"))
            + f"; commit {', '.join(one[:12] + '+' * one.endswith('+') for one in told('commit'))}",
        ),
        ("versions", f"Python {', '.join(told('python'))}; {', '.join(versions)}"),
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


def again(results: Results) -> str:
    """The commands that give it again."""
    where = " ".join(map(str, results.folders))
    compared = ["python", "-m", "transformer", "compare", *map(str, results.folders)]
    of = (study := _study(results)) and study.sweep
    if not of or of.metric != results.sweep.metric:
        compared.append(f"--metric={results.sweep.metric}")
    if not of or of.baseline != results.sweep.baseline:
        compared.append(f"--baseline={results.sweep.baseline}")
    if (
        known := kind(results.sweep.metric)
    ) is None or known.higher != results.sweep.higher_is_better:
        compared.append(
            "--higher-is-better" if results.sweep.higher_is_better else "--lower-is-better"
        )
    lines = [shlex.join(compared)]
    if study:
        asked = [f"--config={study.file}"] * bool(study.file) + [
            f"--config.{key}={value}" for key, value in study.overrides.items()
        ]
        lines.insert(
            0, shlex.join(["python", "-m", "transformer", "sweep", *asked, f"--workdir={where}"])
        )
    return "\n".join(lines)


def _study(results: Results) -> Study | None:
    there = len(results.folders) == 1 and (results.folders[0] / "sweep.json").exists()
    return load_study(results.folders[0]) if there else None
