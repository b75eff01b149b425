"""Conversion of an AWSNodeTemplate's spec to an EC2NodeClass's. Sources: those of `v1beta_kinds.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Json = dict[str, Any]

_SAME = (
    "userData",
    "tags",
    "context",
    "detailedMonitoring",
    "associatePublicIPAddress",
    "instanceProfile",
    "metadataOptions",
)
_CONVERTED = ("amiFamily", "amiSelector", "subnetSelector", "securityGroupSelector", "blockDeviceMappings")
_IGNORED = ("apiVersion", "kind")  # of a template within a Provisioner
# AMI families whose newest image is selected by an alias.
_ALIASES = {
    "AL2": "al2@latest",
    "AL2023": "al2023@latest",
    "Bottlerocket": "bottlerocket@latest",
    "Windows2019": "windows2019@latest",
    "Windows2022": "windows2022@latest",
}
_RESERVED_TAGS = ("kubernetes.io/cluster", "karpenter.sh/nodepool", "karpenter.sh/nodeclaim", "eks:eks-cluster-name")
_KUBELET = frozenset(
    {
        "clusterDNS",
        "cpuCFSQuota",
        "evictionHard",
        "evictionMaxPodGracePeriod",
        "evictionSoft",
        "evictionSoftGracePeriod",
        "imageGCHighThresholdPercent",
        "imageGCLowThresholdPercent",
        "kubeReserved",
        "maxPods",
        "podsPerCore",
        "systemReserved",
    }
)


class ConvertedClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class's spec, notes on fields dropped or added, and violations that prevent its use."""

    spec: Json
    notes: tuple[str, ...]
    violations: tuple[str, ...]


def node_class_of_template(
    spec: Mapping[str, Any], *, role: str | None, kubelet: Mapping[str, Any] | None = None
) -> ConvertedClass:
    """Return the class. `role` replaces an instance profile that the template does not name."""
    converted: Json = {field: spec[field] for field in _SAME if spec.get(field) is not None}
    notes: list[str] = []
    violations: list[str] = []
    if "associatePublicIpAddress" in spec:  # spelling of its Go field
        converted["associatePublicIPAddress"] = spec["associatePublicIpAddress"]
    _tags(converted, notes)
    _images(spec, converted, notes, violations)
    _selectors(spec, converted, violations)
    _disks(spec, converted, notes)
    if "instanceProfile" not in converted:
        if role is None:
            violations.append("has no instanceProfile; a class needs one or a role: use --role")
        else:
            converted["role"] = role
    if kubelet:
        converted["kubelet"] = {key: value for key, value in kubelet.items() if key in _KUBELET}
        notes += [
            f"kubeletConfiguration.{key}: no longer supported, dropped" for key in sorted(kubelet.keys() - _KUBELET)
        ]
    if spec.get("launchTemplate"):
        violations.append(
            "spec.launchTemplate: not supported by classes; move user data, disks and groups into the template"
        )
    known = {*_SAME, *_CONVERTED, *_IGNORED, "launchTemplate", "associatePublicIpAddress"}
    notes += [f"spec.{field}: unknown, dropped" for field in sorted(spec.keys() - known)]
    return ConvertedClass(spec=converted, notes=tuple(notes), violations=tuple(violations))


def _tags(converted: Json, notes: list[str]) -> None:
    tags = converted.pop("tags", {})
    kept = {key: str(value) for key, value in tags.items() if not key.startswith(_RESERVED_TAGS)}
    notes += [f"spec.tags: {key} is set by Karpenter, dropped" for key in sorted(tags.keys() - kept.keys())]
    if kept:
        converted["tags"] = kept


def _images(spec: Mapping[str, Any], converted: Json, notes: list[str], violations: list[str]) -> None:
    family = spec.get("amiFamily") or "AL2"  # the old default
    if spec.get("amiSelector"):
        if family == "Ubuntu":
            family = "Custom"
            notes.append(
                "spec.amiFamily: Ubuntu is no longer a family; converted to Custom, with its user data unchanged"
            )
        converted["amiFamily"] = family
        converted["amiSelectorTerms"] = _terms(spec["amiSelector"], _image_term)
        return
    if family not in _ALIASES:
        violations.append(f"spec.amiFamily: {family} requires spec.amiSelector")
        return
    converted["amiSelectorTerms"] = [{"alias": _ALIASES[family]}]
    if "amiFamily" not in spec:
        notes.append("spec.amiFamily: AL2 was the default, now explicit")
    if family == "AL2":
        notes.append("spec.amiFamily: AL2 has no images from Kubernetes 1.33 on; see al2023@latest")


def _selectors(spec: Mapping[str, Any], converted: Json, violations: list[str]) -> None:
    for old, new, term in (
        ("subnetSelector", "subnetSelectorTerms", _tag_term),
        ("securityGroupSelector", "securityGroupSelectorTerms", _group_term),
    ):
        if spec.get(old):
            converted[new] = _terms(spec[old], term)
        else:
            violations.append(f"spec.{old}: is required; name tags or ids")


def _disks(spec: Mapping[str, Any], converted: Json, notes: list[str]) -> None:
    disks = []
    for number, disk in enumerate(spec.get("blockDeviceMappings") or ()):
        kept = {key: value for key, value in disk.items() if key != "virtualName"}
        if "virtualName" in disk:
            notes.append(f"spec.blockDeviceMappings[{number}].virtualName: no longer supported, dropped")
        if kept.get("ebs") and kept["ebs"].get("volumeSize") is not None:
            kept["ebs"] = {**kept["ebs"], "volumeSize": str(kept["ebs"]["volumeSize"])}
        disks.append(kept)
    if disks:
        converted["blockDeviceMappings"] = disks


def _terms(selector: Mapping[str, str], term: Callable[[dict[str, str]], Json]) -> list[Json]:
    """Return a selector as terms: one per comma-separated id, else one per combination of comma-separated values."""
    wanted = {key: str(value) for key, value in selector.items()}
    ids = [value for key in ("aws-ids", "aws::ids") for value in _parts(wanted.pop(key, ""))]
    if ids:
        return [{"id": value} for value in ids]
    terms: list[dict[str, str]] = [{}]
    for key, value in wanted.items():
        terms = [{**term, key: part} for term in terms for part in (_parts(value) or ["*"])]
    return [term(tags) for tags in terms]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _tag_term(wanted: dict[str, str]) -> Json:
    return {"tags": wanted}


def _group_term(wanted: dict[str, str]) -> Json:
    return {"name": wanted["aws::name"]} if wanted.keys() == {"aws::name"} else {"tags": wanted}


def _image_term(wanted: dict[str, str]) -> Json:
    tags = {key: value for key, value in wanted.items() if not key.startswith("aws::")}
    term: Json = {"tags": tags} if tags else {}
    if "aws::name" in wanted:
        term["name"] = wanted["aws::name"]
    if "aws::owners" in wanted:
        term["owner"] = wanted["aws::owners"]
    return term
