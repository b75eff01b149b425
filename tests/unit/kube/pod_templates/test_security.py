"""Fields of pod templates that reach beyond their pod."""

import pytest
from tests.support.pod_templates import admitted, changed, template, violations

from gpu_autoscaler.kube.pod_templates.security import dangerous_fields

CASES = {
    "spec.hostNetwork": True,
    "spec.hostPID": True,
    "spec.hostIPC": True,
    "spec.securityContext.sysctls": [{"name": "kernel.msgmax", "value": "1"}],
    "spec.securityContext.seccompProfile": {"type": "Unconfined"},
    "spec.securityContext.seLinuxOptions": {"user": "root"},
    "spec.containers.0.securityContext.privileged": True,
    "spec.containers.1.securityContext": {"capabilities": {"add": ["CHOWN", "SYS_ADMIN"]}},
    "spec.containers.1.securityContext.procMount": "Unmasked",
    "spec.containers.1.securityContext.appArmorProfile": {"type": "Unconfined"},
    "spec.containers.1.securityContext.windowsOptions": {"hostProcess": True},
    "spec.containers.1.securityContext.seLinuxOptions": {"type": "spc_t"},
    "spec.containers.0.ports": [{"containerPort": 80, "hostPort": 80}],
    "spec.containers.0.livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 80}},
    "spec.containers.0.lifecycle": {"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}},
    "spec.initContainers.0.securityContext.privileged": True,
    "spec.volumes.0": {"name": "data", "hostPath": {"path": "/"}},
    "metadata.annotations": {"container.apparmor.security.beta.kubernetes.io/main": "unconfined"},
}
PATHS = {
    "spec.securityContext.sysctls": "spec.securityContext.sysctls[0]",
    "spec.securityContext.seccompProfile": "spec.securityContext.seccompProfile.type",
    "spec.securityContext.seLinuxOptions": "spec.securityContext.seLinuxOptions.user",
    "spec.containers.1.securityContext": "spec.containers[1].securityContext.capabilities.add",
    "spec.containers.1.securityContext.appArmorProfile": "spec.containers[1].securityContext.appArmorProfile.type",
    "spec.containers.1.securityContext.windowsOptions": "spec.containers[1].securityContext.windowsOptions.hostProcess",
    "spec.containers.1.securityContext.seLinuxOptions": "spec.containers[1].securityContext.seLinuxOptions.type",
    "spec.containers.0.ports": "spec.containers[0].ports[0].hostPort",
    "spec.containers.0.livenessProbe": "spec.containers[0].livenessProbe.httpGet.host",
    "spec.containers.0.lifecycle": "spec.containers[0].lifecycle.preStop.httpGet.host",
    "spec.volumes.0": "spec.volumes[0].hostPath",
    "metadata.annotations": "metadata.annotations[container.apparmor.security.beta.kubernetes.io/main]",
}


def written(path: str) -> str:
    """Return the path as violations write it: `spec.containers[0]`."""
    parts = path.split(".")
    return parts[0] + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts[1:])


def test_an_ordinary_template_has_none() -> None:
    """Volumes, secrets, service accounts and a strict security context stay inside of the pod."""
    assert dangerous_fields(template()) == ()


@pytest.mark.parametrize("path", CASES)
def test_each_is_refused_by_its_path_unless_the_request_has_the_right(path: str) -> None:
    """With the mark the same template is accepted unchanged."""
    own, field = changed(path, CASES[path]), PATHS.get(path, written(path))
    assert dangerous_fields(own) == (field,)
    refused = violations(own)
    assert list(refused) == [f"pod_template.{field}"]
    assert "right" in refused[f"pod_template.{field}"]
    assert admitted(own, dangerous_fields_allowed=True).template is not None


def test_all_are_reported_at_once() -> None:
    """Each by its own path."""
    own = changed("spec.hostNetwork", True)
    own["spec"]["hostPID"] = True
    own["spec"]["containers"][0]["securityContext"]["privileged"] = True
    assert set(violations(own)) == {
        "pod_template.spec.hostNetwork",
        "pod_template.spec.hostPID",
        "pod_template.spec.containers[0].securityContext.privileged",
    }


@pytest.mark.parametrize("path", ["spec", "spec.containers", "spec.volumes", "spec.securityContext", "metadata"])
@pytest.mark.parametrize("value", [None, 1, "text", [None], [[]], {"x": 1}])
def test_a_malformed_template_raises_nothing(path: str, value: object) -> None:
    """Its own violations are those of the schema."""
    assert dangerous_fields(changed(path, value)) == ()


def test_false_and_absent_are_equal() -> None:
    """`hostNetwork: false` is the default of Kubernetes."""
    assert dangerous_fields(changed("spec.hostNetwork", False)) == ()
    assert dangerous_fields(changed("spec.containers.0.ports", [{"containerPort": 80, "hostPort": 0}])) == ()
