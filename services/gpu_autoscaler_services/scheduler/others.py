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
from gpu_autoscaler.kube.translate.node import CAPACITY_TYPE_LABELS
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler_services.scheduler.manifest import (
    KEPT_SECONDS_AFTER_END,
    affinity,
    domain,
    members,
    pod_template,
    seconds_max,
    told_of,
)

# How often members may be moved is the policy's to say (`job_retries_count_max`), and it ends the job then. Volcano's
# own count, 3 unless it is told, is not to come before that; it restarts one time fewer.
VOLCANO_RETRIES_COUNT = 1000
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
    return _release_jobset(_domain_selector(spec, node_names, state))


def release_jobset_anew(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> Patch:
    """The same for one that was held, so that nothing binds it to spot: a selector names how its place was bought.

    Selectors know no "not": where the nodes of the place share no such label, or spot is allowed, it goes on as it was.
    """
    selector = _domain_selector(spec, node_names, state)
    if not spec.is_preemptible:
        selector |= _lasting_selector(node_names, state)
    return _release_jobset(selector)


def _domain_selector(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> dict[str, str]:
    value = domain(spec, state, node_names)
    return {} if spec.within is None or value is None else {spec.within: value}


def _lasting_selector(node_names: Sequence[str], state: ClusterState) -> dict[str, str]:
    """The first label by which all these nodes say the same of how they were bought, and not that they are spot."""
    chosen = set(node_names)
    carried = [dict(node.labels) for node in state.nodes.values() if node.name in chosen]
    for key, words in CAPACITY_TYPE_LABELS.items():
        said = {each.get(key) for each in carried}
        word = said.pop() if len(said) == 1 else None
        if word is not None and words.get(word) not in (None, CapacityType.SPOT):
            return {key: word}
    return {}


def _release_jobset(selector: dict[str, str]) -> Patch:
    operations: list[dict[str, Any]] = [{"op": "replace", "path": "/spec/suspend", "value": False}]
    if selector:
        path = "/spec/replicatedJobs/0/template/spec/template/spec/nodeSelector"
        operations.append({"op": "add", "path": path, "value": selector})
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

    Volcano's scheduler binds its gang. A member that is deleted, by an eviction for one, is `PodEvicted` to its
    controller, and has not failed, whatever it ends with; the others may fail for want of it, which looks like any
    failure: so all begin anew before. Ends by signal are no reason to: a time that is over looks the same. Read in
    v1.10.0: `job_controller_handler.go`, `state/running.go`.
    """
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": spec.job_id, "labels": told_of(spec)},
        "spec": {
            "schedulerName": "volcano",
            "queue": "default",  # where its webhook does not write so (it may be away), no pod is ever made
            "minAvailable": spec.member_count,
            "plugins": {"env": [], "svc": []},  # an index each, and names that the members find each other by
            "policies": [
                {"event": "PodEvicted", "action": "RestartJob"},
                {"event": "PodFailed", "action": "TerminateJob"},
            ],
            "maxRetry": VOLCANO_RETRIES_COUNT,
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
