"""Members in the kinds that others bring: JobSet, PyTorchJob, RayJob and Volcano's Job. Pure; used by the binder.

Each is made so that its own controller starts all members of a gang or none, gives them stable names, replaces a member
that was moved and ends the whole where the work fails. Source: definitions, Go types and webhooks of JobSet 0.8,
Training Operator 1.8, KubeRay 1.3 and Volcano 1.10 (read 2026-11-21).
"""

import shlex
from collections.abc import Sequence
from typing import Any

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.kube.protocol import Patch
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler_services.scheduler.manifest import (
    KEPT_SECONDS_AFTER_END,
    affinity,
    domain,
    members,
    pod_template,
    seconds_max,
    told_of,
)

# A RayJob whose head went cannot go on, and KubeRay does not tell that from work that failed: both begin anew. Work
# that is never moved needs none of it. Three: as often as the policy lets a job be moved by default (S80).
RAY_RETRIES_COUNT = 3


def jobset(spec: JobSpec, state: ClusterState) -> dict[str, Any]:
    """Return a suspended JobSet of one indexed Job; its controller names the members."""
    job = {**members(spec), "activeDeadlineSeconds": seconds_max(spec), "template": pod_template(spec, state)}
    told = told_of(spec)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": spec.job_id, "labels": told},
        "spec": {
            "suspend": True,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "gang", "replicas": 1, "template": {"metadata": {"labels": told}, "spec": job}}
            ],
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
        },
    }


def release_jobset(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> Patch:
    """Return the operations that let the JobSet go. Its webhook lets no affinity be changed, but node selectors: the
    domain that the members share is said by one, the liking for their nodes cannot be."""
    value = domain(spec, state, node_names)
    operations: list[dict[str, Any]] = [{"op": "replace", "path": "/spec/suspend", "value": False}]
    if spec.within is not None and value is not None:
        path = "/spec/replicatedJobs/0/template/spec/template/spec/nodeSelector"
        operations.append({"op": "add", "path": path, "value": {spec.within: value}})
    return operations


def pytorchjob(spec: JobSpec, state: ClusterState) -> dict[str, Any]:
    """Return a suspended PyTorchJob: the first member is the master, and all are told where it is."""
    # Ends below 128 are failures of the work, above it those of a signal: a member that was told to go (the CRD's
    # description of `restartPolicy`).
    replica = {
        "restartPolicy": "ExitCode",
        "template": _without_restart(pod_template(spec, state, container="pytorch")),
    }
    roles = {"Master": {"replicas": 1, **replica}}
    if spec.member_count > 1:
        roles["Worker"] = {"replicas": spec.member_count - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": spec.job_id, "labels": told_of(spec)},
        "spec": {
            "runPolicy": {
                "suspend": True,
                "activeDeadlineSeconds": seconds_max(spec),
                "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
                "cleanPodPolicy": "Running",
                "schedulingPolicy": {"minAvailable": spec.member_count},
            },
            "pytorchReplicaSpecs": roles,
        },
    }


def release_pytorchjob(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> Patch:
    """Return the merge patch that lets the PyTorchJob go, with a liking for these nodes."""
    liking = {"template": {"spec": {"affinity": affinity(spec, state, node_names)}}}
    roles = ("Master", "Worker") if spec.member_count > 1 else ("Master",)
    return {"spec": {"runPolicy": {"suspend": False}, "pytorchReplicaSpecs": dict.fromkeys(roles, liking)}}


def rayjob(spec: JobSpec, state: ClusterState) -> dict[str, Any]:
    """Return a suspended RayJob with a cluster of its own: the first member is the head, and works like the others.

    Its entrypoint is handed over by HTTP: a pod that submits it would be one more than the gang has.
    """
    cluster: dict[str, Any] = {
        "headGroupSpec": {"rayStartParams": {}, "template": pod_template(spec, state, container="ray-head")}
    }
    if spec.member_count > 1:
        others = spec.member_count - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": others,
                "minReplicas": others,
                "maxReplicas": others,
                "rayStartParams": {},
                "template": pod_template(spec, state, container="ray-worker"),
            }
        ]
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        group["template"] = _without_command(_without_restart(group["template"]))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": spec.job_id, "labels": told_of(spec)},
        "spec": {
            "suspend": True,
            "entrypoint": shlex.join(spec.command),
            "submissionMode": "HTTPMode",
            "activeDeadlineSeconds": seconds_max(spec),
            "backoffLimit": RAY_RETRIES_COUNT if spec.is_preemptible else 0,
            "shutdownAfterJobFinishes": True,  # without it none can be made suspended
            "ttlSecondsAfterFinished": 0,  # of the cluster: GPUs are given back at once, the RayJob stays
            "rayClusterSpec": cluster,
        },
    }


def release_rayjob(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> Patch:
    """Return the operations that let the RayJob go, with a liking for these nodes."""
    groups = ["headGroupSpec", *(["workerGroupSpecs/0"] if spec.member_count > 1 else [])]
    liking = affinity(spec, state, node_names)
    return [
        {"op": "replace", "path": "/spec/suspend", "value": False},
        *(
            {"op": "add", "path": f"/spec/rayClusterSpec/{group}/template/spec/affinity", "value": liking}
            for group in groups
        ),
    ]


def volcano_job(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> dict[str, Any]:
    """Return a Job of Volcano as it may run, on these nodes if they have room: it cannot be made suspended.

    Volcano's scheduler binds its gang. A pod that is gone without having failed is made again by its controller.
    """
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": spec.job_id, "labels": told_of(spec)},
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": spec.member_count,
            "plugins": {"env": [], "svc": []},  # an index each, and names that the members find each other by
            "policies": [{"event": "PodFailed", "action": "TerminateJob"}],
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
            "tasks": [
                {
                    "name": "member",
                    "replicas": spec.member_count,
                    "template": _with_deadline(pod_template(spec, state, node_names=node_names), spec),
                }
            ],
        },
    }


def _with_deadline(template: dict[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Volcano's Job has no limit of time of its own; its pods have."""
    return {**template, "spec": {**template["spec"], "activeDeadlineSeconds": seconds_max(spec)}}


def _without_restart(template: dict[str, Any]) -> dict[str, Any]:
    """Whether pods start again is said elsewhere in this kind."""
    return {**template, "spec": {key: said for key, said in template["spec"].items() if key != "restartPolicy"}}


def _without_command(template: dict[str, Any]) -> dict[str, Any]:
    """Containers run Ray; the work is its entrypoint."""
    containers = [
        {key: said for key, said in container.items() if key != "command"}
        for container in template["spec"]["containers"]
    ]
    return {**template, "spec": {**template["spec"], "containers": containers}}
