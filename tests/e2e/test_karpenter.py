"""Real Karpenter as the cloud: our processes decide, its NodeClaims become nodes, on a real control plane."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from tests.bench.peers import real
from tests.bench.peers.real import NODE_CLASS
from tests.chart.charting import tool
from tests.controlplane.plane import EVERYTHING, running_plane
from tests.support.karpenter import TYPES, needed_karpenter, options_in, sold
from tests.support.karpenter_pools import GPU, POOLS, apply_pools, node_pool
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import job
from tests.support.running import Running, followed, started
from tests.support.service_accounts import audit_settings, give_accounts, seen

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.events.scaling import (
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
)
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler_services.demo.record import Record
from gpu_autoscaler_services.local.system import ExternalSystems
from gpu_autoscaler_services.registry import services

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

POLICY = """
idle_seconds_max = 5.0
scale_down_cooldown_seconds = 2.0
nodes_count_max = 20
disruption_ratio_max = 1.0
"""
CLAIMS, NODES, PODS = "/apis/karpenter.sh/v1/nodeclaims", "/api/v1/nodes", "/api/v1/namespaces/default/pods"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
KARPENTERS = "karpenter.sh/termination"
SECONDS_MAX = 90.0


@asynccontextmanager
async def bought_by_karpenter(
    folder: Path,
    *,
    gone: Sequence[Mapping[str, Any]] = (),
    has_accounts: bool = False,
    limits: Mapping[str, str] | None = None,
    limited: Sequence[Json] = (),
) -> AsyncIterator[tuple[Running, KubeHttp]]:
    """A control plane with Karpenter, and our processes that buy by it. `gone`: types that are in our file, and that
    its cloud does not know. `has_accounts`: each under its own account of the chart, and the server writes down who
    calls what. `limits`: of a NodePool that is Karpenter's own; None: it has none. `limited`: NodePools whose limits
    are managed by us, instead of claims."""
    needed_karpenter()
    options, policy = options_in(folder, [*TYPES, *gone]), folder / "policy.toml"
    policy.write_text(POLICY)
    kept = sold(options_in(folder / "sold"))
    audited = {"with_service_accounts": True, "api_settings": audit_settings(folder)} if has_accounts else {}
    with running_plane(folder / "plane", EVERYTHING, **audited) as plane, real.running(plane, kept, limits):
        apply_pools(plane, *limited)
        if limited:
            names = tuple(pool["metadata"]["name"] for pool in limited)
            options = msgspec.structs.replace(options, mode="limits", node_pools=names)
        of_chart: tuple[str, ...] = (
            "karpenter",
            f"autoscaling.karpenter.nodeClass={NODE_CLASS}",
            "policy.shadow=nodes_count_max = 10",
        )
        if limited:
            listed = ",".join(options.node_pools)
            of_chart += ("autoscaling.karpenter.mode=limits", f"autoscaling.karpenter.nodePools={{{listed}}}")
        kubeconfig = give_accounts(plane, *of_chart) if has_accounts else plane.kubeconfig()
        there = ExternalSystems(kubeconfig=kubeconfig, karpenter=options)
        async with (
            aiohttp.ClientSession() as session,
            started(folder, clock_factor=1.0, policy=policy, external=there) as system,
            followed(system, policy=policy) as running,
        ):
            yield running, KubeHttp(session, plane.url, plane.admin_token, plane.tls)


def gpu_job(name: str, *, gpus: int, count: int = 1) -> Json:
    """A user's Job, visible to us only through its unschedulable pods."""
    tolerations = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    return job(name, gpus=gpus, completions=count, parallelism=count, template=tolerations)


def placed(answer: Json) -> dict[str, str]:
    """Return running pods -> their nodes."""
    return {
        item["metadata"]["name"]: item["spec"]["nodeName"]
        for item in answer.get("items", ())
        if item["status"].get("phase") == "Running" and "deletionTimestamp" not in item["metadata"]
    }


def alive(answer: Json) -> list[Json]:
    """Return claims that have or may get an instance."""
    return [
        item
        for item in answer.get("items", ())
        if "deletionTimestamp" not in item["metadata"] or KARPENTERS in item["metadata"].get("finalizers", ())
    ]


async def finished(kube: KubeHttp, name: str) -> None:
    """Delete the user's Job and its pods."""
    await kube.send("DELETE", f"{JOBS}/{name}", {"propagationPolicy": "Background"})


@pytest.mark.sweep
async def test_pending_pods_get_claims_and_idle_nodes_are_removed(tmp_path: Path) -> None:
    """Unschedulable -> NodeClaims of ours -> nodes -> Running -> idle -> no instance, no node.

    Karpenter has a NodePool of its own, whose limit keeps it from launching nodes for the same pods, as `doctor`
    recommends. Each service has its account of the chart: no call is refused, and only the scaler creates claims.
    """
    tool("helm")
    async with bought_by_karpenter(tmp_path, has_accounts=True, limits={GPU: "0"}) as (_, kube):
        await play(kube)
    told = {service.name: seen(tmp_path, service.name) for service in services()}
    assert {name for name, each in told.items() if each.refused} == set()
    claiming = {name for name, each in told.items() if any(call[1] == "nodeclaims" for call in each.calls)}
    assert claiming == {"scaler"}
    verbs = {verb for verb, resource, _ in told["scaler"].calls if resource == "nodeclaims"}
    assert verbs == {"create", "get", "list", "patch", "delete"}
    assert ("get", "kwoknodeclasses", "karpenter.kwok.sh") in told["spot_watcher"].calls


@pytest.mark.sweep  # the contract of a provider has the same limits, without a cluster
async def test_karpenter_launches_what_the_limits_allow(tmp_path: Path) -> None:
    """Mode limits, under the chart's accounts: a user's pods wait, the pool's limit goes up by a machine each, and
    Karpenter makes them; idle, the limit goes down and then the nodes. A gang of our queue is held until its nodes are
    there, so no pod of it waits: told by name, and nothing is allowed for it."""
    tool("helm")
    pool = node_pool("gpu", "gpu-4x", "zone-a")
    async with bought_by_karpenter(tmp_path, has_accounts=True, limited=[pool]) as (cluster, kube):
        await kube.made(JOBS, gpu_job("train", gpus=4, count=2))
        await kube.until(PODS, lambda answer: len(placed(answer)) == 2, SECONDS_MAX)
        claims = (await kube.read(CLAIMS))["items"]
        assert {claim["metadata"]["labels"]["karpenter.sh/nodepool"] for claim in claims} == {"gpu"}
        assert len({claim["metadata"]["labels"]["gpu-autoscaler.io/action-id"] for claim in claims}) == 2
        assert cluster.record.count(ScalingNodeLaunched) == 2
        assert (len(claims), (await kube.read(f"{POOLS}/gpu"))["spec"]["limits"]) == (2, {GPU: "8"})

        await finished(kube, "train")
        await kube.until(NODES, lambda answer: answer.get("items") == [], SECONDS_MAX)
        await kube.until(f"{POOLS}/gpu", lambda answer: answer["spec"]["limits"] == {GPU: "0"}, SECONDS_MAX)
        await kube.until(CLAIMS, lambda answer: not alive(answer), SECONDS_MAX)

        gang = JobRequested(
            job_id=JobId("gang"),
            job_name="gang",
            project_id="e2e",
            gpu_requirements=GpuRequirements(gpu_count=4),
            container=ContainerRequest(image="registry.example/e2e:1"),
            resources=ResourceRequest(cpu="2", memory="8Gi", ephemeral_storage="1Gi"),
            members=2,
        )
        await cluster.player.submit(gang, "rest")
        await cluster.until(is_refused_by_name, "the gang is not bought for", SECONDS_MAX)
        assert (await kube.read(f"{POOLS}/gpu"))["spec"]["limits"] == {GPU: "0"}
        assert alive(await kube.read(CLAIMS)) == []
    told = {service.name: seen(tmp_path, service.name) for service in services()}
    assert {name for name, each in told.items() if each.refused} == set()
    verbs = {verb for verb, resource, _ in told["scaler"].calls if resource == "nodepools"}
    assert verbs == {"get", "patch"}
    assert ("create", "nodeclaims", "karpenter.sh") not in told["scaler"].calls


def is_refused_by_name(record: Record) -> bool:
    """Return whether a refusal for lack of a pending pod was recorded."""
    return any(one.code == "NoPendingPod" for one, _ in record.of(ScalingLaunchRefused))


async def play(kube: KubeHttp) -> None:
    """Two pods of a user, and their end: a claim and a node for each, all of them ours."""
    await kube.made(JOBS, gpu_job("train", gpus=4, count=2))
    await kube.until(PODS, lambda answer: len(placed(answer)) == 2, SECONDS_MAX)
    claims = (await kube.read(CLAIMS))["items"]
    assert {claim["metadata"]["labels"]["node.kubernetes.io/instance-type"] for claim in claims} == {"gpu-4x"}
    assert all(claim["metadata"]["labels"]["gpu-autoscaler.io/action-id"] for claim in claims)
    nodes = (await kube.read(NODES))["items"]
    assert len(claims) == len(nodes) == 2
    assert all(node["metadata"]["finalizers"] == [KARPENTERS] for node in nodes), "one of them waits for the other"

    await emptied(kube)


async def emptied(kube: KubeHttp) -> None:
    """End the user's Job and wait until no instance and no node is left."""
    await finished(kube, "train")
    await kube.until(NODES, lambda answer: answer.get("items") == [], SECONDS_MAX)
    await kube.until(CLAIMS, lambda answer: not alive(answer), SECONDS_MAX)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, KubeHttp]]:
    """A system for several tests; Karpenter's cloud does not know the cheapest type of our file."""
    cheaper = TYPES[0] | {"instance_type": "gone-1x", "usd_per_hour": {"on-demand": 0.1}}
    async with bought_by_karpenter(tmp_path_factory.mktemp("shared"), gone=[cheaper]) as started_system:
        yield started_system


class Bought(msgspec.Struct, frozen=True):
    """The shared system, and the claims of earlier tests: ended ones stay listed for a while."""

    cluster: Running
    kube: KubeHttp
    earlier: frozenset[str]

    def of_this_test(self, answer: Json) -> list[Json]:
        """Return the claims of a list that earlier tests did not make."""
        return [claim for claim in answer["items"] if claim["metadata"]["name"] not in self.earlier]

    async def claims(self) -> list[Json]:
        """Return all claims of this test, ended ones included."""
        return self.of_this_test(await self.kube.read(CLAIMS))

    async def until_claimed(self, count: int) -> None:
        """Wait for this number of claims of this test."""
        await self.kube.until(CLAIMS, lambda answer: len(self.of_this_test(answer)) >= count, SECONDS_MAX)


@pytest_asyncio.fixture(loop_scope="module")
async def bought(shared: tuple[Running, KubeHttp]) -> AsyncIterator[Bought]:
    """The shared system, without instances before and after the test."""
    cluster, kube = shared
    earlier = frozenset(claim["metadata"]["name"] for claim in (await kube.read(CLAIMS))["items"])
    yield Bought(cluster, kube, earlier)
    await emptied(kube)


@pytest.mark.sweep
@pytest.mark.asyncio(loop_scope="module")
async def test_an_offer_that_karpenter_cannot_launch_is_replaced(bought: Bought) -> None:
    """The cheapest offer is refused; the next one is launched, and no claim of the first remains."""
    cluster, kube = bought.cluster, bought.kube
    await kube.made(JOBS, gpu_job("train", gpus=1))
    await kube.until(PODS, lambda answer: len(placed(answer)) == 1, SECONDS_MAX)
    await cluster.until(lambda record: record.count(ScalingLaunchRefused) >= 1, "the refusal")
    (claim,) = await bought.claims()
    assert claim["metadata"]["labels"]["node.kubernetes.io/instance-type"] == "gpu-1x"


@pytest.mark.sweep
@pytest.mark.asyncio(loop_scope="module")
async def test_a_scaler_killed_during_launches_buys_nothing_twice(bought: Bought) -> None:
    """Killed twice during four launches: four claims in total, including terminated ones."""
    cluster, kube = bought.cluster, bought.kube
    await kube.made(JOBS, gpu_job("train", gpus=4, count=4))
    for wanted in (1, 2):
        await bought.until_claimed(wanted)
        await cluster.kill("scaler")
    await kube.until(PODS, lambda answer: len(placed(answer)) == 4, SECONDS_MAX)
    await asyncio.sleep(5.0)
    claims = await bought.claims()
    actions = [claim["metadata"]["labels"]["gpu-autoscaler.io/action-id"] for claim in claims]
    assert len({*actions}) == len(actions) == 4, [(claim["metadata"], claim.get("status")) for claim in claims]
    assert len((await kube.read(NODES))["items"]) == 4


@pytest.mark.sweep
@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_disrupted_by_karpenter_is_replaced(bought: Bought) -> None:
    """It deletes a claim, as for an interruption: Karpenter drains, and the work runs elsewhere."""
    cluster, kube = bought.cluster, bought.kube
    await kube.made(JOBS, gpu_job("train", gpus=1))
    before = placed(await kube.until(PODS, lambda answer: len(placed(answer)) == 1, SECONDS_MAX))
    (claim,) = alive({"items": await bought.claims()})
    (name,) = before.values()
    await kube.send("DELETE", f"{CLAIMS}/{claim['metadata']['name']}")
    # It may be gone between two polls of a busy machine.
    going = await kube.until(f"{NODES}/{name}", lambda node: not node or "deletionTimestamp" in node["metadata"])
    await kube.until(f"{NODES}/{name}", lambda node: not node, SECONDS_MAX)
    after = placed(await kube.until(PODS, lambda answer: len(placed(answer)) == 1, SECONDS_MAX))
    assert name not in after.values()
    assert not going.get("spec", {}).get("unschedulable"), "we do not cordon what is Karpenter's to empty"
    record = cluster.record
    assert [fact for fact, _ in record.of(ScalingDrainStarted) if fact.node_name == name] == []
    assert [fact for fact, _ in record.of(ScalingNodeDrained) if fact.node_name == name] == []
    assert len(alive({"items": await bought.claims()})) == len((await kube.read(NODES))["items"]) == 1
