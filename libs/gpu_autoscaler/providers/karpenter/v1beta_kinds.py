"""Karpenter's kinds of before v1 (Provisioner, AWSNodeTemplate) as those of today; they are never written.

What the new kinds have no word for is told, field by field; what they cannot do without is a mistake, and nothing is
converted. Sources: karpenter-core `pkg/apis/v1alpha5/provisioner.go`; karpenter-provider-aws `pkg/apis/v1alpha1`, and
`pkg/apis/v1alpha5` for defaults; the definitions of karpenter v1.12.1 and karpenter-provider-aws v1.6.3 (read
2026-11-22).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.model.labels import KARPENTER_DO_NOT_DISRUPT
from gpu_autoscaler.providers.karpenter.node_class import node_class_of_template
from gpu_autoscaler.providers.karpenter.wire import API_VERSION

# The form of Karpenter's kinds of before v1: what a server of that time would have taken. Read by
# `old_kinds.py`. Only what is read is described; what is not is told as unknown. Sources: as there.

Quantity = str | int | float


class _Form(msgspec.Struct, kw_only=True, rename="camel"):
    """Base of all forms."""


class Named(_Form):
    """What names another object, or itself."""

    name: str | None = None


class _Requirement(_Form):
    key: str
    operator: str
    values: list[str] = []


class _Taint(_Form):
    key: str
    effect: str
    value: str | None = None


class _Limits(_Form):
    resources: dict[str, Quantity] | None = None


class _Consolidation(_Form):
    enabled: bool | None = None


class _Volume(_Form):
    volume_size: Quantity | None = None


class _Disk(_Form):
    ebs: _Volume | None = None


class Template(_Form):
    """The spec of an AWSNodeTemplate, or what stood in a Provisioner in its place."""

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


class Provisioner(_Form):
    """The spec of a Provisioner."""

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


class Document(_Form):
    """Any object of Kubernetes."""

    kind: str
    api_version: str
    metadata: Named = msgspec.field(default_factory=Named)


class _OfProvisioner(Document):
    spec: Provisioner = msgspec.field(default_factory=Provisioner)


class _OfTemplate(Document):
    spec: Template = msgspec.field(default_factory=Template)


FORMS: dict[str, type[Document]] = {"Provisioner": _OfProvisioner, "AWSNodeTemplate": _OfTemplate}


def checked(document: Any) -> Document:  # noqa: ANN401 - YAML
    """Return the object, by its kind's form where that is an old one. Raises PermanentError with the place."""
    try:
        found = msgspec.convert(document, Document)
        return msgspec.convert(document, FORMS.get(found.kind, Document))
    except msgspec.ValidationError as exc:
        kind = document.get("kind") if isinstance(document, dict) else None
        raise PermanentError(f"{kind or 'an object'}: {exc}") from exc


Json = dict[str, Any]

PROVISIONER, TEMPLATE = "Provisioner", "AWSNodeTemplate"
_OLD = {PROVISIONER: ("karpenter.sh/v1alpha5",), TEMPLATE: ("karpenter.k8s.aws/v1alpha1",)}
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
# What a Provisioner without a word about it meant; a NodePool means anything.
_MEANT = (
    ("kubernetes.io/os", "In", ("linux",)),
    ("kubernetes.io/arch", "In", ("amd64",)),
    ("karpenter.sh/capacity-type", "In", ("on-demand",)),
)
_MEANT_WITHOUT_TYPES = (
    ("karpenter.k8s.aws/instance-category", "In", ("c", "m", "r")),
    ("karpenter.k8s.aws/instance-generation", "Gt", ("2",)),
)
_SAYS_TYPES = frozenset(
    {
        "node.kubernetes.io/instance-type",
        "karpenter.k8s.aws/instance-family",
        "karpenter.k8s.aws/instance-category",
        "karpenter.k8s.aws/instance-generation",
    }
)
_PROVISIONER_FIELDS = frozenset(
    {
        "annotations",
        "labels",
        "taints",
        "startupTaints",
        "requirements",
        "kubeletConfiguration",
        "provider",
        "providerRef",
        "ttlSecondsAfterEmpty",
        "ttlSecondsUntilExpired",
        "limits",
        "weight",
        "consolidation",
    }
)


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """The new objects, and what is to be known of each: (object, sentence)."""

    objects: tuple[Json, ...]
    notes: tuple[tuple[str, str], ...]


class _Notes:
    """What is told and what is wrong, as it is found."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.mistakes: list[str] = []


def converted(documents: Sequence[Any], *, role: str | None = None, source: str = "convert karpenter") -> Converted:
    """Return each Provisioner as a NodePool and each AWSNodeTemplate as an EC2NodeClass; other objects are left out.

    `role`: the IAM role of nodes, for templates that name no instance profile. Raises ConfigError with every mistake.
    """
    notes = _Notes()
    objects: list[Json] = []
    forms = [_form(document, notes) for document in documents]
    if notes.mistakes:
        raise ConfigError(source, notes.mistakes)
    kubelets = _kubelets(documents, notes)
    for document, form in zip(documents, filter(None, forms), strict=True):
        kind, version, name = form.kind, form.api_version, form.metadata.name or ""
        what = f"{kind}/{name}"
        if kind not in _OLD:
            notes.told.append((what, f"is none of {', '.join(_OLD)}: left out"))
        elif version not in _OLD[kind]:
            notes.mistakes.append(f"{what}: {version} is not {' or '.join(_OLD[kind])}")
        elif not name:
            notes.mistakes.append(f"{what}: has no metadata.name")
        elif kind == PROVISIONER:
            objects += _of_provisioner(name, document.get("spec") or {}, role, notes)
        else:
            objects.append(_class(name, document.get("spec") or {}, role, kubelets.get(name), what, notes))
    if not objects and not notes.mistakes:
        notes.mistakes.append(f"there is neither {' nor '.join(_OLD)} in it")
    if notes.mistakes:
        raise ConfigError(source, notes.mistakes)
    return Converted(objects=tuple(objects), notes=tuple(notes.told))


def _form(document: Json, notes: _Notes) -> Document | None:
    """What a server of that time would have taken; None, and a mistake, for anything else."""
    try:
        return checked(document)
    except PermanentError as exc:
        notes.mistakes.append(str(exc))
        return None


def _of_provisioner(name: str, spec: Mapping[str, Any], role: str | None, notes: _Notes) -> list[Json]:
    what = f"{PROVISIONER}/{name}"
    for field in sorted(spec.keys() - _PROVISIONER_FIELDS):
        notes.told.append((what, f"spec.{field}: unknown, dropped"))
    reference = (spec.get("providerRef") or {}).get("name")
    made: list[Json] = []
    if reference is None and spec.get("provider"):
        reference = name
        notes.told.append((what, f"spec.provider: what stood in it is EC2NodeClass/{name} now"))
        kubelet = spec.get("kubeletConfiguration")
        made.append(_class(name, spec["provider"], role, kubelet, f"{what}: spec.provider", notes))
    if reference is None:
        notes.mistakes.append(f"{what}: neither spec.providerRef nor spec.provider says what its nodes are made from")
        return []
    return [*made, _node_pool(name, spec, str(reference), what, notes)]


def _node_pool(name: str, spec: Mapping[str, Any], reference: str, what: str, notes: _Notes) -> Json:
    metadata = {
        field: {_renamed(key, f"spec.{field}", what, notes): str(value) for key, value in spec[field].items()}
        for field in ("labels", "annotations")
        if spec.get(field)
    }
    until_expired = spec.get("ttlSecondsUntilExpired")
    template: Json = {
        "nodeClassRef": {**_NODE_CLASS, "name": reference},
        "requirements": _requirements(spec.get("requirements") or (), metadata.get("labels", {}), what, notes),
        "expireAfter": "Never" if until_expired is None else f"{until_expired}s",
        **{field: spec[field] for field in ("taints", "startupTaints") if spec.get(field)},
    }
    pool: Json = {
        "template": {**({"metadata": metadata} if metadata else {}), "spec": template},
        "disruption": _disruption(spec, what, notes),
    }
    limits = (spec.get("limits") or {}).get("resources")
    if limits:
        pool["limits"] = {key: str(value) for key, value in limits.items()}
    if spec.get("weight") is not None:
        pool["weight"] = spec["weight"]
    return {"apiVersion": API_VERSION, "kind": "NodePool", "metadata": {"name": name}, "spec": pool}


def _requirements(
    given: Sequence[Mapping[str, Any]], said_by_labels: Mapping[str, str], what: str, notes: _Notes
) -> list[Json]:
    found = []
    for one in given:
        key = _renamed(str(one["key"]), "spec.requirements", what, notes)
        values = {"values": [str(value) for value in one["values"]]} if one.get("values") else {}
        found.append({"key": key, "operator": one["operator"], **values})
    said = {one["key"] for one in found} | set(said_by_labels)
    meant = _MEANT if said & _SAYS_TYPES else (*_MEANT, *_MEANT_WITHOUT_TYPES)
    for key, operator, wanted in meant:
        if key not in said:
            found.append({"key": key, "operator": operator, "values": list(wanted)})
            notes.told.append(
                (what, f"spec.requirements: {key} {operator} {', '.join(wanted)} was meant, and is said now")
            )
    return found


def _disruption(spec: Mapping[str, Any], what: str, notes: _Notes) -> Json:
    after_empty = spec.get("ttlSecondsAfterEmpty")
    is_consolidated = bool((spec.get("consolidation") or {}).get("enabled"))
    if after_empty is not None and is_consolidated:
        notes.mistakes.append(
            f"{what}: spec.ttlSecondsAfterEmpty and spec.consolidation contradict each other; keep one"
        )
    notes.told.append(
        (what, "spec.disruption.budgets: not set, so that Karpenter's own limit of a tenth of the nodes holds")
    )
    if is_consolidated:
        return {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    return {
        "consolidationPolicy": "WhenEmpty",
        "consolidateAfter": "Never" if after_empty is None else f"{after_empty}s",
    }


def _renamed(key: str, where: str, what: str, notes: _Notes) -> str:
    new = _RENAMED.get(key, key)
    if new != key:
        notes.told.append((what, f"{where}: {key} is {new} now"))
    return new


# ---- classes


def _kubelets(documents: Sequence[Json], notes: _Notes) -> dict[str, Json]:
    """The kubelet's settings stand with the class now: by the template that a Provisioner names."""
    found: dict[str, Json] = {}
    for document in documents:
        spec = document.get("spec") or {}
        settings = spec.get("kubeletConfiguration")
        reference = (spec.get("providerRef") or {}).get("name")
        if document.get("kind") != PROVISIONER or not settings or reference is None:
            continue
        what = f"{PROVISIONER}/{(document.get('metadata') or {}).get('name', '')}"
        if found.setdefault(reference, settings) != settings:
            notes.mistakes.append(
                f"{what}: spec.kubeletConfiguration differs from that of another Provisioner of {TEMPLATE}/{reference};"
                " it stands with the class now, so give each a template of its own"
            )
        names = {
            (document.get("metadata") or {}).get("name") for document in documents if document.get("kind") == TEMPLATE
        }
        where = "spec.kubelet" if reference in names else "nowhere, as that is not in this file: add it by hand"
        notes.told.append((what, f"spec.kubeletConfiguration: stands with EC2NodeClass/{reference} now ({where})"))
    return found


def _class(
    name: str, spec: Mapping[str, Any], role: str | None, kubelet: Mapping[str, Any] | None, what: str, notes: _Notes
) -> Json:
    made = node_class_of_template(spec, role=role, kubelet=kubelet)
    notes.told += [(what, told) for told in made.told]
    notes.mistakes += [f"{what}: {mistake}" for mistake in made.mistakes]
    return {
        "apiVersion": f"{_NODE_CLASS['group']}/v1",
        "kind": _NODE_CLASS["kind"],
        "metadata": {"name": name},
        "spec": made.spec,
    }
