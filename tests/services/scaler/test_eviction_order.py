"""The order in which pods leave a node: by annotation, then by workload type."""

import json
from typing import Any

import pytest
import yaml
from tests.chart.charting import ROOT
from tests.support.kube_objects import pod

from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler_services.scaler.eviction_order import CRITICAL_PRIORITY_MIN, leaving, tier

OWN, PLAIN = "gpu-autoscaler.io/workload-type", "workload-type"
ANNOTATION = "gpu-autoscaler.io/eviction-priority"


def _wave(labels: dict[str, str], annotations: dict[str, str] | None = None, priority: int = 0) -> tuple[bool, int]:
    return tier(
        PODS.decode(json.dumps(pod("a", labels=labels, annotations=annotations, priority=priority)).encode(), "get")
    )


@pytest.mark.parametrize("key", [OWN, PLAIN])
@pytest.mark.parametrize(
    ("workload", "name"), [("training", "high"), ("inference", "medium"), ("development", "low"), ("batch", "low")]
)
def test_the_workload_type_decides_under_both_labels(key: str, workload: str, name: str) -> None:
    """People already have the label without our prefix."""
    assert _wave({key: workload}) == (False, PRIORITY_NAMES[name])


def test_the_annotation_decides_first_then_our_label() -> None:
    """A wrong annotation and an unknown workload type count as absent."""
    both = {OWN: "batch", PLAIN: "training"}
    assert _wave(both, {ANNOTATION: "medium"}) == (False, PRIORITY_NAMES["medium"])
    assert _wave(both, {ANNOTATION: "highest"}) == (False, PRIORITY_NAMES["low"])
    assert _wave(both) == (False, PRIORITY_NAMES["low"])
    assert _wave({PLAIN: "gaming"}) == _wave({}) == (False, PRIORITY_NAMES["medium"])
    assert _wave({PLAIN: "batch"}, priority=CRITICAL_PRIORITY_MIN)[0]


def _example(name: str) -> list[dict[str, Any]]:
    """Return the metadata of each pod, or pod template, of an example."""
    documents = yaml.safe_load_all((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    return [
        document["metadata"] if document["kind"] == "Pod" else document["spec"]["template"]["metadata"]
        for document in documents
        if document["kind"] == "Pod" or "template" in document.get("spec", {})
    ]


def test_examples_leave_a_node_as_their_comments_say() -> None:
    """Of all examples on one node, the notebook leaves first, then inference, the gang and the training job last."""
    pods = []
    for name in ("gang", "training-job", "inference", "mig-pod"):
        (metadata,) = _example(name)
        found = pod(name, labels=metadata.get("labels"), annotations=metadata.get("annotations"))
        pods.append(PODS.decode(json.dumps(found).encode(), "get"))
    waves: dict[tuple[bool, int], set[str]] = {}
    for leaver in leaving(pods):
        waves.setdefault(tier(leaver), set()).add(leaver.metadata.name)
    assert list(waves.values()) == [{"mig-pod"}, {"inference"}, {"gang", "training-job"}]
