"""The adapters of the sensing services against a served simcluster: what they read is what the cloud did."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from tests.contract.provider.contract import order
from tests.contract.provider.test_sim import SimRig

from gpu_autoscaler.cloudmeta.aws import AwsMetadata
from gpu_autoscaler.dcgm.exporter_pages import Scraper
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.simcluster.instances import Machine

pytestmark = pytest.mark.integration


class Node:
    """A node that was bought and has booted, with its two addresses."""

    def __init__(self, rig: SimRig, machine: Machine) -> None:
        self.rig = rig
        self.machine = machine
        self.url = f"{rig.url}/nodes/{machine.node_name}"


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """The node, alone in its cluster."""
    rig = SimRig()
    await rig.open()
    await rig.ours.launch(await order(rig))
    await rig.wait(200)
    yield Node(rig, rig.cloud.machines[0])
    await rig.close()


@pytest.fixture
async def metadata(node: Node) -> AsyncIterator[AwsMetadata]:
    """A client of its metadata."""
    async with aiohttp.ClientSession() as session:
        yield AwsMetadata(session, node.url)


async def test_notices_and_hints_are_read_as_given(node: Node, metadata: AwsMetadata) -> None:
    """None at first, then both with the cloud's own instants."""
    assert await metadata.reclaim_notices() == ()
    assert await metadata.rebalance_recommended_at() is None
    reclaim_at = node.rig.cloud.give_notice(node.machine, "terminate", 120)
    hint_at = node.rig.cloud.recommend_rebalance(node.machine)
    (notice,) = await metadata.reclaim_notices()

    assert notice is not None
    assert (notice.kind, notice.reclaim_at) == ("terminate", reclaim_at)
    assert await metadata.rebalance_recommended_at() == hint_at


async def test_a_machine_that_is_gone_has_no_all_clear(node: Node, metadata: AwsMetadata) -> None:
    """Its address does not say "no notice", it does not answer."""
    node.rig.cloud.give_notice(node.machine, "terminate", 5)
    await node.rig.wait(60)
    with pytest.raises(TransientError):
        await metadata.reclaim_notices()


async def test_exporters_are_read_while_they_speak(node: Node) -> None:
    """A page for each GPU; a silent exporter and a machine that is gone are None."""
    scraper = Scraper()
    url = {"n": f"{node.url}/metrics"}
    first = (await scraper.scrape(url))["n"]
    node.machine.telemetry.break_with("silent")
    silent = (await scraper.scrape(url))["n"]
    node.machine.telemetry.break_with(None)
    await node.rig.ours.terminate(node.machine.provider_id, now=node.rig.now())
    await node.rig.wait(60)
    gone = (await scraper.scrape(url))["n"]
    await scraper.close()

    assert first is not None
    assert [gpu.gpu for gpu in first.gpus] == [str(index) for index in range(node.machine.kind.gpu_count)]
    assert (silent, gone) == (None, None)
