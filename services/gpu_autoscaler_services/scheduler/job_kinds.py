"""Manifests of third-party job kinds: JobSet, PyTorchJob, RayJob and Volcano's Job. Pure; used by `binder.py`.

Source: definitions, Go types and webhooks of JobSet 0.8, Training Operator 1.8, KubeRay 1.3, Volcano 1.10 (2026-11-21).
"""

import shlex
from collections.abc import Sequence
from typing import Any

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.kube.pod_templates.admission import entrypoint
from gpu_autoscaler.kube.pod_templates.resources import Template
from gpu_autoscaler.kube.protocol import Patch
from gpu_autoscaler.kube.translate.node import CAPACITY_TYPE_LABELS
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler_services.scheduler.manifest import (
    KEPT_SECONDS_AFTER_END,
    affinity,
    domain,
    job_labels,
    members,
    pod_template,
    seconds_max,
)

# The policy's `job_retries_count_max` limits evictions. Volcano's own limit (3 by default; it restarts one time fewer)
# must not be reached before.
VOLCANO_RETRIES_COUNT = 1000
# A RayJob that lost its head restarts; KubeRay cannot tell that from failed work, so both restart. As many times as the
# policy allows by default. Source: docs/decisions.md#spot-retries.
RAY_RETRIES_COUNT = 3


def jobset(spec: JobSpec, state: ClusterState, template: Template | None = None) -> dict[str, Any]:
    """Return a suspended JobSet of one indexed Job; the JobSet controller names the members."""
    job = {**members(spec), "activeDeadlineSeconds": seconds_max(spec), "template": pod_template(spec, state, template)}
    labels = job_labels(spec)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": spec.job_id, "labels": labels},
        "spec": {
            "suspend": True,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "gang", "replicas": 1, "template": {"metadata": {"labels": labels}, "spec": job}}
            ],
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
        },
    }


def release_jobset(
    spec: JobSpec, node_names: Sequence[str], state: ClusterState, template: Template | None = None
) -> Patch:
    """Return the JSON patch that resumes the JobSet.

    Its webhook allows changes of node selectors but not of affinity: the shared topology domain becomes a selector, the
    preference for the placement's nodes is dropped.
    """
    return _release_jobset(_domain_selector(spec, node_names, state), template)


def resume_jobset(
    spec: JobSpec, node_names: Sequence[str], state: ClusterState, template: Template | None = None
) -> Patch:
    """Return the JSON patch that resumes a JobSet that must leave spot: a selector names the capacity type.

    Selectors have no negation: if the placement's nodes share no such label, or spot is allowed, there is no selector.
    """
    selector = _domain_selector(spec, node_names, state)
    if not spec.is_preemptible:
        selector |= _lasting_selector(node_names, state)
    return _release_jobset(selector, template)


def _domain_selector(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> dict[str, str]:
    value = domain(spec, state, node_names)
    return {} if spec.within is None or value is None else {spec.within: value}


def _lasting_selector(node_names: Sequence[str], state: ClusterState) -> dict[str, str]:
    """Return the first capacity type label on which all these nodes agree, unless they agree on spot."""
    chosen = set(node_names)
    node_labels = [dict(node.labels) for node in state.nodes.values() if node.name in chosen]
    for key, capacity_types in CAPACITY_TYPE_LABELS.items():
        values = {labels.get(key) for labels in node_labels}
        value = values.pop() if len(values) == 1 else None
        if value is not None and capacity_types.get(value) not in (None, CapacityType.SPOT):
            return {key: value}
    return {}


def _release_jobset(selector: dict[str, str], template: Template | None) -> Patch:
    operations: list[dict[str, Any]] = [{"op": "replace", "path": "/spec/suspend", "value": False}]
    if selector:
        given = {} if template is None else template["spec"].get("nodeSelector", {})
        path = "/spec/replicatedJobs/0/template/spec/template/spec/nodeSelector"
        operations.append({"op": "add", "path": path, "value": given | selector})
    return operations


def pytorchjob(spec: JobSpec, state: ClusterState, template: Template | None = None) -> dict[str, Any]:
    """Return a suspended PyTorchJob: the first member is the master, whose address all members get."""
    # Exit codes below 128 are failures of the work, those above are signals: an evicted member (the CRD's description
    # of `restartPolicy`).
    replica = {
        "restartPolicy": "ExitCode",
        "template": _without_restart(pod_template(spec, state, template, container="pytorch")),
    }
    roles = {"Master": {"replicas": 1, **replica}}
    if spec.member_count > 1:
        roles["Worker"] = {"replicas": spec.member_count - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": spec.job_id, "labels": job_labels(spec)},
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


def release_pytorchjob(
    spec: JobSpec, node_names: Sequence[str], state: ClusterState, template: Template | None = None
) -> Patch:
    """Return the merge patch that resumes the PyTorchJob, with a preference for these nodes."""
    replica = {"template": {"spec": {"affinity": affinity(spec, state, node_names, template)}}}
    roles = ("Master", "Worker") if spec.member_count > 1 else ("Master",)
    return {"spec": {"runPolicy": {"suspend": False}, "pytorchReplicaSpecs": dict.fromkeys(roles, replica)}}


def rayjob(spec: JobSpec, state: ClusterState, template: Template | None = None) -> dict[str, Any]:
    """Return a suspended RayJob with a cluster of its own: the first member is the head and works as well.

    The entrypoint is submitted by HTTP: a submitter pod would be one pod more than the gang has.
    """
    cluster: dict[str, Any] = {
        "headGroupSpec": {"rayStartParams": {}, "template": pod_template(spec, state, template, container="ray-head")}
    }
    if spec.member_count > 1:
        workers_count = spec.member_count - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": workers_count,
                "minReplicas": workers_count,
                "maxReplicas": workers_count,
                "rayStartParams": {},
                "template": pod_template(spec, state, template, container="ray-worker"),
            }
        ]
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        group["template"] = _without_command(_without_restart(group["template"]))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": spec.job_id, "labels": job_labels(spec)},
        "spec": {
            "suspend": True,
            "entrypoint": shlex.join(spec.command if template is None else entrypoint(template)),
            "submissionMode": "HTTPMode",
            "activeDeadlineSeconds": seconds_max(spec),
            "backoffLimit": RAY_RETRIES_COUNT if spec.is_preemptible else 0,
            "shutdownAfterJobFinishes": True,  # required for suspended creation
            "ttlSecondsAfterFinished": 0,  # of the cluster: frees its GPUs at once, the RayJob stays
            "rayClusterSpec": cluster,
        },
    }


def release_rayjob(
    spec: JobSpec, node_names: Sequence[str], state: ClusterState, template: Template | None = None
) -> Patch:
    """Return the JSON patch that resumes the RayJob, with a preference for these nodes."""
    groups = ["headGroupSpec", *(["workerGroupSpecs/0"] if spec.member_count > 1 else [])]
    preferred = affinity(spec, state, node_names, template)
    return [
        {"op": "replace", "path": "/spec/suspend", "value": False},
        *(
            {"op": "add", "path": f"/spec/rayClusterSpec/{group}/template/spec/affinity", "value": preferred}
            for group in groups
        ),
    ]


def volcano_job(
    spec: JobSpec, state: ClusterState, node_names: Sequence[str], template: Template | None = None
) -> dict[str, Any]:
    """Return a running Volcano Job with a preference for these nodes: the kind cannot be created suspended.

    Volcano's scheduler binds the gang. A deleted (for example evicted) member is `PodEvicted` to its controller, never
    failed. The others may then fail for lack of it, which looks like any failure, so all restart first. Exit by signal
    is no reason to restart: a timeout looks the same. Source: v1.10.0, `job_controller_handler.go`, `state/running.go`.
    """
    member = pod_template(spec, state, template, node_names=node_names)
    member["spec"]["activeDeadlineSeconds"] = seconds_max(spec)  # Volcano's Job has no time limit of its own
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": spec.job_id, "labels": job_labels(spec)},
        "spec": {
            "schedulerName": "volcano",
            "queue": "default",  # normally set by its webhook; without it no pod is created
            "minAvailable": spec.member_count,
            "plugins": {"env": [], "svc": []},  # an index per member, and DNS names
            "policies": [
                {"event": "PodEvicted", "action": "RestartJob"},
                {"event": "PodFailed", "action": "TerminateJob"},
            ],
            "maxRetry": VOLCANO_RETRIES_COUNT,
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
            "tasks": [{"name": "member", "replicas": spec.member_count, "template": member}],
        },
    }


def _without_restart(template: dict[str, Any]) -> dict[str, Any]:
    """Remove the restart policy, which this kind defines elsewhere."""
    return {**template, "spec": {key: value for key, value in template["spec"].items() if key != "restartPolicy"}}


def _without_command(template: dict[str, Any]) -> dict[str, Any]:
    """Remove the command of the first container: it runs Ray, and its command is the entrypoint."""
    first, *others = template["spec"]["containers"]
    ray = {key: value for key, value in first.items() if key not in ("command", "args")}
    return {**template, "spec": {**template["spec"], "containers": [ray, *others]}}
