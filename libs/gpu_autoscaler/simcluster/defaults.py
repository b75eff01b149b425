"""Defaults that the server writes into new objects, by kind.

Only defaults that are read somewhere. Source: `SetDefaults_*` and the strategies' `PrepareForCreate` of Kubernetes 1.36
(read 2026-11-21), compared with recorded answers.
"""

from datetime import datetime

from gpu_autoscaler.simcluster.kinds import BUDGETS, JOBS, NAMESPACES, NODES, PODS, Kind
from gpu_autoscaler.simcluster.objects import Json, requests_milli, set_pod_condition

JOB_LABELS = ("batch.kubernetes.io/controller-uid", "controller-uid")
JOB_NAME_LABELS = ("batch.kubernetes.io/job-name", "job-name")
NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
NO_EXECUTE_TOLERATION_SECONDS = 300  # admission plugin DefaultTolerationSeconds

_EMPTY_NODE = dict.fromkeys(
    (
        "machineID",
        "systemUUID",
        "bootID",
        "kernelVersion",
        "osImage",
        "containerRuntimeVersion",
        "kubeletVersion",
        "kubeProxyVersion",
        "operatingSystem",
        "architecture",
    ),
    "",
)


def fill_in(kind: Kind, item: Json, now: datetime) -> None:
    """Write the defaults of a new object in place; its metadata is complete already."""
    if kind is PODS:
        _pod(item, now)
    elif kind is JOBS:
        _job(item)
    elif kind is NODES:
        _node(item)
    elif kind is NAMESPACES:
        item.setdefault("spec", {})["finalizers"] = ["kubernetes"]
        item["status"] = {"phase": "Active"}
        item["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = item["metadata"]["name"]
    elif kind is BUDGETS:
        item["status"] = dict.fromkeys(("currentHealthy", "desiredHealthy", "disruptionsAllowed", "expectedPods"), 0)


def pod_template(spec: Json) -> None:
    """Write the defaults of a pod spec, in a pod or in a template."""
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        _container(container)
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")


def _container(container: Json) -> None:
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    container.setdefault("imagePullPolicy", "IfNotPresent")
    resources = container.setdefault("resources", {})
    limits = resources.get("limits") or {}
    if limits:
        resources["requests"] = {**limits, **(resources.get("requests") or {})}


def _pod(pod: Json, now: datetime) -> None:
    spec = pod["spec"]
    pod_template(spec)
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    tolerations = spec.setdefault("tolerations", [])
    for key in (NOT_READY, UNREACHABLE):
        if not any(
            entry.get("key", key) == key and entry.get("effect", "NoExecute") == "NoExecute" for entry in tolerations
        ):
            wait = {"operator": "Exists", "tolerationSeconds": NO_EXECUTE_TOLERATION_SECONDS}
            tolerations.append({"key": key, "effect": "NoExecute", **wait})
    pod["status"] = {"phase": "Pending", "qosClass": _quality_class(pod)}
    if spec.get("schedulingGates"):
        set_pod_condition(
            pod,
            now,
            "PodScheduled",
            status="False",
            reason="SchedulingGated",
            message="Scheduling is blocked due to non-empty scheduling gates",
        )


def _quality_class(pod: Json) -> str:
    """Return the QoS class (Kubernetes documentation, "Pod Quality of Service Classes", read 2026-11-21)."""
    requested = requests_milli(pod)
    if not any(name in requested for name in ("cpu", "memory")):
        return "BestEffort"
    for container in pod["spec"]["containers"]:
        limits = container["resources"].get("limits") or {}
        requests = container["resources"].get("requests") or {}
        if any(name not in limits or limits[name] != requests.get(name) for name in ("cpu", "memory")):
            return "Burstable"
    return "Guaranteed"


def _job(job: Json) -> None:
    spec, uid, name = job["spec"], job["metadata"]["uid"], job["metadata"]["name"]
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("manualSelector", False)
    # With a failure policy a pod is replaced only after its final failure.
    spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    template = spec["template"]
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    labels.update(dict.fromkeys(JOB_LABELS, uid) | dict.fromkeys(JOB_NAME_LABELS, name))
    pod_template(template["spec"])
    spec["selector"] = {"matchLabels": {JOB_LABELS[0]: uid}}
    if not job["metadata"].get("labels"):
        job["metadata"]["labels"] = dict(labels)
    job["status"] = {}


def _node(node: Json) -> None:
    # The admission plugin TaintNodesByCondition keeps pods off a node that is not ready yet.
    taints = node.setdefault("spec", {}).setdefault("taints", [])
    if not any(taint["key"] == NOT_READY for taint in taints):
        taints.append({"key": NOT_READY, "effect": "NoSchedule"})
    status = node.setdefault("status", {})
    status.setdefault("daemonEndpoints", {"kubeletEndpoint": {"Port": 0}})
    status.setdefault("nodeInfo", dict(_EMPTY_NODE))
