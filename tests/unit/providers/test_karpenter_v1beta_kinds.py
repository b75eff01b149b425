"""Conversion of Karpenter's v1beta kinds to the current ones; every unconverted field is reported."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml
from tests.support.old_karpenter import PROVISIONERS

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.karpenter.v1beta_kinds import Converted, convert_documents


def documents() -> list[dict[str, Any]]:
    """Two Provisioners and a template."""
    return list(yaml.safe_load_all(PROVISIONERS))


def spec_of(found: Converted, kind: str, name: str) -> Any:  # noqa: ANN401 - YAML
    """What the new object says."""
    return next(one["spec"] for one in found.objects if (one["kind"], one["metadata"]["name"]) == (kind, name))


def told(found: Converted, words: str) -> bool:
    """Whether a note says so."""
    return any(words in note for _, note in found.notes)


def test_a_provisioner_becomes_a_node_pool() -> None:
    """Same requirements, limits, labels and taints; lifetimes under their new names."""
    pool = spec_of(convert_documents(documents(), role="gpu-nodes"), "NodePool", "gpu-training")
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


def test_provisioner_defaults_become_explicit() -> None:
    """A NodePool has no such defaults; a Provisioner defaults to on-demand, amd64 and no GPU type."""
    found = convert_documents(documents(), role="gpu-nodes")
    pool = spec_of(found, "NodePool", "gpu-inference")
    said = {
        requirement["key"]: (requirement["operator"], requirement["values"])
        for requirement in pool["template"]["spec"]["requirements"]
    }
    assert said["karpenter.sh/capacity-type"] == ("In", ["on-demand"])
    assert said["karpenter.k8s.aws/instance-category"] == ("In", ["c", "m", "r"])
    assert said["karpenter.k8s.aws/instance-generation"] == ("Gt", ["2"])
    assert told(found, "default karpenter.sh/capacity-type In on-demand is now explicit")
    assert pool["disruption"] == {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    assert pool["template"]["metadata"]["annotations"] == {"karpenter.sh/do-not-disrupt": "true"}
    assert pool["template"]["spec"]["expireAfter"] == "Never"


def test_a_template_becomes_a_node_class() -> None:
    """Selectors become terms, the AMI family an alias; removed fields are reported."""
    found = convert_documents(documents(), role="gpu-nodes")
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


def test_an_inline_provider_becomes_a_node_class() -> None:
    """With the Provisioner's name; each security group ID and name becomes a term."""
    made = spec_of(convert_documents(documents(), role="gpu-nodes"), "EC2NodeClass", "gpu-inference")
    assert made["subnetSelectorTerms"] == [{"id": "subnet-0aaaaaaaaaaaaaaaa"}, {"id": "subnet-0bbbbbbbbbbbbbbbb"}]
    assert made["securityGroupSelectorTerms"] == [{"name": "gpu-nodes"}]
    assert made["instanceProfile"] == "KarpenterNodes"


def test_only_v1_objects_are_written() -> None:
    """Whatever the input."""
    found = convert_documents(documents(), role="gpu-nodes")
    assert {(one["apiVersion"], one["kind"]) for one in found.objects} == {
        ("karpenter.sh/v1", "NodePool"),
        ("karpenter.k8s.aws/v1", "EC2NodeClass"),
    }


def test_conversion_errors_are_reported_together() -> None:
    """Each with its object and next step; nothing is converted."""
    templates = [
        {"apiVersion": "karpenter.k8s.aws/v1alpha1", "kind": "AWSNodeTemplate", "metadata": {"name": "a"}, "spec": spec}
        for spec in ({"amiFamily": "Ubuntu"}, {"launchTemplate": "mine", "instanceProfile": "p"})
    ]
    bare = {"apiVersion": "karpenter.sh/v1alpha5", "kind": "Provisioner", "metadata": {"name": "b"}, "spec": {}}
    both = {"ttlSecondsAfterEmpty": 1, "consolidation": {"enabled": True}, "providerRef": {"name": "a"}}
    with pytest.raises(ConfigError) as refused:
        convert_documents([*templates, bare, bare | {"spec": both}, {**bare, "apiVersion": "karpenter.sh/v1"}])
    said = "\n".join(refused.value.violations)
    for words in (
        "spec.amiFamily: Ubuntu requires spec.amiSelector",
        "use --role",
        "spec.launchTemplate: not supported by classes",
        "spec.subnetSelector: is required",
        "neither spec.providerRef nor spec.provider",
        "contradict each other; keep one",
        "karpenter.sh/v1 is not karpenter.sh/v1alpha5",
    ):
        assert words in said, words


def test_other_objects_are_omitted_and_reported() -> None:
    """A file without any v1beta kind is an error."""
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    assert told(convert_documents([other, *documents()], role="r"), "omitted")
    with pytest.raises(ConfigError, match="neither Provisioner nor AWSNodeTemplate"):
        convert_documents([other])


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
def test_a_malformed_field_is_reported_with_its_path(field: str, value: Any, said: str) -> None:  # noqa: ANN401 - YAML
    """An API server of that version would have refused it too."""
    first = documents()[0]
    with pytest.raises(ConfigError) as refused:
        convert_documents([first | {"spec": first["spec"] | {field: value}}])
    assert "Provisioner: " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("document", [1, [], "Provisioner", {"kind": "Provisioner"}, {"kind": 3, "apiVersion": "v1"}])
def test_a_document_that_is_no_object_is_reported(document: Any) -> None:  # noqa: ANN401 - YAML
    """Without a traceback."""
    with pytest.raises(ConfigError, match="1 error"):
        convert_documents([document])


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
def test_any_replaced_value_is_converted_or_reported(strange: Any) -> None:  # noqa: ANN401 - YAML
    """Every field of every object, one at a time."""
    whole = documents()
    for place in list(places(whole)):
        changed = copy.deepcopy(whole)
        inner: Any = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = strange
        with contextlib.suppress(ConfigError):
            assert convert_documents(changed, role="r").objects, place
