"""Runs a command on slices of TPUs in GKE, with xpk (github.com/AI-Hypercomputer/xpk).

    python launch/gke.py NAME --cluster=CLUSTER --topology=v5p:4x4x4 --slices=2 \\
        --image=REGION-docker.pkg.dev/PROJECT/REPO/transformer:TAG --storage=runs -- \\
        train --config=... --workdir=runs/8b --config.mesh.fsdp=64 --config.mesh.data=-1

This calls `xpk workload create`; --dry-run prints the command. --topology has the syntax of `plan`:
v5p:4x4x4 or v5p-128. The image is built from launch/Dockerfile:

    docker build --file=launch/Dockerfile --tag=IMAGE . && docker push IMAGE

The cluster is created once, and a bucket is attached to it, so that runs/ outlives the machines:

    xpk cluster create --cluster=CLUSTER --tpu-type=v5p-4x4x4 --num-slices=2 --spot \\
        --enable-workload-identity --enable-gcsfuse-csi-driver
    xpk storage attach runs --cluster=CLUSTER --type=gcsfuse --bucket=MY_BUCKET --size=1 \\
        --mount-point=/transformer/runs --readonly=false --auto-mount=false \\
        --mount-options=implicit-dirs,rename-dir-limit=100000

xpk queues the run until its slices are free. Processes find each other through the settings of GKE.
When a pod is preempted or dies, the whole run restarts, at most `--restarts` times, and resumes
from its last checkpoint. A run that exits with code 2 (user error) is not restarted. Each run of a
sweep uses all slices, one run after another. To split a sweep instead, start several runs with
--shard=1/4, --shard=2/4, ...

--env=WANDB_API_KEY sets a variable for the run to its value here, --env=NAME=VALUE to another. They
become part of the manifest, of which xpk leaves a copy in the temporary folder. Other options of
xpk are given once for each: --xpk=--zone=us-east5-a --xpk=--project=P --xpk=--priority=high.

Follow it:   kubectl logs --follow --container=jax-tpu \\
                 -l xpk.google.com/workload=NAME,batch.kubernetes.io/job-completion-index=0
Delete it:   xpk workload delete --workload=NAME --cluster=CLUSTER
"""

import re
import shlex
import tempfile
from pathlib import Path

from shell import (
    MISTAKE,
    ROOT,
    Parser,
    check_command,
    check_name,
    check_numbers,
    check_workdir,
    machine,
    mistake,
    parse,
    print_price,
    run,
    start,
    variable,
    write_variables,
)

TYPES = {"v4": "v4", "v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
"""Kind of chip -> its name in xpk's --tpu-type."""

RESTART = f"1,{MISTAKE + 1}-126"
"""Exit codes after which xpk restarts a run, besides 127 to 255 (signals), where it always does."""

GRACE = 120
"""Seconds between SIGTERM and SIGKILL, in which a run saves its state."""


def workload(args, tpu) -> list[str]:
    """Returns the command that creates the workload.

    `exec` makes the run the process that receives SIGTERM.
    """
    command = shlex.join(["python", "-m", "transformer", *args.command])
    axes = sorted(tpu.shape, key=lambda size: (size == 1, size))  # as xpk writes them: 2x2x1, 4x4x8
    options = {
        "workload": args.name,
        "cluster": args.cluster,
        "tpu-type": f"{TYPES[tpu.kind]}-{'x'.join(map(str, axes))}",
        "num-slices": args.slices,
        "docker-image": args.image,
        "max-restarts": args.restarts,
        "restart-on-exit-codes": RESTART,
        "termination-grace-period-seconds": GRACE,
    }
    if args.storage:
        options["storage"] = args.storage
    words = [f"--{name}={value}" for name, value in options.items()]
    if tpu.kind == "tpu7x":
        words.append("--no-use-parallel-containers")  # one process per host, as on other TPUs
    words.append(f"--command=cd /transformer && exec {command}")
    return ["xpk", "workload", "create", *words, *args.xpk]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("name", help="name of the workload")
    parser.add_argument("--cluster", required=True, help="cluster that xpk created")
    parser.add_argument(
        "--topology", required=True, help="v5p:4x4x4, v5p-128, v5e:4x8, v6e-64, tpu7x:4x4x4, ..."
    )
    parser.add_argument("--slices", type=int, default=1, help="number of slices (default: 1)")
    parser.add_argument("--image", required=True, help="image of the code; see above")
    parser.add_argument("--storage", default="", help="storage of the cluster that keeps the runs")
    parser.add_argument(
        "--restarts", type=int, default=20, help="restarts after a failure (default: 20)"
    )
    parser.add_argument("--price", type=float, metavar="USD", help="price of one chip per hour")
    several = {"action": "append", "default": [], "help": "see above"}
    parser.add_argument("--env", type=variable, metavar="NAME", **several)
    parser.add_argument("--xpk", metavar="--OPTION=VALUE", **several)
    parser.add_argument("--dry-run", action="store_true", help="print the command only")
    args = parse(parser, argv)
    check_name(args.name)
    tpu = machine("--topology", args.topology, TYPES, args.slices)
    check_numbers(args, restarts=0)
    check_command(args.command, ROOT)
    check_workdir(args.command, args.storage, "--storage")
    if any("\n" in word for word in args.command):
        mistake("an option after -- contains a line break, which xpk cannot pass on")
    if unsafe := [name for name, value in args.env if re.search(r'["\\]|\$\(', value)]:
        mistake(f'--env: the value of {unsafe[0]} has one of " \\ $(, which xpk cannot pass on')
    print_price(tpu, args.price)
    with tempfile.TemporaryDirectory() as folder:
        command = workload(args, tpu)
        if args.env:
            file = Path("/tmp" if args.dry_run else folder) / "transformer.env"
            command.append(f"--env-file={file}")
            if not args.dry_run:
                write_variables(file, (f"{name}={value}" for name, value in args.env))
        return run(command, args.dry_run)


if __name__ == "__main__":
    start(main)
