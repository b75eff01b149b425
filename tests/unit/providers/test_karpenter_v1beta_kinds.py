"""Karpenter's old kinds become today's, and nothing is lost in silence."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml
from tests.support.old_karpenter import PROVISIONERS

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.karpenter.v1beta_kinds import Converted, converted


def documents() -> list[dict[str, Any]]:
    """Two Provisioners and a template."""
    return list(yaml.safe_load_all(PROVISIONERS))


def spec_of(found: Converted, kind: str, name: str) -> Any:  # noqa: ANN401 - YAML
    """What the new object says."""
    return next(one["spec"] for one in found.objects if (one["kind"], one["metadata"]["name"]) == (kind, name))


def told(found: Converted, words: str) -> bool:
    """Whether a note says so."""
    return any(words in note for _, note in found.notes)


def test_a_provisioner_is_a_node_pool() -> None:
    """Requirements, limits, labels and taints as they were; lifetimes under their new names."""
    pool = spec_of(converted(documents(), role="gpu-nodes"), "NodePool", "gpu-training")
    template = pool["template"]["spec"]
    assert {requirement["key"]: requirement["values"] for requirement in template["requirements"]} == {
        "karpenter.sh/capacity-type": ["spot", "on-demand"],
        "node.kubernetes.io/instance-type": ["p4d.24xlarge", "g5.48xlarge"],
        "kubernetes.io/arch": ["amd64"],
        "karpenter.k8s.aws/instance-gpu-name": ["a100", "a10g"],
        "kubernetes.io/os": ["linux"],
    }
    assert template["nodeClassRef"] == {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "gpu"}
    assert template["taints"] == [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]
    assert template["expireAfter"] == "2592000s"
    assert pool["disruption"] == {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "300s"}
    assert (pool["limits"], pool["weight"]) == ({"nvidia.com/gpu": "64"}, 10)
    assert pool["template"]["metadata"]["labels"] == {"workload-type": "training"}


def test_what_a_provisioner_left_unsaid_is_said() -> None:
    """A NodePool without a word about it means anything; a Provisioner meant on-demand, amd64 and no GPU type."""
    found = converted(documents(), role="gpu-nodes")
    pool = spec_of(found, "NodePool", "gpu-inference")
    said = {
        requirement["key"]: (requirement["operator"], requirement["values"])
        for requirement in pool["template"]["spec"]["requirements"]
    }
    assert said["karpenter.sh/capacity-type"] == ("In", ["on-demand"])
    assert said["karpenter.k8s.aws/instance-category"] == ("In", ["c", "m", "r"])
    assert said["karpenter.k8s.aws/instance-generation"] == ("Gt", ["2"])
    assert told(found, "karpenter.sh/capacity-type In on-demand was meant, and is said now")
    assert pool["disruption"] == {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    assert pool["template"]["metadata"]["annotations"] == {"karpenter.sh/do-not-disrupt": "true"}
    assert pool["template"]["spec"]["expireAfter"] == "Never"


def test_a_template_is_a_node_class() -> None:
    """Selectors are terms, the family an alias, the kubelet's settings stand here now; what is gone is told."""
    found = converted(documents(), role="gpu-nodes")
    made = spec_of(found, "EC2NodeClass", "gpu")
    assert made["amiSelectorTerms"] == [{"alias": "al2@latest"}]
    assert made["subnetSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "gpu-cluster", "tier": "*"}}]
    assert (made["role"], "instanceProfile" in made) == ("gpu-nodes", False)
    assert made["kubelet"] == {"maxPods": 60}
    (disk,) = made["blockDeviceMappings"]
    assert (disk["ebs"]["volumeSize"], disk["ebs"]["encrypted"], "virtualName" in disk) == ("100Gi", True, False)
    assert "nvidia-smi -pm 1" in made["userData"]
    assert made["tags"] == {"team": "ml"}
    for words in ("containerRuntime", "virtualName", "kubernetes.io/cluster/gpu-cluster"):
        assert told(found, words), words


def test_what_stood_in_a_provisioner_is_a_class_of_its_name() -> None:
    """With ids and names of groups, each a term."""
    made = spec_of(converted(documents(), role="gpu-nodes"), "EC2NodeClass", "gpu-inference")
    assert made["subnetSelectorTerms"] == [{"id": "subnet-0aaaaaaaaaaaaaaaa"}, {"id": "subnet-0bbbbbbbbbbbbbbbb"}]
    assert made["securityGroupSelectorTerms"] == [{"name": "gpu-nodes"}]
    assert made["instanceProfile"] == "KarpenterNodes"


def test_old_kinds_are_never_written() -> None:
    """Whatever goes in, v1 comes out."""
    found = converted(documents(), role="gpu-nodes")
    assert {(one["apiVersion"], one["kind"]) for one in found.objects} == {
        ("karpenter.sh/v1", "NodePool"),
        ("karpenter.k8s.aws/v1", "EC2NodeClass"),
    }


def test_what_cannot_be_converted_is_told_at_once() -> None:
    """Every mistake with its object and its next step, and nothing is converted."""
    templates = [
        {"apiVersion": "karpenter.k8s.aws/v1alpha1", "kind": "AWSNodeTemplate", "metadata": {"name": "a"}, "spec": spec}
        for spec in ({"amiFamily": "Ubuntu"}, {"launchTemplate": "mine", "instanceProfile": "p"})
    ]
    bare = {"apiVersion": "karpenter.sh/v1alpha5", "kind": "Provisioner", "metadata": {"name": "b"}, "spec": {}}
    both = {"ttlSecondsAfterEmpty": 1, "consolidation": {"enabled": True}, "providerRef": {"name": "a"}}
    with pytest.raises(ConfigError) as refused:
        converted([*templates, bare, bare | {"spec": both}, {**bare, "apiVersion": "karpenter.sh/v1"}])
    said = "\n".join(refused.value.mistakes)
    for words in (
        "Ubuntu without spec.amiSelector names no image",
        "give --role",
        "spec.launchTemplate: classes take none",
        "spec.subnetSelector: is needed",
        "neither spec.providerRef nor spec.provider",
        "contradict each other; keep one",
        "karpenter.sh/v1 is not karpenter.sh/v1alpha5",
    ):
        assert words in said, words


def test_other_objects_are_left_out_and_told() -> None:
    """A file may hold more; one without any of the old kinds is a mistake."""
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    assert told(converted([other, *documents()], role="r"), "left out")
    with pytest.raises(ConfigError, match="neither Provisioner nor AWSNodeTemplate"):
        converted([other])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("labels", {"gpu": True}, "$.spec.labels[...]"),
        ("requirements", [{"operator": "In"}], "missing required field `key` - at `$.spec.requirements[0]`"),
        ("requirements", "p4d.24xlarge", "$.spec.requirements"),
        ("ttlSecondsAfterEmpty", "5m", "$.spec.ttlSecondsAfterEmpty"),
        ("provider", {"subnetSelector": ["a"]}, "$.spec.provider.subnetSelector"),
        ("limits", {"resources": {"cpu": [1]}}, "$.spec.limits.resources"),
    ],
)
def test_a_field_of_another_form_is_told_with_its_place(field: str, value: Any, said: str) -> None:  # noqa: ANN401 - YAML
    """A server of that time would not have taken it either."""
    first = documents()[0]
    with pytest.raises(ConfigError) as refused:
        converted([first | {"spec": first["spec"] | {field: value}}])
    assert "Provisioner: " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("document", [1, [], "Provisioner", {"kind": "Provisioner"}, {"kind": 3, "apiVersion": "v1"}])
def test_what_is_no_object_is_told(document: Any) -> None:  # noqa: ANN401 - YAML
    """And never a traceback."""
    with pytest.raises(ConfigError, match="1 mistake"):
        converted([document])


STRANGE: tuple[Any, ...] = (None, 1, -1, "", "a,b", [], {}, [1], {"a": 1}, True, 1.5, "x" * 300)


def places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 - YAML
    """The way to everything in it."""
    keys: Iterable[Any] = document if isinstance(document, dict) else ()
    if isinstance(document, list):
        keys = range(len(document))
    for key in keys:
        yield (*here, key)
        yield from places(document[key], (*here, key))


@pytest.mark.parametrize("strange", STRANGE, ids=repr)
def test_whatever_stands_in_its_place_is_converted_or_told(strange: Any) -> None:  # noqa: ANN401 - YAML
    """In every place of every object, one at a time."""
    whole = documents()
    for place in list(places(whole)):
        changed = copy.deepcopy(whole)
        inner: Any = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = strange
        with contextlib.suppress(ConfigError):
            assert converted(changed, role="r").objects, place
