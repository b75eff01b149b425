"""The form of Karpenter's kinds of before v1: what a server of that time would have taken. Read by `old_kinds.py`.

Only what is read is described; what is not is told as unknown. Sources: as there.
"""

from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError

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
