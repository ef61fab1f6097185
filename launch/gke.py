"""Runs a command on GKE as a JobSet, with one job per slice of TPUs and one pod per host.

    python launch/gke.py NAME --topology=v5p:4x4x4 --slices=2 \\
        --image=REGION-docker.pkg.dev/PROJECT/REPO/transformer:TAG --bucket=MY_BUCKET \\
        --service-account=SA -- train --config=... --workdir=runs/8b --config.mesh.fsdp=64 \\
        --config.mesh.data=-1

This passes a manifest to `kubectl apply`; --dry-run prints both. --topology has the syntax of
`plan`: v5p:4x4x4 or v5p-128. The image is built from launch/Dockerfile:

    docker build --file=launch/Dockerfile --tag=IMAGE . && docker push IMAGE

The cluster needs the JobSet controller and a node pool of that topology. With --bucket, it also
needs the GCS FUSE driver and a Kubernetes service account that may use the bucket. The bucket is
mounted as /transformer/runs; all other files of a pod are lost with it. Pods find each other
through the settings of GKE. When a pod is preempted or dies, the whole set restarts, at most
`--restarts` times, and the run resumes from its last checkpoint. A run that exits with code 2 (user
error) is not restarted. Each run of a sweep uses all slices, one run after another. To split a
sweep instead, start several sets with --shard=1/4, --shard=2/4, ...

Follow it:   kubectl logs --follow -l jobset.sigs.k8s.io/jobset-name=NAME --prefix
Delete it:   kubectl delete jobset NAME
"""

import json

from shell import (
    HOST,
    MISTAKE,
    ROOT,
    Parser,
    bucket,
    check_command,
    check_name,
    check_numbers,
    check_workdir,
    machine,
    parse,
    run,
    start,
)

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Kind of chip -> its name on GKE (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)."""

SPOT = "cloud.google.com/gke-spot"


def manifest(args, tpu) -> dict:
    """Returns the manifest of the JobSet."""
    chips, shape = tpu.chips // tpu.slices, "x".join(map(str, tpu.shape))
    hosts, host_chips = max(chips // HOST, 1), min(chips, HOST)
    container = {
        "name": "transformer", "image": args.image, "workingDir": "/transformer",
        "command": ["python", "-m", "transformer", *args.command],
        "ports": [{"containerPort": 8471}, {"containerPort": 8431}],
        "resources": {
            "requests": {"google.com/tpu": host_chips}, "limits": {"google.com/tpu": host_chips},
        },
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": 120,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[tpu.kind],
            "cloud.google.com/gke-tpu-topology": shape,
        },
        "containers": [container],
    }  # fmt: skip
    if args.spot:
        pod["nodeSelector"][SPOT] = "true"
        pod["tolerations"] = [
            {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    annotations = {}
    if args.bucket:
        annotations = {"gke-gcsfuse/volumes": "true"}
        container["volumeMounts"] = [{"name": "runs", "mountPath": "/transformer/runs"}]
        pod["volumes"] = [
            {"name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {
                "bucketName": args.bucket,
                "mountOptions": "implicit-dirs,rename-dir-limit=100000"}}},
        ]  # fmt: skip
    if args.service_account:
        pod["serviceAccountName"] = args.service_account
    job = {
        "backoffLimit": 0, "completions": hosts, "parallelism": hosts,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {
            "containerName": "transformer", "operator": "In", "values": [MISTAKE]}}]},
        "template": {"metadata": {"annotations": annotations}, "spec": pod},
    }  # fmt: skip
    fail_on_mistake = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
        "metadata": {"name": args.name, "annotations": {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}},
        "spec": {
            "failurePolicy": {"maxRestarts": args.restarts, "rules": [fail_on_mistake]},
            "replicatedJobs": [
                {"name": "slice", "replicas": args.slices, "template": {"spec": job}},
            ],
        },
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("name", help="name of the JobSet")
    parser.add_argument(
        "--topology", required=True, help="v5p:4x4x4, v5p-128, v5e:4x8, v6e-64, tpu7x:4x4x4, ..."
    )
    parser.add_argument("--slices", type=int, default=1, help="number of slices (default: 1)")
    parser.add_argument(
        "--spot", action="store_true", help="use cheaper machines that may be preempted"
    )
    parser.add_argument("--image", required=True, help="image of the code; see above")
    parser.add_argument("--bucket", type=bucket, help="bucket that keeps the runs")
    parser.add_argument("--service-account", default="", help="account that may use the bucket")
    parser.add_argument(
        "--restarts", type=int, default=20, help="restarts after a failure (default: 20)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the manifest without applying it"
    )
    args = parse(parser, argv)
    check_name(args.name)
    tpu = machine("--topology", args.topology, ACCELERATORS, args.slices)
    check_numbers(args, restarts=0)
    check_command(args.command, ROOT)
    check_workdir(args.command, args.bucket)
    return run(
        ["kubectl", "apply", "--filename=-"],
        args.dry_run,
        stdin=json.dumps(manifest(args, tpu), indent=2) + "\n",
    )


if __name__ == "__main__":
    start(main)
