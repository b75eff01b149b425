"""Amounts of GPUs that are none, and those that are written oddly: what a server lets in is what we have to read."""

import pytest
from tests.contract.kube.conftest import Nodes
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.kube_objects import pod

GPU = "nvidia.com/gpu"


def asking(amount: str, **limits: str) -> Json:
    """A pod that asks for so much of a GPU."""
    item = pod("p")
    resources = item["spec"]["containers"][0]["resources"]
    item["spec"]["containers"][0]["resources"] = {
        "requests": resources["requests"] | {GPU: amount},
        "limits": resources["limits"] | {GPU: amount} | limits,
    }
    return item


@pytest.mark.parametrize("amount", ["500m", "-1", "0.5", "one", "1e-1", "0x1"])
async def test_a_pod_asks_for_whole_gpus(kube: KubeHttp, namespace: str, amount: str) -> None:
    """A part of one, less than nothing, and what is no number are refused."""
    answer = await kube.send("POST", f"/api/v1/namespaces/{namespace}/pods", asking(amount))
    assert answer.status in (400, 422), answer.body


@pytest.mark.parametrize(("amount", "kept"), [("1e3", "1e3"), ("2k", "2k"), ("1000m", "1"), ("4", "4")])
async def test_whole_numbers_are_taken_however_they_are_written(
    kube: KubeHttp, namespace: str, amount: str, kept: str
) -> None:
    """And given back in the form that they came in, where that is the shortest."""
    item = await kube.made(f"/api/v1/namespaces/{namespace}/pods", asking(amount))
    assert item["spec"]["containers"][0]["resources"]["requests"][GPU] in (kept, amount)


@pytest.mark.parametrize(("amount", "is_taken"), [("500m", False), ("-1", False), ("1e3", True)])
async def test_a_node_has_whole_gpus(kube: KubeHttp, nodes: Nodes, amount: str, is_taken: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A contradicting device plugin is ignored."""
    name = await nodes.ready(gpus=0)
    body = {"status": {"capacity": {GPU: amount}, "allocatable": {GPU: amount}}}
    answer = await kube.send("PATCH", f"/api/v1/nodes/{name}/status", body, content_type=MERGE)
    assert (answer.status == 200) is is_taken, answer.body
