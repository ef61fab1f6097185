"""The speed of arms, which compares them only if all were measured under equal conditions."""

import json
import math
from collections.abc import Mapping

from transformer.lab.results import Results

CONDITIONS = ("host", "devices", "mesh", "processes", "versions", "commit", "trained_together")
"""What manifests record about the conditions of a measurement."""

FREE = 0.05, 0.5
"""Speed is disturbed if other processes use more than this share of a host's cores, or cores."""


def disturbances(results: Results) -> list[str]:
    """Returns why the speeds of runs cannot be compared, in sentences; empty if they can."""
    timed = [run for run in results.runs if not math.isnan(run.speed)]
    lines, starts = [], []
    for run in timed:
        entries = [x for x in run.manifest.get("earlier_starts", ()) if isinstance(x, Mapping)]
        starts += [x | {"trained_together": run.together} for x in (*entries, run.manifest)]
    for name in CONDITIONS:
        values = {json.dumps(start.get(name), sort_keys=True) for start in starts}
        if len(values) > 1:
            shown = "; ".join(sorted(values)) if max(map(len, values)) < 40 else len(values)
            lines.append(f"Runs differ in {name.replace('_', ' ')}: {shown}.")
        elif name == "host" and values == {"null"}:
            lines.append("The runs do not record their host.")
    others = [run.last("time/other_cores") for run in timed]
    if any(map(math.isnan, others)):
        lines.append("It is not recorded whether other processes ran.")
    limits = [min(FREE[0] * run.manifest.get("cores", 1), FREE[1]) for run in timed]
    if any(x > limit for x, limit in zip(others, limits, strict=True)):
        cores = "/".join(sorted({str(run.manifest.get("cores", "?")) for run in timed}))
        used = (
            f"up to {max(x for x in others if not math.isnan(x)):.1f} of the host's {cores} cores"
        )
        lines.append(f"Other processes used {used} during training.")
    return lines
