"""Runs a command on a Cloud TPU VM, from creating the VM to deleting it.

    python launch/tpu_vm.py up NAME --zone=us-east5-a --type=v5p-128 --bucket=MY_BUCKET --spot -- \\
        train --config=experiments/scale/decoder_8b.py --workdir=runs/8b \\
        --config.mesh.fsdp=-1 --config.mesh.data=1

`up` does everything: it prints the price, creates the TPU, copies the committed code to all
workers, installs it there, starts the command on all of them, and follows the output of the first.
When the TPU was preempted or a worker died, it starts over, at most `--restarts` times, and the run
resumes from its last checkpoint. --type has the syntax of --topology in `plan`: v5p-128 or
v5p:4x4x4. Each part is also a verb:

    create   install   start   follow   status   stop   delete

With --queued, the TPU is a queued resource: if the zone has no room, the request waits in the queue
of the cloud, and costs nothing meanwhile. With --create=--valid-until-duration=6h, a request waits
for six hours at most, and with --restarts=0 there is no other. --slices=4 requests four TPUs of
this type, which train together as one run (multislice). It implies --queued. Give --queued or
--slices to the other verbs too.

The bucket is mounted as ~/transformer/runs on every worker (gcsfuse), so all workers share one
--workdir, and it outlives the TPU. A slice of more than one host needs a bucket. Ctrl-C stops
following the output; the run continues. `stop` saves a checkpoint and ends the run, also while `up`
runs. The exit code is that of the run. A run that exits with code 2 (user error) is not restarted.
The TPU stays up, unless --delete is given and the run succeeds. Each run of a sweep uses the whole
TPU, one run after another. To split a sweep instead, start several TPUs with --shard=1/4,
--shard=2/4, ...

--env=WANDB_API_KEY sets a variable for the run to its value here, --env=NAME=VALUE to another.
Values are copied in a file and never printed. Other options of gcloud are given once for each:
--create=--network=vpc --create=--internal-ips --create=--reserved --create=--service-account=SA for
the creation, --ssh=--tunnel-through-iap for connections.
"""

from files import check_files, uncommitted
from shell import (
    HOST,
    ROOT,
    Parser,
    bucket,
    check_command,
    check_name,
    check_numbers,
    check_workdir,
    installed,
    machine,
    mistake,
    parse,
    print_price,
    start,
    variable,
)
from tpu import IMAGES, Queued, Tpu, product


def _parser() -> Parser:
    parser = Parser(__doc__)
    verbs = ("up", "create", "install", "start", "follow", "status", "stop", "delete")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("name", help="name of the TPU VM")
    parser.add_argument("--zone", required=True, help="zone of the TPU, such as us-east5-a")
    parser.add_argument("--project", default="", help="default: the project of gcloud's config")
    parser.add_argument("--type", default="", help="v4-64, v5e-16, v5p-128, v5p:4x4x4, v6e-64, ...")
    parser.add_argument("--bucket", type=bucket, help="bucket that keeps the runs")
    parser.add_argument(
        "--spot", action="store_true", help="use a cheaper TPU that may be preempted"
    )
    parser.add_argument("--queued", action="store_true", help="wait in the queue of the cloud")
    parser.add_argument("--slices", type=int, default=1, help="number of TPUs (default: 1)")
    parser.add_argument("--price", type=float, metavar="USD", help="price of one chip per hour")
    parser.add_argument(
        "--restarts", type=int, default=20, help="attempts after the first one (default: 20)"
    )
    parser.add_argument("--wait", type=float, default=60, help="seconds between attempts and looks")
    several = {"action": "append", "default": [], "help": "see above"}
    parser.add_argument("--env", type=variable, metavar="NAME", **several)
    for verb in ("create", "ssh"):
        parser.add_argument(f"--{verb}", metavar="--OPTION=VALUE", **several)
    parser.add_argument("--delete", action="store_true", help="delete the TPU when `up` succeeds")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parse(_parser(), argv)
    check_name(args.name)
    check_numbers(args, restarts=0, slices=1)
    if args.verb in ("up", "start"):
        check_command(args.command, ROOT)
    if args.verb in ("up", "create"):
        if not args.type:
            mistake("--type: missing; set the kind of TPU, such as v5p-128")
        product(args.type)
        tpu = machine("--type", args.type, IMAGES, args.slices)
        hosts = args.slices > 1 or tpu.chips > (8 if tpu.chip.axes == 2 else HOST)
        if args.verb == "up" and hosts and not args.bucket:
            several = f"{args.slices} times " * (args.slices > 1)
            mistake(
                f"--type: {several}{args.type!r} has more than one host, and all must share "
                "--workdir; keep runs/ in a bucket with --bucket=NAME"
            )
    if args.verb == "up" and args.spot and not args.bucket:
        mistake(
            "--spot: the run's checkpoints would be lost when the TPU is preempted; "
            "keep them in a bucket with --bucket=NAME"
        )
    if args.bucket:
        check_workdir(args.command, args.bucket)
    if not args.dry_run:
        installed("gcloud")
    if args.verb in ("up", "install"):
        check_files(args.command, uncommitted())
    if args.verb in ("up", "create"):
        print_price(machine("--type", args.type, IMAGES, args.slices), args.price)
    kind = Queued if args.queued or args.slices > 1 else Tpu
    return getattr(kind(args), args.verb)()


if __name__ == "__main__":
    start(main)
