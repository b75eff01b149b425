"""Conversion of Karpenter's kinds before v1 (Provisioner, AWSNodeTemplate) to current ones.

Fields without a counterpart are noted; missing required fields are violations, and nothing is converted. Sources:
karpenter-core `pkg/apis/v1alpha5/provisioner.go`; karpenter-provider-aws `pkg/apis/v1alpha1`, and `pkg/apis/v1alpha5`
for defaults; the definitions of karpenter v1.12.1 and karpenter-provider-aws v1.6.3 (read 2026-11-22).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.model.labels import KARPENTER_DO_NOT_DISRUPT
from gpu_autoscaler.providers.karpenter.node_class import node_class_of_template
from gpu_autoscaler.providers.karpenter.wire import API_VERSION

# Schemas of the old kinds, limited to the fields that are converted; other fields are noted as unknown.

Quantity = str | int | float


class _Schema(msgspec.Struct, kw_only=True, rename="camel"):
    """Base of all schemas."""


class Named(_Schema):
    """Reference to another object, or metadata."""

    name: str | None = None


class _Requirement(_Schema):
    key: str
    operator: str
    values: list[str] = []


class _Taint(_Schema):
    key: str
    effect: str
    value: str | None = None


class _Limits(_Schema):
    resources: dict[str, Quantity] | None = None


class _Consolidation(_Schema):
    enabled: bool | None = None


class _Volume(_Schema):
    volume_size: Quantity | None = None


class _Disk(_Schema):
    ebs: _Volume | None = None


class Template(_Schema):
    """Spec of an AWSNodeTemplate, or of the template within a Provisioner."""

    ami_family: str | None = None
    ami_selector: dict[str, str] | None = None
    subnet_selector: dict[str, str] | None = None
    security_group_selector: dict[str, str] | None = None
    user_data: str | None = None
    tags: dict[str, str] | None = None
    context: str | None = None
    instance_profile: str | None = None
    launch_template: str | None = None
    detailed_monitoring: bool | None = None
    metadata_options: dict[str, Any] | None = None
    block_device_mappings: list[_Disk] | None = None


class Provisioner(_Schema):
    """Spec of a Provisioner."""

    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    taints: list[_Taint] | None = None
    startup_taints: list[_Taint] | None = None
    requirements: list[_Requirement] | None = None
    kubelet_configuration: dict[str, Any] | None = None
    provider: Template | None = None
    provider_ref: Named | None = None
    ttl_seconds_after_empty: int | None = None
    ttl_seconds_until_expired: int | None = None
    limits: _Limits | None = None
    weight: int | None = None
    consolidation: _Consolidation | None = None


class Document(_Schema):
    """Any Kubernetes object."""

    kind: str
    api_version: str
    metadata: Named = msgspec.field(default_factory=Named)


class _OfProvisioner(Document):
    spec: Provisioner = msgspec.field(default_factory=Provisioner)


class _OfTemplate(Document):
    spec: Template = msgspec.field(default_factory=Template)


SCHEMAS: dict[str, type[Document]] = {"Provisioner": _OfProvisioner, "AWSNodeTemplate": _OfTemplate}


def checked(document: Any) -> Document:  # noqa: ANN401 - YAML
    """Return the object, validated by the schema of an old kind. Raises PermanentError with the place."""
    try:
        bare = msgspec.convert(document, Document)
        return msgspec.convert(document, SCHEMAS.get(bare.kind, Document))
    except msgspec.ValidationError as exc:
        kind = document.get("kind") if isinstance(document, dict) else None
        raise PermanentError(f"{kind or 'an object'}: {exc}") from exc


Json = dict[str, Any]

PROVISIONER, TEMPLATE = "Provisioner", "AWSNodeTemplate"
_OLD_VERSIONS = {PROVISIONER: ("karpenter.sh/v1alpha5",), TEMPLATE: ("karpenter.k8s.aws/v1alpha1",)}
_NODE_CLASS = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass"}
_RENAMED = {
    "karpenter.sh/provisioner-name": "karpenter.sh/nodepool",
    "beta.kubernetes.io/instance-type": "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/arch": "kubernetes.io/arch",
    "beta.kubernetes.io/os": "kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
    "karpenter.sh/do-not-consolidate": KARPENTER_DO_NOT_DISRUPT,
    "karpenter.sh/do-not-evict": KARPENTER_DO_NOT_DISRUPT,
}
# Defaults of a Provisioner; a NodePool without the requirement allows anything.
_DEFAULTS = (
    ("kubernetes.io/os", "In", ("linux",)),
    ("kubernetes.io/arch", "In", ("amd64",)),
    ("karpenter.sh/capacity-type", "In", ("on-demand",)),
)
_DEFAULTS_WITHOUT_TYPES = (
    ("karpenter.k8s.aws/instance-category", "In", ("c", "m", "r")),
    ("karpenter.k8s.aws/instance-generation", "Gt", ("2",)),
)
_TYPE_LABELS = frozenset(
    {
        "node.kubernetes.io/instance-type",
        "karpenter.k8s.aws/instance-family",
        "karpenter.k8s.aws/instance-category",
        "karpenter.k8s.aws/instance-generation",
    }
)
_PROVISIONER_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(Provisioner))


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """The new objects, and notes as (object, sentence)."""

    objects: tuple[Json, ...]
    notes: tuple[tuple[str, str], ...]


class _Notes:
    """Notes and violations found so far."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.violations: list[str] = []


def convert_documents(
    documents: Sequence[Any], *, role: str | None = None, source: str = "convert karpenter"
) -> Converted:
    """Return each Provisioner as a NodePool and each AWSNodeTemplate as an EC2NodeClass; other objects are omitted.
    `role`: IAM role of nodes, for templates without an instance profile. Raises ConfigError with all violations."""
    notes = _Notes()
    objects: list[Json] = []
    forms = [_form(document, notes) for document in documents]
    if notes.violations:
        raise ConfigError(source, notes.violations)
    kubelets = _kubelets(documents, notes)
    for document, form in zip(documents, filter(None, forms), strict=True):
        kind, version, name = form.kind, form.api_version, form.metadata.name or ""
        subject = f"{kind}/{name}"
        if kind not in _OLD_VERSIONS:
            notes.entries.append((subject, f"is not one of {', '.join(_OLD_VERSIONS)}: omitted"))
        elif version not in _OLD_VERSIONS[kind]:
            notes.violations.append(f"{subject}: {version} is not {' or '.join(_OLD_VERSIONS[kind])}")
        elif not name:
            notes.violations.append(f"{subject}: has no metadata.name")
        elif kind == PROVISIONER:
            objects += _convert_provisioner(name, document.get("spec") or {}, role, notes)
        else:
            objects.append(
                _convert_template(name, document.get("spec") or {}, role, kubelets.get(name), subject, notes)
            )
    if not objects and not notes.violations:
        notes.violations.append(f"contains neither {' nor '.join(_OLD_VERSIONS)}")
    if notes.violations:
        raise ConfigError(source, notes.violations)
    return Converted(objects=tuple(objects), notes=tuple(notes.entries))


def _form(document: Json, notes: _Notes) -> Document | None:
    """Return the validated object; None and a violation if it is invalid."""
    try:
        return checked(document)
    except PermanentError as exc:
        notes.violations.append(str(exc))
        return None


def _convert_provisioner(name: str, spec: Mapping[str, Any], role: str | None, notes: _Notes) -> list[Json]:
    subject = f"{PROVISIONER}/{name}"
    for field in sorted(spec.keys() - _PROVISIONER_FIELDS):
        notes.entries.append((subject, f"spec.{field}: unknown, dropped"))
    reference = (spec.get("providerRef") or {}).get("name")
    objects: list[Json] = []
    if reference is None and spec.get("provider"):
        reference = name
        notes.entries.append((subject, f"spec.provider: converted to EC2NodeClass/{name}"))
        kubelet = spec.get("kubeletConfiguration")
        objects.append(_convert_template(name, spec["provider"], role, kubelet, f"{subject}: spec.provider", notes))
    if reference is None:
        notes.violations.append(f"{subject}: has neither spec.providerRef nor spec.provider")
        return []
    return [*objects, _node_pool(name, spec, str(reference), subject, notes)]


def _node_pool(name: str, spec: Mapping[str, Any], reference: str, subject: str, notes: _Notes) -> Json:
    metadata = {
        field: {_renamed(key, f"spec.{field}", subject, notes): str(value) for key, value in spec[field].items()}
        for field in ("labels", "annotations")
        if spec.get(field)
    }
    until_expired = spec.get("ttlSecondsUntilExpired")
    template: Json = {
        "nodeClassRef": {**_NODE_CLASS, "name": reference},
        "requirements": _requirements(spec.get("requirements") or (), metadata.get("labels", {}), subject, notes),
        "expireAfter": "Never" if until_expired is None else f"{until_expired}s",
        **{field: spec[field] for field in ("taints", "startupTaints") if spec.get(field)},
    }
    pool: Json = {
        "template": {**({"metadata": metadata} if metadata else {}), "spec": template},
        "disruption": _disruption(spec, subject, notes),
    }
    limits = (spec.get("limits") or {}).get("resources")
    if limits:
        pool["limits"] = {key: str(value) for key, value in limits.items()}
    if spec.get("weight") is not None:
        pool["weight"] = spec["weight"]
    return {"apiVersion": API_VERSION, "kind": "NodePool", "metadata": {"name": name}, "spec": pool}


def _requirements(
    old_requirements: Sequence[Mapping[str, Any]], node_labels: Mapping[str, str], subject: str, notes: _Notes
) -> list[Json]:
    requirements = []
    for requirement in old_requirements:
        key = _renamed(str(requirement["key"]), "spec.requirements", subject, notes)
        values = {"values": [str(value) for value in requirement["values"]]} if requirement.get("values") else {}
        requirements.append({"key": key, "operator": requirement["operator"], **values})
    known_keys = {requirement["key"] for requirement in requirements} | set(node_labels)
    defaults = _DEFAULTS if known_keys & _TYPE_LABELS else (*_DEFAULTS, *_DEFAULTS_WITHOUT_TYPES)
    for key, operator, default_values in defaults:
        if key not in known_keys:
            requirements.append({"key": key, "operator": operator, "values": list(default_values)})
            notes.entries.append(
                (subject, f"spec.requirements: default {key} {operator} {', '.join(default_values)} is now explicit")
            )
    return requirements


def _disruption(spec: Mapping[str, Any], subject: str, notes: _Notes) -> Json:
    after_empty = spec.get("ttlSecondsAfterEmpty")
    is_consolidated = bool((spec.get("consolidation") or {}).get("enabled"))
    if after_empty is not None and is_consolidated:
        notes.violations.append(
            f"{subject}: spec.ttlSecondsAfterEmpty and spec.consolidation contradict each other; keep one"
        )
    notes.entries.append(
        (subject, "spec.disruption.budgets: not set; Karpenter's default of 10 % of the nodes applies")
    )
    if is_consolidated:
        return {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    return {
        "consolidationPolicy": "WhenEmpty",
        "consolidateAfter": "Never" if after_empty is None else f"{after_empty}s",
    }


def _renamed(key: str, where: str, subject: str, notes: _Notes) -> str:
    new = _RENAMED.get(key, key)
    if new != key:
        notes.entries.append((subject, f"{where}: {key} is now {new}"))
    return new


# ---- classes


def _kubelets(documents: Sequence[Json], notes: _Notes) -> dict[str, Json]:
    """Return kubelet settings, which are now part of the class, by the template that a Provisioner names."""
    kubelets: dict[str, Json] = {}
    for document in documents:
        spec = document.get("spec") or {}
        settings = spec.get("kubeletConfiguration")
        reference = (spec.get("providerRef") or {}).get("name")
        if document.get("kind") != PROVISIONER or not settings or reference is None:
            continue
        subject = f"{PROVISIONER}/{(document.get('metadata') or {}).get('name', '')}"
        if kubelets.setdefault(reference, settings) != settings:
            notes.violations.append(
                f"{subject}: spec.kubeletConfiguration differs from another Provisioner's of"
                f" {TEMPLATE}/{reference}; it is part of the class now, so use a template for each"
            )
        names = {
            (document.get("metadata") or {}).get("name") for document in documents if document.get("kind") == TEMPLATE
        }
        where = "spec.kubelet" if reference in names else "not converted, as the template is not in this file: add it"
        notes.entries.append((subject, f"spec.kubeletConfiguration: now part of EC2NodeClass/{reference} ({where})"))
    return kubelets


def _convert_template(
    name: str, spec: Mapping[str, Any], role: str | None, kubelet: Mapping[str, Any] | None, subject: str, notes: _Notes
) -> Json:
    converted = node_class_of_template(spec, role=role, kubelet=kubelet)
    notes.entries += [(subject, note) for note in converted.notes]
    notes.violations += [f"{subject}: {violation}" for violation in converted.violations]
    return {
        "apiVersion": f"{_NODE_CLASS['group']}/v1",
        "kind": _NODE_CLASS["kind"],
        "metadata": {"name": name},
        "spec": converted.spec,
    }
