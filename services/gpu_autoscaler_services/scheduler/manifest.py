"""The Kubernetes Job of a job: one object for its whole life. Pure; used by the binder.

Source: Kubernetes API reference v1.36, "Job"; Kubernetes, "Jobs: Pod failure policy" (read 2026-11-21).
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from gpu_autoscaler.core.demand import share_memory
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.kube.translate.common import GPU_MODEL_LABELS
from gpu_autoscaler.kube.translate.node import CAPACITY_TYPE_LABELS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import GPU_RESOURCE

RUN_SECONDS = "simcluster.gpu-autoscaler.io/run-seconds"  # simulated kubelets read how long the work takes
# Long enough to read logs and status afterwards. Source: our own.
KEPT_SECONDS_AFTER_END = 3600
PREFERENCE_WEIGHT = 100  # the most there is

_Term = tuple[dict[str, Any], ...]  # conditions that hold together


def job_manifest(spec: JobSpec, state: ClusterState) -> dict[str, Any]:
    """Return the Job, suspended: nothing runs until `release_patch`. Its name is the job's id."""
    # Admission lets only such ids and words in that can be names and label values.
    told = {labels.JOB_ID: spec.job_id, labels.PROJECT_ID: spec.project_id}
    if spec.workload_type is not None:
        told[labels.WORKLOAD_TYPE] = spec.workload_type
    run = {} if spec.run_seconds is None else {RUN_SECONDS: f"{spec.run_seconds:g}"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": spec.job_id, "labels": told},
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "completions": spec.member_count,
            "parallelism": spec.member_count,
            # A failure of the work ends the job; pods that were moved do not count, and are replaced only when they
            # are gone for good, so that no member ever runs twice.
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ],
            },
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": max(1, int(spec.duration_seconds_max)),
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
            "template": {
                "metadata": {"labels": told, "annotations": run},
                "spec": _pod_spec(spec, state),
            },
        },
    }


def release_patch(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> dict[str, Any]:
    """Return the merge patch that lets the Job go, with a liking for these nodes. Valid once: then it is immutable."""
    affinity = {"nodeAffinity": _node_affinity(spec, state, node_names)}
    return {"spec": {"suspend": False, "template": {"spec": {"affinity": affinity}}}}


def _pod_spec(spec: JobSpec, state: ClusterState) -> dict[str, Any]:
    amounts = _amounts(spec)
    container: dict[str, Any] = {
        "name": "main",
        "image": spec.image,
        "env": [{"name": name, "value": value} for name, value in sorted(spec.env.items())],
        "resources": {"requests": amounts, "limits": amounts},
    }
    if spec.command:
        container["command"] = list(spec.command)
    return {
        "restartPolicy": "Never",
        "containers": [container],
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}] if spec.member_resources.has_gpus else [],
        "affinity": {"nodeAffinity": _node_affinity(spec, state, ())},
    }


def _amounts(spec: JobSpec) -> dict[str, str]:
    """Requests equal limits (S73): what is promised is what may be used."""
    wanted = spec.member_resources
    amounts = {
        "cpu": f"{wanted.cpu_milli}m",
        "memory": str(wanted.memory_bytes),
        "ephemeral-storage": str(wanted.ephemeral_storage_bytes),
        GPU_RESOURCE: str(wanted.gpu_count),
        **{name: str(count) for name, count in wanted.slices},
    }
    return {name: amount for name, amount in amounts.items() if amount not in ("0", "0m")}


def _node_affinity(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> dict[str, Any]:
    """What the job needs of its nodes as required; the nodes of its placement, and the best GPUs, as preferred."""
    groups = [_models(spec, state), _memories(spec, state), _capacity_types(spec), _domain(spec, state, node_names)]
    terms = [
        {"matchExpressions": [condition for part in parts for condition in part]}
        for parts in product(*(group for group in groups if group))
    ]
    affinity: dict[str, Any] = {}
    if any(groups):
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    liked = [*_liked_hosts(node_names), *_liked_models(spec)]
    if liked:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": weight, "preference": {"matchExpressions": [condition]}} for weight, condition in liked
        ]
    return affinity


def _liked_hosts(node_names: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    """The nodes of the placement, above all else."""
    return [(PREFERENCE_WEIGHT, _in(labels.HOSTNAME, sorted(set(node_names))))] if node_names else []


def _liked_models(spec: JobSpec) -> list[tuple[int, dict[str, Any]]]:
    """Of several GPU models the best one, and the next, for pods that come back; the last needs no word."""
    return [
        (max(1, PREFERENCE_WEIGHT // 2 - number), _in(labels.GPU_MODEL, [model]))
        for number, model in enumerate(spec.models[:-1])
    ]


def _models(spec: JobSpec, state: ClusterState) -> list[_Term]:
    """The GPU model by each label that names it: ours, and those that nodes of other makers carry now."""
    if not spec.models:
        return []
    values: dict[str, set[str]] = {}
    nodes = [node for node in state.nodes.values() if node.gpu_model in spec.models]
    for node in nodes:
        for key, value in node.labels:
            if key in GPU_MODEL_LABELS and key != labels.GPU_MODEL:
                values.setdefault(key, set()).add(value)
    # A node that carries our label says no less by the others.
    carried = [dict(node.labels) for node in nodes]
    apart = {key for each in carried if labels.GPU_MODEL not in each for key in each}
    others = [(_in(key, sorted(found)),) for key, found in values.items() if key in apart]
    return [(_in(labels.GPU_MODEL, sorted(spec.models)),), *others]


def _memories(spec: JobSpec, state: ClusterState) -> list[_Term]:
    """Enough memory in each GPU: by instance type where one is known to have it, by the driver's own label."""
    wanted = spec.gpu_memory_bytes_min
    if wanted is None:
        return []
    if (part := share_memory(spec)) is not None:
        return [tuple({"key": one.key, "operator": one.operator, "values": [*one.values]} for one in part.requirements)]
    offers = () if state.offers is None else state.offers.offers
    types = {offer.instance_type for offer in offers if (offer.gpu_memory_bytes or 0) >= wanted}
    types |= {
        node.instance_type
        for node in state.nodes.values()
        if node.instance_type is not None and (node.gpu_memory_bytes or 0) >= wanted
    }
    mebibytes = -(-wanted // 2**20)
    by_driver = {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [str(mebibytes - 1)]}
    return [(_in(labels.INSTANCE_TYPE, sorted(types)),), (by_driver,)] if types else [(by_driver,)]


def _capacity_types(spec: JobSpec) -> list[_Term]:
    """Never on spot for work that must not be interrupted: only nodes that say that they are something else."""
    if spec.is_preemptible:
        return []
    lasting: Mapping[str, list[str]] = {
        key: sorted(word for word, capacity_type in words.items() if capacity_type is not CapacityType.SPOT)
        for key, words in CAPACITY_TYPE_LABELS.items()
    }
    return [(_in(key, words),) for key, words in lasting.items() if words]


def _domain(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> list[_Term]:
    """The domain of the placement, for members that must share one; before the placement there is none yet."""
    if spec.within is None or not node_names:
        return []
    chosen = set(node_names)
    values = {
        value
        for node in state.nodes.values()
        if node.name in chosen
        for key, value in node.labels
        if key == spec.within
    }
    return [(_in(spec.within, sorted(values)),)] if len(values) == 1 else []


def _in(key: str, values: Sequence[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
