"""Kubernetes objects for tests, as JSON: a pod, a node, a job, a budget."""

from typing import Any

Json = dict[str, Any]

PREFIX = "simcluster.gpu-autoscaler.io/"


def pod(
    name: str, *, gpus: int = 0, labels: Json | None = None, annotations: Json | None = None, **spec: object
) -> Json:
    """A pod with one container that asks for whole GPUs."""
    amounts = {"cpu": "100m", "memory": "64Mi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    container = {
        "name": "main",
        "image": "example.invalid/train:1",
        "resources": {"requests": amounts, "limits": amounts},
    }
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"terminationGracePeriodSeconds": 5, "containers": [container]} | spec,
    }


def node(name: str, *, gpus: int = 8, zone: str = "us-west-2a", labels: Json | None = None) -> Json:
    """A node as a kubelet registers it. The annotation lets KWOK play the kubelet on a real control plane."""
    capacity = {"cpu": "48", "memory": "192Gi", "pods": "110", "ephemeral-storage": "200Gi"}
    if gpus:
        capacity["nvidia.com/gpu"] = str(gpus)
    own = {
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/region": zone[:-1],
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": own | (labels or {})},
        "status": {"capacity": capacity, "allocatable": capacity},
    }


READY = {"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ok"}]}}


def job(
    name: str, *, gpus: int = 1, run_seconds: float | None = None, template: Json | None = None, **spec: object
) -> Json:
    """An indexed job of pods that ask for whole GPUs; `template` adds to the pod spec."""
    annotations = {} if run_seconds is None else {f"{PREFIX}run-seconds": str(run_seconds)}
    containers = pod("x", gpus=gpus)["spec"]["containers"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "completionMode": "Indexed",
            "backoffLimit": 3,
            "template": {
                "metadata": {"annotations": annotations},
                "spec": {"restartPolicy": "Never", "containers": containers} | (template or {}),
            },
        }
        | spec,
    }


def budget(name: str, app: str, **spec: object) -> Json:
    """A disruption budget over the pods labeled `app`."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": app}}} | (spec or {"minAvailable": 1}),
    }


def eviction(name: str, uid: str | None = None) -> Json:
    """An eviction of a pod, with the uid as precondition where one is given."""
    options = {"deleteOptions": {"preconditions": {"uid": uid}}} if uid else {}
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}} | options


def binding(name: str, node_name: str) -> Json:
    """A binding of a pod to a node."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node_name}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
