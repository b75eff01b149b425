"""Claims of devices over HTTP: made from templates, allocated where their conditions hold, shared, given back."""

import itertools
import os
from typing import Any

import pytest
from tests.contract.kube.conftest import Nodes
from tests.contract.kube.test_pods import condition, on, runs
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import pod

DEVICES = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.nvidia.com"
PRODUCT = "NVIDIA H100 80GB HBM3"
_number = itertools.count(1)


class Bench:
    """A class of devices, nodes that have some, and a namespace to claim them in."""

    def __init__(self, kube: KubeHttp, nodes: Nodes, namespace: str) -> None:
        self.kube, self.nodes = kube, nodes
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.claims = f"{DEVICES}/namespaces/{namespace}/resourceclaims"
        self.templates = f"{DEVICES}/namespaces/{namespace}/resourceclaimtemplates"
        self.device_class = f"gpus-{os.getpid()}-{next(_number)}"

    async def define(self) -> None:
        """Make the class, of whole GPUs."""
        is_gpu = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
        body = {"metadata": {"name": self.device_class}, "spec": {"selectors": [{"cel": {"expression": is_gpu}}]}}
        await self.kube.made(f"{DEVICES}/deviceclasses", body)

    async def node(self, *memories: str) -> str:
        """A node with a GPU of each of these amounts of memory."""
        name = await self.nodes.ready(gpus=0)
        attributes = {
            "type": {"string": "gpu"},
            "productName": {"string": PRODUCT},
            "cudaComputeCapability": {"version": "9.0.0"},
        }
        devices = [
            {"name": f"gpu-{number}", "attributes": attributes, "capacity": {"memory": {"value": memory}}}
            for number, memory in enumerate(memories)
        ]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": devices}
        await self.kube.made(f"{DEVICES}/resourceslices", {"metadata": {"name": f"{name}-gpus"}, "spec": spec})
        return name

    def spec(self, *expressions: str, **exactly: Any) -> Json:  # noqa: ANN401 - JSON
        """What is claimed: one request."""
        selectors = [{"cel": {"expression": expression}} for expression in expressions]
        exact = {"deviceClassName": self.device_class, **({"selectors": selectors} if selectors else {}), **exactly}
        return {"devices": {"requests": [{"name": "gpus", "exactly": exact}]}}

    async def claim(self, name: str, spec: Json) -> None:
        """Make a claim that pods may name."""
        await self.kube.made(self.claims, {"metadata": {"name": name}, "spec": spec})

    async def pod(self, name: str, node_name: str, **where: str) -> None:
        """Make a pod with a claim, for that node."""
        claims = [{"name": "gpus", **where}]
        body = pod(name, resourceClaims=claims, nodeSelector=on(node_name))
        body["spec"]["containers"][0]["resources"]["claims"] = [{"name": "gpus"}]
        await self.kube.made(self.pods, body)

    async def got(self, claim: str) -> list[str]:
        """The devices that a claim has, once it has some."""
        path = f"{self.claims}/{claim}"
        seen = await self.kube.until(path, lambda item: item.get("status", {}).get("allocation"))
        return [one["device"] for one in seen["status"]["allocation"]["devices"]["results"]]

    async def waits(self, name: str) -> str:
        """Why the pod has no node."""
        seen = await self.kube.until(f"{self.pods}/{name}", lambda item: condition(item, "PodScheduled").get("message"))
        return str(condition(seen, "PodScheduled")["message"])


@pytest.fixture
async def bench(kube: KubeHttp, nodes: Nodes, namespace: str) -> Bench:
    """A bench with its class."""
    made = Bench(kube, nodes, namespace)
    await made.define()
    return made


async def test_a_template_makes_a_claim_which_gets_what_meets_its_conditions(bench: Bench) -> None:
    """By memory and capability; the claim says whose it is, what it has and where that can be used."""
    node_name = await bench.node("20Gi", "81559Mi")
    large = f"device.capacity['{DRIVER}'].memory.compareTo(quantity('40Gi')) >= 0"
    newer = f"device.attributes['{DRIVER}'].cudaComputeCapability.compareTo(semver('8.0.0')) > 0"
    await bench.kube.made(bench.templates, {"metadata": {"name": "t"}, "spec": {"spec": bench.spec(large, newer)}})
    await bench.pod("p", node_name, resourceClaimTemplateName="t")
    seen = await bench.kube.until(f"{bench.pods}/p", runs)
    (made,) = seen["status"]["resourceClaimStatuses"]
    assert await bench.got(made["resourceClaimName"]) == ["gpu-1"]
    claim = await bench.kube.read(f"{bench.claims}/{made['resourceClaimName']}")
    assert claim["metadata"]["annotations"]["resource.kubernetes.io/pod-claim-name"] == "gpus"
    assert [owner["uid"] for owner in claim["metadata"]["ownerReferences"]] == [seen["metadata"]["uid"]]
    (term,) = claim["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": [node_name]}]

    await bench.pod("q", node_name, resourceClaimTemplateName="t")
    assert "cannot allocate all claims" in await bench.waits("q")
    await bench.kube.send("DELETE", f"{bench.pods}/p")
    await bench.kube.until(f"{bench.pods}/q", runs)


async def test_pods_that_share_a_claim_share_its_devices(bench: Bench) -> None:
    """Allocated once, and reserved for both."""
    node_name = await bench.node("80Gi")
    await bench.claim("c", bench.spec())
    for name in ("a", "b"):
        await bench.pod(name, node_name, resourceClaimName="c")
    for name in ("a", "b"):
        await bench.kube.until(f"{bench.pods}/{name}", runs)
    claim = await bench.kube.read(f"{bench.claims}/c")
    assert sorted(user["name"] for user in claim["status"]["reservedFor"]) == ["a", "b"]
    assert await bench.got("c") == ["gpu-0"]


async def test_all_of_a_node_is_all_or_nothing(bench: Bench) -> None:
    """While one of its devices is taken it waits; then it has every one that is right."""
    node_name = await bench.node("80Gi", "80Gi", "80Gi")
    await bench.claim("one", bench.spec())
    await bench.pod("a", node_name, resourceClaimName="one")
    await bench.kube.until(f"{bench.pods}/a", runs)
    await bench.claim("every", bench.spec(allocationMode="All"))
    await bench.pod("b", node_name, resourceClaimName="every")
    assert "cannot allocate all claims" in await bench.waits("b")
    await bench.kube.send("DELETE", f"{bench.pods}/a")
    await bench.kube.until(f"{bench.pods}/b", runs)
    assert sorted(await bench.got("every")) == ["gpu-0", "gpu-1", "gpu-2"]
