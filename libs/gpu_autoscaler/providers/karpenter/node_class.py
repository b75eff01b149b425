"""An AWSNodeTemplate's fields as those of an EC2NodeClass. Called by `old_kinds.py`, whose sources are these too."""

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
_IGNORED = ("apiVersion", "kind")  # of what stood in a Provisioner
# Families of which the newest image is asked for by an alias.
_ALIASES = {
    "AL2": "al2@latest",
    "AL2023": "al2023@latest",
    "Bottlerocket": "bottlerocket@latest",
    "Windows2019": "windows2019@latest",
    "Windows2022": "windows2022@latest",
}
_TAGS_NOT_TO_SET = ("kubernetes.io/cluster", "karpenter.sh/nodepool", "karpenter.sh/nodeclaim", "eks:eks-cluster-name")
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


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A class's spec, what was left out of it or added, and why it cannot be used as it is."""

    spec: Json
    told: tuple[str, ...]
    mistakes: tuple[str, ...]


def node_class_of_template(
    spec: Mapping[str, Any], *, role: str | None, kubelet: Mapping[str, Any] | None = None
) -> Made:
    """Return the class. `role` stands in for an instance profile that the template does not name."""
    made: Json = {field: spec[field] for field in _SAME if spec.get(field) is not None}
    told: list[str] = []
    mistakes: list[str] = []
    if "associatePublicIpAddress" in spec:  # as its Go name has it
        made["associatePublicIPAddress"] = spec["associatePublicIpAddress"]
    _tags(made, told)
    _images(spec, made, told, mistakes)
    _selected(spec, made, mistakes)
    _disks(spec, made, told)
    if "instanceProfile" not in made:
        if role is None:
            mistakes.append("names no instanceProfile, and a class needs that or a role: give --role")
        else:
            made["role"] = role
    if kubelet:
        made["kubelet"] = {key: value for key, value in kubelet.items() if key in _KUBELET}
        told += [f"kubeletConfiguration.{key}: no longer there, dropped" for key in sorted(kubelet.keys() - _KUBELET)]
    if spec.get("launchTemplate"):
        mistakes.append("spec.launchTemplate: classes take none; put its user data, disks and groups into the template")
    known = {*_SAME, *_CONVERTED, *_IGNORED, "launchTemplate", "associatePublicIpAddress"}
    told += [f"spec.{field}: unknown, dropped" for field in sorted(spec.keys() - known)]
    return Made(spec=made, told=tuple(told), mistakes=tuple(mistakes))


def _tags(made: Json, told: list[str]) -> None:
    tags = made.pop("tags", {})
    kept = {key: str(value) for key, value in tags.items() if not key.startswith(_TAGS_NOT_TO_SET)}
    told += [f"spec.tags: {key} is Karpenter's own to set, dropped" for key in sorted(tags.keys() - kept.keys())]
    if kept:
        made["tags"] = kept


def _images(spec: Mapping[str, Any], made: Json, told: list[str], mistakes: list[str]) -> None:
    family = spec.get("amiFamily") or "AL2"  # the default that it was
    if spec.get("amiSelector"):
        if family == "Ubuntu":
            family = "Custom"
            told.append("spec.amiFamily: Ubuntu is no family any more, and Custom now: its user data is used as it is")
        made["amiFamily"] = family
        made["amiSelectorTerms"] = _terms(spec["amiSelector"], _image_term)
        return
    if family not in _ALIASES:
        mistakes.append(f"spec.amiFamily: {family} without spec.amiSelector names no image; name one by amiSelector")
        return
    made["amiSelectorTerms"] = [{"alias": _ALIASES[family]}]
    if "amiFamily" not in spec:
        told.append("spec.amiFamily: AL2 was meant, and is said now")
    if family == "AL2":
        told.append("spec.amiFamily: there are no images of AL2 from Kubernetes 1.33 on; see al2023@latest")


def _selected(spec: Mapping[str, Any], made: Json, mistakes: list[str]) -> None:
    for old, new, term in (
        ("subnetSelector", "subnetSelectorTerms", _tag_term),
        ("securityGroupSelector", "securityGroupSelectorTerms", _group_term),
    ):
        if spec.get(old):
            made[new] = _terms(spec[old], term)
        else:
            mistakes.append(f"spec.{old}: is needed; name tags or ids")


def _disks(spec: Mapping[str, Any], made: Json, told: list[str]) -> None:
    disks = []
    for number, disk in enumerate(spec.get("blockDeviceMappings") or ()):
        kept = {key: value for key, value in disk.items() if key != "virtualName"}
        if "virtualName" in disk:
            told.append(f"spec.blockDeviceMappings[{number}].virtualName: no longer there, dropped")
        if kept.get("ebs") and kept["ebs"].get("volumeSize") is not None:
            kept["ebs"] = {**kept["ebs"], "volumeSize": str(kept["ebs"]["volumeSize"])}
        disks.append(kept)
    if disks:
        made["blockDeviceMappings"] = disks


def _terms(selector: Mapping[str, str], term: Callable[[dict[str, str]], Json]) -> list[Json]:
    """A selector as terms. Its ids, between commas, each are one; the rest holds together, with each of the names that
    stand between commas for itself."""
    wanted = {key: str(value) for key, value in selector.items()}
    ids = [value for key in ("aws-ids", "aws::ids") for value in _parts(wanted.pop(key, ""))]
    if ids:
        return [{"id": value} for value in ids]
    terms: list[dict[str, str]] = [{}]
    for key, value in wanted.items():
        terms = [{**term, key: part} for term in terms for part in (_parts(value) or ["*"])]
    return [term(each) for each in terms]


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
