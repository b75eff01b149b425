"""A pod template with everything that real jobs use, for tests of templates."""

from typing import Any

import msgspec
from tests.support.outside import request_body
from tests.support.stories import T0, request

from gpu_autoscaler.core.intake.admission import UNKNOWN_SUPPLY
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.pod_templates.admission import Admitted, admit
from gpu_autoscaler.model.jobs import ContainerRequest, Violation

Template = dict[str, Any]


def template(name: str = "main") -> Template:
    """Return a new template whose first container has this name."""
    return {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"example.com/owner": "vision"}},
        "spec": {
            "serviceAccountName": "trainer",
            "imagePullSecrets": [{"name": "registry"}],
            "terminationGracePeriodSeconds": 120,
            "runtimeClassName": "nvidia",
            "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 2000},
            "nodeSelector": {"disk": "nvme"},
            "tolerations": [{"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}],
            "affinity": _affinity(),
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "datasets", "readOnly": True}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
                {"name": "settings", "configMap": {"name": "training"}},
                {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 256}},
            ],
            "initContainers": [
                {
                    "name": "fetch",
                    "image": "registry.example/fetch:1",
                    "args": ["--to", "/data"],
                    "resources": {"requests": {"cpu": "12", "memory": "1Gi"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {
                    "name": "proxy",
                    "image": "registry.example/proxy:1",
                    "restartPolicy": "Always",
                    "resources": {"requests": {"cpu": "500m"}},
                },
            ],
            "containers": [
                _main(name),
                {"name": "logs", "image": "registry.example/logs:1", "resources": {"limits": {"memory": "1Gi"}}},
            ],
        },
    }


def templated_body(name: str = "train", **spec: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Return a request of a job with this template, as users write it; `spec`: changes of the pods."""
    body = request_body(name)
    own = template()
    own["spec"] |= spec
    return {key: value for key, value in body.items() if key not in ("container", "resources")} | {"pod_template": own}


def _affinity() -> Template:
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r1", "r2"]}]}]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 7, "preference": {"matchExpressions": [{"key": "fast", "operator": "Exists"}]}}
            ],
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"noisy": "yes"}}}
            ]
        },
    }


def _main(name: str) -> Template:
    return {
        "name": name,
        "image": "registry.example/train:1",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": ["train.py", "--epochs", "3"],
        "workingDir": "/work",
        "ports": [{"name": "metrics", "containerPort": 9090}],
        "env": [
            {"name": "TOKEN", "value": "secret-value"},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}},
        ],
        "envFrom": [{"secretRef": {"name": "env", "optional": True}}, {"configMapRef": {"name": "env"}}],
        "resources": {"requests": {"cpu": 4, "memory": "32Gi"}, "limits": {"cpu": "8"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path in a container
            {"name": "settings", "mountPath": "/etc/training"},
            {"name": "keys", "mountPath": "/etc/keys"},
        ],
    }


def templated(pod_template: Template | None = None, **changes: Any) -> JobRequested:  # noqa: ANN401 - fields
    """Return a valid request with this template, or the full one."""
    own = template() if pod_template is None else pod_template
    return request(**{"container": ContainerRequest(image=""), "pod_template": own, **changes})


def admitted(pod_template: Template | None = None, **changes: Any) -> Admitted:  # noqa: ANN401 - fields
    """Return the accepted job of a valid request."""
    result = answer(templated(pod_template, **changes))
    assert isinstance(result, Admitted), result
    return result


def answer(asked: JobRequested) -> Admitted | tuple[Violation, ...]:
    """Admit the request while no offer is known, so that every GPU is available."""
    return admit(asked, event_id="e", at=T0, now=T0, policy=DEFAULT_POLICY, supply=UNKNOWN_SUPPLY)


def violations(pod_template: Template | None = None, **changes: Any) -> dict[str, str]:  # noqa: ANN401 - fields
    """Return the reasons of a refused request by field."""
    result = answer(templated(pod_template, **changes))
    assert not isinstance(result, Admitted), "the request was accepted"
    return {violation.field: violation.reason for violation in result}


def changed(path: str, value: object) -> Template:
    """Return the full template with another value at a path such as `spec.containers.0.image`."""
    whole = template()
    *parents, last = path.split(".")
    place: Any = whole
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    place[int(last) if isinstance(place, list) else last] = value
    return whole


def lacking(kept: object, wanted: object, path: str = "") -> list[str]:
    """Return the paths of `wanted` that `kept` lacks or has with other values; lists may have more items, in order."""
    if isinstance(wanted, dict):
        if not isinstance(kept, dict):
            return [path]
        return [item for key, value in wanted.items() for item in lacking(kept.get(key), value, f"{path}.{key}")]
    if isinstance(wanted, list):
        left = list(kept) if isinstance(kept, list) else []
        missing = []
        for index, value in enumerate(wanted):
            position = next((place for place, item in enumerate(left) if not lacking(item, value)), None)
            if position is None:
                missing.append(f"{path}[{index}]")
            else:
                del left[: position + 1]
        return missing
    return [] if kept == wanted or str(kept) == str(wanted) else [path]


def encoded(pod_template: Template) -> bytes:
    """Return the template as JSON."""
    return msgspec.json.encode(pod_template)
