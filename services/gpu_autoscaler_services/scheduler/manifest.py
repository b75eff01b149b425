"""The Kubernetes Job of a job: one object for its whole life. Pure; used by the binder.

Source: Kubernetes API reference v1.36, "Job"; Kubernetes, "Jobs: Pod failure policy" (read 2026-11-21).
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from gpu_autoscaler.core.demand import share_memory
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.common import GPU_MODEL_LABELS
from gpu_autoscaler.kube.translate.node import CAPACITY_TYPE_LABELS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import JobSpec, Runtime
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import GPU_RESOURCE

RUN_SECONDS = "simcluster.gpu-autoscaler.io/run-seconds"  # simulated kubelets read how long the work takes
# Long enough to read logs and status afterwards. Source: our own.
KEPT_SECONDS_AFTER_END = 3600
PREFERENCE_WEIGHT = 100  # the most there is
RENDEZVOUS_PORT = "29500"  # PyTorch's own default

_Term = tuple[dict[str, Any], ...]  # conditions that hold together


def job_manifest(spec: JobSpec, state: ClusterState) -> dict[str, Any]:
    """Return the Job, suspended: nothing runs until `release_patch`. Its name is the job's id."""
    enough = {} if spec.member_count_min is None else {labels.MIN_MEMBERS: str(spec.member_count_min)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": spec.job_id, "labels": told_of(spec), "annotations": enough},
        "spec": {
            "suspend": True,
            "activeDeadlineSeconds": seconds_max(spec),
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
            **members(spec),
            "template": pod_template(spec, state),
        },
    }


def members(spec: JobSpec) -> dict[str, Any]:
    """Return what makes a Job one of members: an index each, all at once, and none that runs twice."""
    return {
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
    }


def release_patch(spec: JobSpec, node_names: Sequence[str], state: ClusterState) -> dict[str, Any]:
    """Return the merge patch that lets the Job go, with a liking for these nodes. Valid once: then it is immutable."""
    return {"spec": {"suspend": False, "template": {"spec": {"affinity": affinity(spec, state, node_names)}}}}


def gang_service(spec: JobSpec, job: wire.Job) -> dict[str, Any]:
    """Return the headless Service that gives each member its name, `<job id>-<index>.gang-<job id>`, also before it
    is ready; it goes with its Job. Source: Kubernetes, "Job with Pod-to-Pod Communication" (read 2026-11-21)."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.metadata.name, "uid": job.metadata.uid}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": gang_name(spec), "labels": told_of(spec), "ownerReferences": [owner]},
        "spec": {
            "clusterIP": "None",
            "selector": {labels.JOB_ID: spec.job_id},
            "publishNotReadyAddresses": True,
        },
    }


def gang_name(spec: JobSpec) -> str:
    """Return the subdomain that the members share; names of Services begin with a letter, ids of jobs need not."""
    return f"gang-{spec.job_id}"


def is_gang(spec: JobSpec) -> bool:
    """True for members that may want to find each other."""
    return spec.member_count > 1


def told_of(spec: JobSpec) -> dict[str, str]:
    """Return the labels of everything that is made for the job."""
    # Admission lets only such ids and words in that can be names and label values.
    told = {labels.JOB_ID: spec.job_id, labels.PROJECT_ID: spec.project_id}
    if spec.workload_type is not None:
        told[labels.WORKLOAD_TYPE] = spec.workload_type
    return told


def seconds_max(spec: JobSpec) -> int:
    """Return how long the work may take, in whole seconds as Kubernetes counts them."""
    return max(1, int(spec.duration_seconds_max))


def pod_template(
    spec: JobSpec, state: ClusterState, *, node_names: Sequence[str] = (), container: str = "main"
) -> dict[str, Any]:
    """Return the template of every member, whatever kind it stands in; `container` is what that kind calls its own."""
    run = {} if spec.run_seconds is None else {RUN_SECONDS: f"{spec.run_seconds:g}"}
    return {
        "metadata": {"labels": spec.pod_labels | told_of(spec), "annotations": spec.pod_annotations | run},
        "spec": _pod_spec(spec, state, node_names, container),
    }


def _pod_spec(spec: JobSpec, state: ClusterState, node_names: Sequence[str], container_name: str) -> dict[str, Any]:
    amounts = _amounts(spec)
    container: dict[str, Any] = {
        "name": container_name,
        "image": spec.image,
        "env": [*_rendezvous(spec), *({"name": name, "value": value} for name, value in sorted(spec.env.items()))],
        "resources": {"requests": amounts, "limits": amounts},
    }
    if spec.command:
        container["command"] = list(spec.command)
    found = {
        "restartPolicy": "Never",
        "containers": [container],
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}] if spec.member_resources.has_gpus else [],
        "affinity": affinity(spec, state, node_names),
    }
    return {**found, "subdomain": gang_name(spec)} if _names_its_members(spec) else found


def _names_its_members(spec: JobSpec) -> bool:
    """True where the names are of our making; other kinds have controllers that see to it."""
    return is_gang(spec) and spec.runtime is Runtime.JOB


def _rendezvous(spec: JobSpec) -> list[dict[str, Any]]:
    """Where the members of a gang meet, as PyTorch and its like ask for it; what the request says itself stands.

    Source: PyTorch documentation, "Distributed communication package", environment variable initialization; the rank
    of an indexed Job's pod is its index (read 2026-11-21).
    """
    if not _names_its_members(spec):
        return []
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    found: dict[str, dict[str, Any]] = {
        "MASTER_ADDR": {"value": f"{spec.job_id}-0.{gang_name(spec)}"},
        "MASTER_PORT": {"value": RENDEZVOUS_PORT},
        "RANK": {"valueFrom": index},
        "WORLD_SIZE": {"value": str(spec.member_count)},
    }
    return [{"name": name, **said} for name, said in found.items() if name not in spec.env]


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


def affinity(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> dict[str, Any]:
    """Return what the job needs of its nodes as required; the nodes of its placement, and the best GPUs, as
    preferred."""
    groups = [_models(spec, state), _memories(spec, state), _capacity_types(spec), _domain(spec, state, node_names)]
    terms = [
        {"matchExpressions": [condition for part in parts for condition in part]}
        for parts in product(*(group for group in groups if group))
    ]
    found: dict[str, Any] = {}
    if any(groups):
        found["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    liked = [*_liked_hosts(node_names), *_liked_models(spec)]
    if liked:
        found["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": weight, "preference": {"matchExpressions": [condition]}} for weight, condition in liked
        ]
    return {"nodeAffinity": found}


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


def domain(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> str | None:
    """Return the one value that these nodes share of the label that the members must share; None: there is none."""
    chosen = set(node_names)
    values = {
        value
        for node in state.nodes.values()
        if node.name in chosen
        for key, value in node.labels
        if key == spec.within
    }
    return values.pop() if len(values) == 1 else None


def _domain(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> list[_Term]:
    """The domain of the placement, for members that must share one; before the placement there is none yet."""
    value = domain(spec, state, node_names)
    return [] if spec.within is None or value is None else [(_in(spec.within, [value]),)]


def _in(key: str, values: Sequence[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
