"""Fields of a pod template that reach beyond its pod: each needs a right of its own.

Source: Kubernetes, "Pod Security Standards", profile Baseline, v1.36 (read 2026-11-23).
"""

from collections.abc import Iterator, Mapping
from typing import Any

CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")
# Capabilities and sysctls that the profile Baseline allows.
_CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
_SELINUX_TYPES = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
_APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
_HANDLERS = ("postStart", "preStop")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def dangerous_fields(template: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of all fields that give access to the node or to other pods: `spec.volumes[0].hostPath`.

    Parts of the template that Kubernetes' schema does not allow are skipped.
    """
    return tuple(_dangerous(object_of(template)))


def _dangerous(template: Mapping[str, Any]) -> Iterator[str]:
    for key, value in object_of(object_of(template.get("metadata")).get("annotations")).items():
        if key.startswith(_APPARMOR_ANNOTATION) and value == "unconfined":
            yield f"metadata.annotations[{key}]"
    spec = object_of(template.get("spec"))
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"spec.{name}"
    for index, volume in enumerate(objects_of(spec.get("volumes"))):
        if "hostPath" in volume:
            yield f"spec.volumes[{index}].hostPath"
    yield from _of_context(object_of(spec.get("securityContext")), "spec.securityContext")
    for part in CONTAINER_LISTS:
        for index, container in enumerate(objects_of(spec.get(part))):
            yield from _of_container(container, f"spec.{part}[{index}]")


def _of_container(container: Mapping[str, Any], at: str) -> Iterator[str]:
    for index, port in enumerate(objects_of(container.get("ports"))):
        if port.get("hostPort"):
            yield f"{at}.ports[{index}].hostPort"
    # The kubelet of the node opens these connections: another host is one that the pod itself may not reach.
    lifecycle = object_of(container.get("lifecycle"))
    handlers = [(f"{at}.lifecycle.{name}", object_of(lifecycle.get(name))) for name in _HANDLERS]
    handlers += [(f"{at}.{name}", object_of(container.get(name))) for name in _PROBES]
    for path, handler in handlers:
        for action in ("httpGet", "tcpSocket"):
            if object_of(handler.get(action)).get("host"):
                yield f"{path}.{action}.host"
    yield from _of_context(object_of(container.get("securityContext")), f"{at}.securityContext")


def _of_context(context: Mapping[str, Any], at: str) -> Iterator[str]:
    if context.get("privileged"):
        yield f"{at}.privileged"
    added = object_of(context.get("capabilities")).get("add")
    if isinstance(added, list) and any(str(name).removeprefix("CAP_") not in _CAPABILITIES for name in added):
        yield f"{at}.capabilities.add"
    if context.get("procMount") not in (None, "", "Default"):
        yield f"{at}.procMount"
    for name in ("seccompProfile", "appArmorProfile"):
        if object_of(context.get(name)).get("type") == "Unconfined":
            yield f"{at}.{name}.type"
    selinux = object_of(context.get("seLinuxOptions"))
    if selinux.get("type", "") not in _SELINUX_TYPES:
        yield f"{at}.seLinuxOptions.type"
    yield from (f"{at}.seLinuxOptions.{name}" for name in ("user", "role") if selinux.get(name))
    if object_of(context.get("windowsOptions")).get("hostProcess"):
        yield f"{at}.windowsOptions.hostProcess"
    for index, sysctl in enumerate(objects_of(context.get("sysctls"))):
        if sysctl.get("name") not in _SYSCTLS:
            yield f"{at}.sysctls[{index}]"


def object_of(value: object) -> Mapping[str, Any]:
    """Return a part of a template; empty where it is no object, which the schema reports."""
    return value if isinstance(value, dict) else {}


def objects_of(value: object) -> list[Mapping[str, Any]]:
    """Return the objects of a list; none where it is no list."""
    return [object_of(item) for item in value] if isinstance(value, list) else []
