"""The Kubernetes Job of a job: one object for its whole life. Pure; used by `binder.py`.

Source: Kubernetes API reference v1.36, "Job"; Kubernetes, "Jobs: Pod failure policy" (read 2026-11-21).
"""

from collections.abc import Container, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from gpu_autoscaler.core.demand.sources import GPU_TOLERATIONS, share_memory
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.kube.pod_templates.resources import Template, main_index, with_devices
from gpu_autoscaler.kube.translate.common import GPU_MODEL_LABELS
from gpu_autoscaler.kube.translate.node import CAPACITY_TYPE_LABELS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import JobSpec, Runtime
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import GPU_RESOURCE

# Long enough to read logs and status. Source: our own.
KEPT_SECONDS_AFTER_END = 3600
PREFERENCE_WEIGHT = 100  # the maximum
RENDEZVOUS_PORT = "29500"  # PyTorch's own default

_TOLERATIONS = [
    {name: value for name, value in msgspec.structs.asdict(toleration).items() if value}
    for toleration in GPU_TOLERATIONS
]

_Term = tuple[dict[str, Any], ...]  # conditions joined by AND
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def job_manifest(spec: JobSpec, state: ClusterState, template: Template | None = None) -> dict[str, Any]:
    """Return the suspended Job: nothing runs until `release_patch`. Its name is the job's id."""
    annotations = {} if spec.member_count_min is None else {labels.MIN_MEMBERS: str(spec.member_count_min)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": spec.job_id, "labels": job_labels(spec), "annotations": annotations},
        "spec": {
            "suspend": True,
            "activeDeadlineSeconds": seconds_max(spec),
            "ttlSecondsAfterFinished": KEPT_SECONDS_AFTER_END,
            **members(spec),
            "template": pod_template(spec, state, template),
        },
    }


def members(spec: JobSpec) -> dict[str, Any]:
    """Return the fields of an indexed Job whose members start together and never run twice."""
    return {
        "completionMode": "Indexed",
        "completions": spec.member_count,
        "parallelism": spec.member_count,
        # A failure of the work ends the job; evicted pods do not count, and are replaced only when they are gone, so
        # that no member runs twice.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "podReplacementPolicy": "Failed",
    }


def release_patch(
    spec: JobSpec, node_names: Sequence[str], state: ClusterState, template: Template | None = None
) -> dict[str, Any]:
    """Return the merge patch that resumes the Job, preferring these nodes. Valid once: then the template is fixed."""
    preferred = affinity(spec, state, node_names, template)
    return {"spec": {"suspend": False, "template": {"spec": {"affinity": preferred}}}}


def gang_service(spec: JobSpec, job: core.Job) -> dict[str, Any]:
    """Return the headless Service that gives each member its DNS name, `<job id>-<index>.gang-<job id>`.

    Names resolve before members are ready. The Service is deleted with its Job.
    Source: Kubernetes, "Job with Pod-to-Pod Communication" (read 2026-11-21).
    """
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.metadata.name, "uid": job.metadata.uid}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": gang_name(spec), "labels": job_labels(spec), "ownerReferences": [owner]},
        "spec": {"clusterIP": "None", "selector": {labels.JOB_ID: spec.job_id}, "publishNotReadyAddresses": True},
    }


def gang_name(spec: JobSpec) -> str:
    """Return the members' subdomain; prefixed since Service names begin with a letter and job ids need not."""
    return f"gang-{spec.job_id}"


def is_gang(spec: JobSpec) -> bool:
    """Return True for more than one member."""
    return spec.member_count > 1


def job_labels(spec: JobSpec) -> dict[str, str]:
    """Return the labels of every object that is created for the job; admission ensures that the values are valid."""
    optional = {
        labels.WORKLOAD_TYPE: spec.workload_type,
        labels.GPU_COST_CENTER: spec.cost_center,
        labels.GPU_TENANT: spec.tenant,
    }
    job = {labels.JOB_ID: spec.job_id, labels.PROJECT_ID: spec.project_id, labels.GPU_PROJECT: spec.project_id}
    return job | {key: value for key, value in optional.items() if value}


def seconds_max(spec: JobSpec) -> int:
    """Return the job's time limit in whole seconds, as Kubernetes needs it."""
    return max(1, int(spec.duration_seconds_max))


def pod_template(
    spec: JobSpec,
    state: ClusterState,
    template: Template | None = None,
    *,
    node_names: Sequence[str] = (),
    container: str = "main",
) -> dict[str, Any]:
    """Return the pod template of the members: the job's own with our fields, or one from its short form.

    `container`: the container name that the job kind requires; a template of a job has it already.
    """
    run = {} if spec.run_seconds is None else {labels.SIMULATED_RUN_SECONDS: f"{spec.run_seconds:g}"}
    metadata: Mapping[str, Any] = {} if template is None else template.get("metadata", {})
    pod_spec = _short_form(spec, container) if template is None else _pod_spec(spec, template)
    if _needs_gang_service(spec):
        pod_spec["subdomain"] = gang_name(spec)
    if spec.priority_class:
        pod_spec["priorityClassName"] = spec.priority_class
    if spec.service_account and not pod_spec.get("serviceAccountName"):
        pod_spec["serviceAccountName"] = spec.service_account
    return {
        "metadata": {
            "labels": metadata.get("labels", {}) | spec.pod_labels | job_labels(spec),
            "annotations": metadata.get("annotations", {}) | spec.pod_annotations | run,
        },
        "spec": pod_spec | {"affinity": affinity(spec, state, node_names, template)},
    }


def _short_form(spec: JobSpec, container_name: str) -> dict[str, Any]:
    amounts = _amounts(spec)
    container: dict[str, Any] = {
        "name": container_name,
        "image": spec.image,
        "env": [
            *_rendezvous(spec, spec.env),
            *({"name": name, "value": value} for name, value in sorted(spec.env.items())),
        ],
        "resources": {"requests": amounts, "limits": amounts},
    }
    if spec.command:
        container["command"] = list(spec.command)
    return {"restartPolicy": "Never", "containers": [container], "tolerations": _gpu_tolerations(spec)}


def _pod_spec(spec: JobSpec, template: Template) -> dict[str, Any]:
    """Return the template's spec with our fields; admission has refused those that contradict them."""
    main = main_index(template["spec"], spec.runtime) or 0
    pod_spec: dict[str, Any] = with_devices(template, spec.member_resources, main)["spec"]
    containers = list(pod_spec["containers"])
    own = containers[main].get("env", [])
    if rendezvous := _rendezvous(spec, {variable["name"] for variable in own}):
        containers[main] = {**containers[main], "env": [*rendezvous, *own]}
    tolerations = pod_spec.get("tolerations", [])
    added = [toleration for toleration in _gpu_tolerations(spec) if toleration not in tolerations]
    return pod_spec | {"restartPolicy": "Never", "containers": containers, "tolerations": [*tolerations, *added]}


def _gpu_tolerations(spec: JobSpec) -> list[dict[str, str]]:
    return _TOLERATIONS if spec.member_resources.has_gpus else []


def _needs_gang_service(spec: JobSpec) -> bool:
    """Return True if we name the members; the controllers of other kinds do it themselves."""
    return is_gang(spec) and spec.runtime is Runtime.JOB


def _rendezvous(spec: JobSpec, own: Container[str]) -> list[dict[str, Any]]:
    """Return PyTorch's rendezvous variables for the members of a gang; those of the request (`own`) take precedence.

    Source: PyTorch documentation, "Distributed communication package", environment variable initialization; the rank
    of an indexed Job's pod is its index (read 2026-11-21).
    """
    if not _needs_gang_service(spec):
        return []
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    variables: dict[str, dict[str, Any]] = {
        "MASTER_ADDR": {"value": f"{spec.job_id}-0.{gang_name(spec)}"},
        "MASTER_PORT": {"value": RENDEZVOUS_PORT},
        "RANK": {"valueFrom": index},
        "WORLD_SIZE": {"value": str(spec.member_count)},
    }
    return [{"name": name, **value} for name, value in variables.items() if name not in own]


def _amounts(spec: JobSpec) -> dict[str, str]:
    """Return the amounts for requests and limits, which are equal."""
    wanted = spec.member_resources
    amounts = {
        "cpu": f"{wanted.cpu_milli}m",
        "memory": str(wanted.memory_bytes),
        "ephemeral-storage": str(wanted.ephemeral_storage_bytes),
        GPU_RESOURCE: str(wanted.gpu_count),
        **{name: str(count) for name, count in wanted.slices},
    }
    return {name: amount for name, amount in amounts.items() if amount not in ("0", "0m")}


def affinity(
    spec: JobSpec, state: ClusterState, node_names: Sequence[str], template: Template | None = None
) -> dict[str, Any]:
    """Return the job's node requirements as required affinity; its placement and best GPUs as preferred affinity.

    The template's affinity is kept: its required terms hold together with ours, its preferences stand beside ours.
    """
    value = domain(spec, state, node_names)
    within: list[_Term] = [] if spec.within is None or value is None else [(_in(spec.within, [value]),)]
    groups = [_models(spec, state), _memories(spec, state), _capacity_types(spec), within]
    own: list[dict[str, Any]] = [
        {"matchExpressions": [condition for part in parts for condition in part]}
        for parts in product(*(group for group in groups if group))
    ]
    given: Mapping[str, Any] = {} if template is None else template["spec"].get("affinity", {})
    given_nodes = given.get("nodeAffinity", {})
    terms = _combined(given_nodes.get(_REQUIRED, {}).get("nodeSelectorTerms", []), own if any(groups) else [])
    node_affinity: dict[str, Any] = {_REQUIRED: {"nodeSelectorTerms": terms}} if terms else {}
    # The GPU models, best first, for replaced pods; the last model needs no weight.
    preferences = [
        (max(1, PREFERENCE_WEIGHT // 2 - number), _in(labels.GPU_MODEL, [model]))
        for number, model in enumerate(spec.models[:-1])
    ]
    if node_names:
        preferences.insert(0, (PREFERENCE_WEIGHT, _in(labels.HOSTNAME, sorted(set(node_names)))))
    preferred = [
        {"weight": weight, "preference": {"matchExpressions": [condition]}} for weight, condition in preferences
    ]
    if preferred := [*preferred, *given_nodes.get(_PREFERRED, [])]:
        node_affinity[_PREFERRED] = preferred
    return {**given, "nodeAffinity": node_affinity}


def _combined(given: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return terms that hold where one of both lists holds; an empty list holds everywhere."""
    if not given or not own:
        return given or own
    return [
        {**first, "matchExpressions": [*first.get("matchExpressions", []), *second["matchExpressions"]]}
        for first in given
        for second in own
    ]


def _models(spec: JobSpec, state: ClusterState) -> list[_Term]:
    """Return the GPU models by each label that names them: ours, and those that nodes carry now."""
    if not spec.models:
        return []
    values: dict[str, set[str]] = {}
    nodes = [node for node in state.nodes.values() if node.gpu_model in spec.models]
    for node in nodes:
        for key, value in node.labels:
            if key in GPU_MODEL_LABELS and key != labels.GPU_MODEL:
                values.setdefault(key, set()).add(value)
    # Nodes with our label need no other.
    node_labels = [dict(node.labels) for node in nodes]
    needed_keys = {key for carried in node_labels if labels.GPU_MODEL not in carried for key in carried}
    others = [(_in(key, sorted(models)),) for key, models in values.items() if key in needed_keys]
    return [(_in(labels.GPU_MODEL, sorted(spec.models)),), *others]


def _memories(spec: JobSpec, state: ClusterState) -> list[_Term]:
    """Return terms for enough GPU memory: by instance types that have it, and by the driver's label."""
    wanted = spec.gpu_memory_bytes_min
    if wanted is None:
        return []
    if (part := share_memory(spec)) is not None:
        return [
            tuple({"key": item.key, "operator": item.operator, "values": [*item.values]} for item in part.requirements)
        ]
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
    """Return terms that exclude spot for non-preemptible work: nodes labeled with another capacity type."""
    if spec.is_preemptible:
        return []
    lasting: Mapping[str, list[str]] = {
        key: sorted(word for word, capacity_type in words.items() if capacity_type is not CapacityType.SPOT)
        for key, words in CAPACITY_TYPE_LABELS.items()
    }
    return [(_in(key, words),) for key, words in lasting.items() if words]


def domain(spec: JobSpec, state: ClusterState, node_names: Sequence[str]) -> str | None:
    """Return the topology domain that these nodes share (the value of `spec.within`); None if they share none."""
    chosen = set(node_names)
    values = {
        value
        for node in state.nodes.values()
        if node.name in chosen
        for key, value in node.labels
        if key == spec.within
    }
    return values.pop() if len(values) == 1 else None


def _in(key: str, values: Sequence[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
