"""The simulated cloud over HTTP: EC2 instance metadata, exporter addresses and the admin API."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.support.kube_objects import pod
from tests.unit.simcluster.conftest import NOON, Cluster, StillClock

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.kinds import NODES, PODS
from gpu_autoscaler.simcluster.objects import is_true
from gpu_autoscaler.simcluster.server import start

TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"


class Rig:
    """A served cluster whose time moves only in `cluster.settle`."""

    def __init__(self, cluster: Cluster, cloud: Cloud, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.cloud = cloud
        self.session = session

    async def send(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Send one request; JSON bodies are decoded."""
        async with self.session.request(method, path, json=body, headers=headers) as answer:
            text = await answer.text()
            return answer.status, msgspec.json.decode(text) if "json" in answer.content_type else text

    def node(self, action: str = "a1") -> str:
        """Buy a spot node with four GPUs, let it boot, and return its name."""
        offer = next(offer for offer in self.cloud.offers() if offer.key == "g4dn.12xlarge/sim-a/spot")
        self.cloud.launch(
            Order(action_id=ActionId(action), installation="ours", pool="p", offer=offer, labels=(), taints=())
        )
        self.cluster.settle(140, step_seconds=5)
        return self.cloud.machines[-1].node_name

    async def metadata_token(self, name: str) -> dict[str, str]:
        """The header that opens the node's metadata."""
        status, token = await self.send("PUT", f"/nodes/{name}/latest/api/token", **{TTL: "60"})
        assert status == 200
        return {TOKEN: token}


class HeldClock(StillClock):
    """The test's time, in which whoever waits waits for ever: the server makes no steps of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.factor = cluster.clock.factor

    def now(self) -> datetime:
        """Where the test left it."""
        return self._cluster.clock.now()

    async def sleep(self, seconds: float) -> None:  # noqa: ARG002 - no wait ever ends
        """Never ends."""
        await asyncio.Event().wait()


@pytest.fixture
async def rig(cluster: Cluster) -> AsyncIterator[Rig]:
    """The cluster with its cloud, served on a free port."""
    cluster.world.clock = HeldClock(cluster)
    cloud, routes = attach_cloud(cluster.world, seed=1)
    runner, url = await start(cluster.world, extensions=[routes])
    async with aiohttp.ClientSession(url) as session:
        yield Rig(cluster, cloud, session)
    await runner.cleanup()


async def test_a_stopped_process_does_not_make_nodes_unreachable(rig: Rig) -> None:
    """After a pause of a minute, heartbeats are sent before leases are checked."""
    name = rig.node()
    rig.cluster.clock.at += timedelta(seconds=60)
    rig.cluster.settle()
    assert is_true(rig.cluster.api.record(NODES, name).object, "Ready")


async def test_metadata_requires_a_token(rig: Rig) -> None:
    """Without one or with an invalid one 401; a token needs a lifetime in range."""
    path = f"/nodes/{rig.node()}/latest"
    assert (await rig.send("GET", f"{path}/meta-data/instance-id"))[0] == 401
    assert (await rig.send("GET", f"{path}/meta-data/instance-id", **{TOKEN: "made-up"}))[0] == 401
    assert (await rig.send("PUT", f"{path}/api/token"))[0] == 400
    assert (await rig.send("PUT", f"{path}/api/token", **{TTL: "21601"}))[0] == 400


async def test_metadata_has_the_instance_s_identity(rig: Rig) -> None:
    """Instance, zone and type; an unknown path is 404."""
    name = rig.node()
    token = await rig.metadata_token(name)
    read = [
        await rig.send("GET", f"/nodes/{name}/latest/meta-data/{path}", **token)
        for path in ("instance-id", "placement/availability-zone", "instance-type", "ami-id")
    ]
    assert read[:3] == [(200, rig.cloud.machines[0].instance_id), (200, "sim-a"), (200, "g4dn.12xlarge")]
    assert read[3][0] == 404


async def test_no_notice_is_404_and_a_notice_is_json(rig: Rig) -> None:
    """The deadline in whole seconds, UTC; 404 again when it is withdrawn."""
    name = rig.node()
    token = await rig.metadata_token(name)
    path = f"/nodes/{name}/latest/meta-data/spot/instance-action"
    assert (await rig.send("GET", path, **token))[0] == 404
    status, told = await rig.send("POST", "/admin/notices", {"node": name})
    status, text = await rig.send("GET", path, **token)

    assert status == 200
    assert msgspec.json.decode(text) == {"action": "terminate", "time": "2026-11-21T12:04:20Z"}
    assert told["reclaim_at"] == "2026-11-21T12:04:20Z"
    await rig.send("DELETE", f"/admin/notices/{name}")
    assert (await rig.send("GET", path, **token))[0] == 404


async def test_work_ends_on_request(rig: Rig) -> None:
    """Endless pods succeed; pending pods stay pending."""
    rig.node()
    rig.cluster.make(PODS, pod("runs", gpus=4), pod("waits", gpus=4))
    rig.cluster.settle(5)
    assert await rig.send("POST", "/admin/programs/end") == (200, {"ended": 1})
    rig.cluster.settle()
    assert rig.cluster.phases() == {"runs": "Succeeded", "waits": "Pending"}
    rig.cluster.settle(5)
    assert rig.cluster.phases() == {"runs": "Succeeded", "waits": "Running"}


async def test_a_fast_clock_does_not_shorten_notices(rig: Rig) -> None:
    """Seconds of a notice are real time, because drains do not run faster."""
    rig.cluster.clock.factor = 15.0
    rig.cluster.world.clock = HeldClock(rig.cluster)
    name = rig.node()
    _, told = await rig.send("POST", "/admin/notices", {"node": name, "seconds": 120})
    assert datetime.fromisoformat(told["reclaim_at"]) == rig.cluster.clock.now() + timedelta(seconds=120 * 15)
    rig.cluster.settle(119 * 15, step_seconds=5)
    assert rig.cloud.machines[0].is_alive
    rig.cluster.settle(15, step_seconds=5)
    assert not rig.cloud.machines[0].is_alive


async def test_a_rebalance_recommendation_has_its_time(rig: Rig) -> None:
    """In EC2's form, without a notice."""
    name = rig.node()
    token = await rig.metadata_token(name)
    await rig.send("POST", "/admin/rebalances", {"node": name, "after_seconds": 10})
    rig.cluster.settle(11)
    status, text = await rig.send("GET", f"/nodes/{name}/latest/meta-data/events/recommendations/rebalance", **token)
    assert (status, msgspec.json.decode(text)) == (200, {"noticeTime": "2026-11-21T12:02:30Z"})


async def test_a_terminated_machine_does_not_answer(rig: Rig) -> None:
    """Neither metadata nor telemetry, and no 404, which would mean "no notice"."""
    name = rig.node()
    token = await rig.metadata_token(name)
    rig.cloud.terminate(rig.cloud.machines[0].instance_id, "ours")
    rig.cluster.settle(10)
    assert (await rig.send("GET", f"/nodes/{name}/latest/meta-data/spot/instance-action", **token))[0] == 502
    assert (await rig.send("GET", f"/nodes/{name}/metrics"))[0] == 502


async def test_the_first_busy_spot_node_gets_the_notice(rig: Rig) -> None:
    """Without a name the cloud selects one; if none is busy, the request fails with a message."""
    name = rig.node()
    assert (await rig.send("POST", "/admin/notices", {}))[0] == 404
    rig.cluster.make(PODS, pod("train", gpus=1))
    rig.cluster.settle(5)
    status, told = await rig.send("POST", "/admin/notices", {"seconds": 30, "after_seconds": 20})
    assert (status, told["node"], told["reclaim_at"]) == (200, name, None)
    assert rig.cloud.machines[0].notice is None
    rig.cluster.settle(21)
    assert rig.cloud.machines[0].notice is not None


async def test_telemetry_faults_can_be_set_and_cleared(rig: Rig) -> None:
    """A silent exporter does not answer; afterwards it serves its page again."""
    name = rig.node()
    await rig.send("POST", "/admin/telemetry", {"node": name, "fault": "silent"})
    assert (await rig.send("GET", f"/nodes/{name}/metrics"))[0] == 502
    await rig.send("POST", "/admin/telemetry", {"node": name, "fault": None})
    status, page = await rig.send("GET", f"/nodes/{name}/metrics")
    assert status == 200
    assert page.startswith("# HELP DCGM_FI_DEV_SM_CLOCK")


async def test_the_cloud_reports_its_instances_and_bill(rig: Rig) -> None:
    """All instances, their orders, and a consistent bill."""
    name = rig.node()
    (shown,) = (await rig.send("GET", "/admin/instances"))[1]
    bill = (await rig.send("GET", "/admin/invoice"))[1]
    assert (shown["node_name"], shown["instance"]["action_id"], shown["installation"]) == (name, "a1", "ours")
    assert bill["as_of"] == (NOON + timedelta(seconds=140)).isoformat().replace("+00:00", "Z")
    assert bill["total_micro_usd"] == sum(line["cost_micro_usd"] for line in bill["lines"]) > 0


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/admin/refusals", {"code": "NoSuchCode"}, "NoSuchCode"),
        ("/admin/refusals", {"times": 0}, "times"),
        ("/admin/notices", {"node": "nobody"}, "nobody"),
        ("/admin/notices", {"kind": "maintenance"}, "kind"),
        ("/admin/telemetry", {"node": "nobody"}, "nobody"),
        ("/admin/telemetry", {"node": "n", "fault": "odd"}, "fault"),
    ],
)
async def test_admin_errors_name_the_invalid_field(rig: Rig, path: str, body: object, told: str) -> None:
    """4xx with the field or object."""
    status, answer = await rig.send("POST", path, body)
    assert 400 <= status < 500
    assert told in answer["message"]


async def test_refusals_apply_to_the_capacity_api(rig: Rig) -> None:
    """Refusals configured at /admin/refusals are returned to launches."""
    await rig.send("POST", "/admin/refusals", {"offer": "g4dn.*", "seconds": 60})
    offer = next(offer for offer in rig.cloud.offers() if offer.key == "g4dn.xlarge/sim-b/spot")
    wanted = msgspec.to_builtins(
        Order(action_id=ActionId("a"), installation="ours", pool="p", offer=offer, labels=(), taints=())
    )
    status, answer = await rig.send("POST", "/cloud/instances", wanted)
    assert (status, answer["error"]["code"]) == (409, "InsufficientInstanceCapacity")
    await rig.send("DELETE", "/admin/refusals")
    assert (await rig.send("POST", "/cloud/instances", wanted))[0] == 200


async def test_the_capacity_api_names_missing_parameters(rig: Rig) -> None:
    """An order without a token, a list without an owner."""
    status, answer = await rig.send("POST", "/cloud/instances", {"pool": "p"})
    assert (status, answer["error"]["code"]) == (400, "InvalidParameterValue")
    assert (await rig.send("GET", "/cloud/instances"))[0] == 400
