"""Every NATS file is lost, in the middle of everything: the system is whole again from what is left."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.e2e.test_story import has, request
from tests.support.outside import ask, until_answered
from tests.support.running import Running, followed, started

from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobQueued, JobStarted
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.scaling import (
    ScalingDecisionsRestored,
    ScalingDrainStarted,
    ScalingNodeLaunched,
    ScalingPlanMade,
)
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import JOBS, Listed
from gpu_autoscaler.model.decisions import BuyNode, DrainNode
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.replay.recompute import Verdict, recompute
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler.store.protocol import JobRow, Store
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.demo.run import differing_plans
from gpu_autoscaler_services.demo.subscriber import connect
from gpu_autoscaler_services.local.simulated_world import GroundTruth
from gpu_autoscaler_services.local.system import LocalSystem

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(420)]

RECONCILE_SECONDS = 30.0
QUIET_SECONDS_MAX = 180.0
PROMISED = "job-promised"


async def in_the_middle(cluster: Running) -> None:
    """Jobs that are over, run, are to be cancelled, wait for a node; nodes that are idle, busy, booting, draining."""
    player = cluster.player
    await player.submit(request("job-done", run_seconds=20.0), "rest")
    await player.submit(request("job-runs", run_seconds=900.0), "rest")
    await player.submit(request("job-cancelled", run_seconds=900.0), "nats")
    await cluster.until(
        lambda record: all(has(record, JobStarted, job_id=name) for name in ("job-runs", "job-cancelled")), "they run"
    )
    await cluster.until(lambda record: has(record, JobFinished, job_id="job-done"), "the first job is over")
    await player._publish(JobCancelRequested(job_id=JobId("job-cancelled"), requested_by="a test"))
    await cluster.until(lambda record: has(record, JobFinished, job_id="job-cancelled"), "the second is cancelled")
    launched = cluster.record.count(ScalingNodeLaunched)
    await player.submit(request("job-waits", gpus=4, run_seconds=60.0), "nats")
    await cluster.until(lambda record: record.count(ScalingNodeLaunched) > launched, "a node that boots for the third")
    assert await cluster.world.send_notice(120.0) is not None
    await cluster.until(lambda record: has(record, ScalingDrainStarted, is_voluntary=False), "a node that drains")
    cluster.freeze("scheduler")  # so that the last request is accepted by the gateway alone
    await player.submit(request(PROMISED, run_seconds=30.0), "rest")


async def lose_everything(system: LocalSystem) -> None:
    """The broker dies with all its files, and another one starts in its place."""
    await system.nats.kill()
    shutil.rmtree(system.nats.store / "jetstream")
    await system.nats.start()


async def stop_services(system: LocalSystem) -> list[str]:
    """Kill every service, including stalled ones; cluster and cloud continue."""
    names = [name for name in system.children if name != "simcluster"]
    await asyncio.gather(*(system.children[name].stop() for name in names))
    return names


async def made_at(cluster: Running) -> dict[str, str]:
    """Return the uid of each Kubernetes Job by name: a recreated job has another uid."""
    kube = KubeClient(Connection(base_url=cluster.system.simcluster_url), now=cluster.clock.now)
    try:
        listed = await anext(aiter(kube.watch(JOBS)))
        assert isinstance(listed, Listed), "a watch begins with a list"
        return {job.metadata.name: job.metadata.uid for job in listed.objects}
    finally:
        await kube.close()


async def until_known_again(cluster: Running) -> None:
    """Every accepted active job is in the new stream within five reconcile periods."""
    names = ("job-runs", "job-waits", PROMISED)
    await cluster.until(
        lambda record: all(has(record, JobQueued, job_id=name) for name in names) and has(record, ScalingPlanMade),
        "every accepted job and a first plan",
        5 * RECONCILE_SECONDS,
    )


async def until_quiet(cluster: Running, store_url: str) -> GroundTruth:
    """Wait until every accepted job has ended, no instance is left, and the ledger is the bill."""
    store = await open_store(store_url, is_read_only=True)
    truth = await cluster.world.truth()
    try:
        async with asyncio.timeout(QUIET_SECONDS_MAX):
            while True:
                truth = await cluster.world.truth()
                is_over = not await store.unfinished_jobs() and not truth.instances_left
                if is_over and await ledger(store) == Counter(truth.bill_micro_usd):
                    return truth
                await asyncio.sleep(0.5)
    except TimeoutError:
        left = [row.spec.job_id for row in await store.unfinished_jobs()]
        raise AssertionError(f"{left=} {truth=} ledger={await ledger(store)}") from None
    finally:
        await store.close()


async def ledger(store: Store) -> Counter[str]:
    """Return the recorded cost of each instance; every span is the sum of its parts."""
    charged: Counter[str] = Counter()
    cursor: str | None = None
    while True:
        page = await store.ledger(cursor=cursor)
        for span in page.rows:
            assert span.total_micro_usd == span.idle_micro_usd + sum(each.allocated_micro_usd for each in span.shares)
            charged[span.provider_id] += span.total_micro_usd
        if (cursor := page.next_cursor) is None:
            return charged


async def rows(folder: Path) -> dict[str, JobRow]:
    """Return recorded jobs."""
    store = await SqliteStore.open(folder / "store.db", is_read_only=True)
    try:
        return {row.spec.job_id: row for row in (await store.jobs()).rows}
    finally:
        await store.close()


def decided(cluster: Running, kind: type) -> list[tuple[datetime, object]]:
    """Return decisions of this type in the plans of the new stream."""
    plans = [fact.plan for fact, _ in cluster.record.of(ScalingPlanMade)]
    return [(plan.as_of, each) for plan in plans for each in plan.decisions if isinstance(each, kind)]


def nothing_was_rash(cluster: Running) -> None:
    """One node was bought, as one job is new: all other demand was covered. Idle is who was seen idle for long enough.

    Which of the two jobs that wait takes the node that boots is a matter of which is known again first.
    """
    bought = [buy for _, buy in decided(cluster, BuyNode)]
    assert len(bought) <= 1, bought
    for buy in bought:
        assert isinstance(buy, BuyNode)
        assert isinstance(buy.reason, UnmetDemand)
        assert set(buy.reason.demand) <= {f"job/{PROMISED}", "job/job-waits"}, buy
    first_seen: dict[str, datetime] = {}
    for fact, seen in cluster.record.of(NodeObserved):
        first_seen.setdefault(fact.node_uid, seen.recorded.envelope.time)
    idle = timedelta(seconds=cluster.policy.idle_seconds_max)
    for at, drain in decided(cluster, DrainNode):
        assert isinstance(drain, DrainNode)
        assert not drain.is_voluntary or at - first_seen[drain.node_uid] >= idle, drain


async def plans_are_recomputable(cluster: Running, folder: Path, lost_plan: str) -> None:
    """Every later plan is recomputed from the new stream; for an earlier one the missing facts are named."""
    assert differing_plans(cluster.record, cluster.policy) == ()
    parents = [fact.plan.parent_sequence for fact, _ in cluster.record.of(ScalingPlanMade)]
    sequences = [seen.recorded.sequence for _, seen in cluster.record.of(ScalingPlanMade)]
    assert parents == [0, *sequences[:-1]]
    bus, store = await connect(cluster.system.nats_url), await SqliteStore.open(folder / "store.db", is_read_only=True)
    try:
        result = await recompute(bus, lost_plan, cluster.policy, cluster.clock, store)
    finally:
        await bus.close()
        await store.close()
    assert result.verdict is Verdict.FACTS_EXPIRED
    assert "its facts are gone" in result.sentence


@pytest.mark.sweep  # a rehearsal of two minutes; the simulator loses all streams in many seeds
@pytest.mark.parametrize("services", ["go on", "are stopped"])
async def test_every_nats_file_is_lost(
    tmp_path: Path, services: str, record_property: Callable[[str, object], None]
) -> None:
    """Jobs, orders, drains and charges are recovered from Kubernetes, the cloud and the store, exactly once."""
    async with started(tmp_path) as system:
        async with followed(system) as before:
            await in_the_middle(before)
            jobs_before, (lost_plan, _) = await made_at(before), list(before.record.of(ScalingPlanMade))[-1]
            tokens_before = set((await before.world.truth()).launches_by_token)
            stopped = await stop_services(system) if services == "are stopped" else []
        await lose_everything(system)
        lost_at = asyncio.get_running_loop().time()
        for name in stopped:
            await system.children[name].start()
        if not stopped:
            system.children["scheduler"].kill()  # it is stalled
        async with followed(system) as after:
            await until_known_again(after)
            record_property("known_again_seconds", round(asyncio.get_running_loop().time() - lost_at, 1))
            assert after.record.count(ScalingDecisionsRestored) == 1
            await until_answered(after, "/api/v1/gpu/jobs/job-done")
            truth = await until_quiet(after, f"sqlite:///{tmp_path / 'store.db'}")
            for name in ("job-done", "job-runs", "job-waits", "job-cancelled", PROMISED):
                shown = await ask(after, "GET", f"/api/v1/gpu/jobs/{name}")
                assert shown.status == 200
                assert shown.body["status"] == ("cancelled" if name == "job-cancelled" else "completed"), shown
            nothing_was_rash(after)
            jobs_after = await made_at(after)
            assert {name: jobs_after[name] for name in jobs_before if name in jobs_after} == jobs_before
            outcomes = {name: row.outcome for name, row in (await rows(tmp_path)).items()}
            assert len(outcomes) == 5
            assert Counter(outcomes.values()) == {"completed": 4, "cancelled": 1}
            assert all(count == 1 for count in truth.launches_by_token.values())
            assert len(set(truth.launches_by_token) - tokens_before) <= 1, "one more node, for the promised job"
            await plans_are_recomputable(after, tmp_path, lost_plan.plan_id)
