"""A run on GKE: a JobSet, one job a slice of TPUs, one pod a host.

    python launch/gke.py NAME --topology=v5p:4x4x4 --slices=2 --image=REGION-docker.pkg.dev/PROJECT/REPO/transformer:TAG \\
        --bucket=MY_BUCKET --service-account=SA -- train --config=... --workdir=runs/8b --config.mesh.fsdp=64 --config.mesh.data=-1

prints the manifest and hands it to `kubectl apply`; --dry-run prints it alone. The image is built by launch/Dockerfile:

    docker build --file=launch/Dockerfile --tag=IMAGE . && docker push IMAGE

The cluster needs the JobSet controller, a node pool of that topology and, for --bucket, the GCS FUSE driver and a Kubernetes service
account that may use it. The bucket is the pods' /transformer/runs. Pods find each other by what GKE tells them. When a pod is preempted
or dies, the whole set begins again, `--restarts` times at most, and the run goes on from its last checkpoint; exit code 2, a mistake,
ends it. Follow it:   kubectl logs --follow -l jobset.sigs.k8s.io/jobset-name=NAME --prefix
Delete it:            kubectl delete jobset NAME
"""

import argparse
import json
import math
import sys

from shell import MISTAKE, need_command, parse, run

CHIPS = {  # topology's name -> (the accelerator's name on GKE, chips of a host)
    "v4": ("tpu-v4-podslice", 4), "v5e": ("tpu-v5-lite-podslice", 4), "v5p": ("tpu-v5p-slice", 4), "v6e": ("tpu-v6e-slice", 4),
}  # fmt: skip


def manifest(args) -> dict:
    """The JobSet, as Kubernetes reads it."""
    chip, _, shape = args.topology.partition(":")
    accelerator, per_host = CHIPS[chip]
    chips = math.prod(map(int, shape.split("x")))
    hosts, on_host = max(chips // per_host, 1), min(chips, per_host)
    container = {
        "name": "transformer", "image": args.image, "workingDir": "/transformer", "command": ["python", "-m", "transformer", *args.command],
        "ports": [{"containerPort": 8471}, {"containerPort": 8431}],
        "resources": {"requests": {"google.com/tpu": on_host}, "limits": {"google.com/tpu": on_host}},
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "terminationGracePeriodSeconds": 120,
        "nodeSelector": {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": shape},
        "containers": [container],
    }  # fmt: skip
    annotations = {}
    if args.bucket:
        annotations = {"gke-gcsfuse/volumes": "true"}
        container["volumeMounts"] = [{"name": "runs", "mountPath": "/transformer/runs"}]
        attributes = {"bucketName": args.bucket, "mountOptions": "implicit-dirs,rename-dir-limit=100000"}
        pod["volumes"] = [
            {"name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}
        ]
    if args.service_account:
        pod["serviceAccountName"] = args.service_account
    job = {
        "backoffLimit": 0, "completions": hosts, "parallelism": hosts,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"containerName": "transformer", "operator": "In", "values": [MISTAKE]}}]},
        "template": {"metadata": {"annotations": annotations}, "spec": pod},
    }  # fmt: skip
    mistake = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
        "metadata": {"name": args.name, "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}},
        "spec": {
            "failurePolicy": {"maxRestarts": args.restarts, "rules": [mistake]},
            "replicatedJobs": [{"name": "slice", "replicas": args.slices, "template": {"spec": job}}],
        },
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the JobSet")
    parser.add_argument("--topology", required=True, help="v5p:4x4x4, v5e:4x8, v6e:8x8, v4:2x2x4, ...")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--image", required=True)
    parser.add_argument("--bucket", default="", help="holds the runs")
    parser.add_argument("--service-account", default="")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="print what would be applied")
    args = parse(parser, argv)
    chip, _, shape = args.topology.partition(":")
    if chip not in CHIPS or not all(size.isdecimal() and int(size) for size in shape.split("x")):
        parser.error(f"--topology: no {args.topology!r}; one of {', '.join(CHIPS)} and a shape, as v5p:4x4x4")
    need_command(parser, args)
    return run(["kubectl", "apply", "--filename=-"], args.dry_run, stdin=json.dumps(manifest(args), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
