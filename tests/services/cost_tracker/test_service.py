"""The cost tracker's ledger is the provider's invoice, through crashes, late words and missing prices."""

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from tests.support.stories import bought, job, pod, purchase
from tests.support.told import HOUR, MINUTE, SECOND, T0, Told, record, resources

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.cost import CostAccrued, CostBudgetCrossed, CostLedgerTold
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarised, GpuSummary
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.node import InstanceState, NodeInstanceListed, NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.labels import PROJECT_ID
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.service import CostTracker

PRICE = 32_772_601  # odd, so that roundings would show
INSTANCE = ProviderId("sim:///a/i-1")


def instance(
    state: InstanceState = "running",
    *,
    at: datetime = T0,
    terminated_at: datetime | None = None,
    price: int | None = PRICE,
) -> tuple[Told, ...]:
    """The cloud's word about the instance."""
    versions = {"pending": 1, "running": 2, "terminating": 3, "terminated": 4}
    fact = NodeInstanceObserved(
        epoch=1,
        version=versions[state],
        provider_id=INSTANCE,
        action_id=ActionId("buy"),
        state=state,
        instance_type="p4d.24xlarge",
        zone="a",
        capacity_type=CapacityType.SPOT,
        price_micro_usd_per_hour=price,
        launched_at=T0,
        terminated_at=terminated_at,
    )
    return (Told(fact, at),)


def listed(at: datetime) -> tuple[Told, ...]:
    """The cloud listed the instance at this instant."""
    return (Told(NodeInstanceListed(provider_ids=(INSTANCE,), listed_at=at), at),)


def node(at: datetime = T0, gpus: int = 8) -> tuple[Told, ...]:
    """The node that the instance became."""
    fact = NodeObserved(
        epoch=1,
        version=1,
        node_uid=NodeUid("uid-n"),
        name="n",
        is_ready=True,
        allocatable=resources(gpus=gpus, cpu=96),
        created_at=at,
        provider_id=INSTANCE,
    )
    return (Told(fact, at),)


class World:
    """A tracker on a store, told facts and asked for ticks; what it says comes back when `echo` is called."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.metrics = Metrics("cost_tracker")
        self.told: list[Told] = []
        self.said: dict[str | None, Fact] = {}
        self.sums: list[CostLedgerTold] = []
        self.start()

    def start(self) -> None:
        """A new process: memory is empty, and the streams are read from their start."""
        self.view = StateView()
        self.tracker = CostTracker(self.view, self.store, instances_without_price=self.metrics.instances_without_price)
        self._fold(record(self.told))

    def tell(self, *stories: Sequence[Told]) -> None:
        """More facts arrive."""
        before = len(self.told)
        self.told += [told for story in stories for told in story]
        self._fold(record(self.told)[before:])

    def _fold(self, recorded: Iterable[Recorded]) -> None:
        recorded = tuple(recorded)
        self.view.advance(fold(self.view.state, recorded), {})
        self.tracker.on_folded(recorded)

    async def tick(self, now: datetime) -> list[Fact]:
        """One tick; what is said is in the stream, once for each condition. The day's sums are kept apart."""
        said = await self.tracker.on_tick(now)
        self.sums += [fact for fact in said if isinstance(fact, CostLedgerTold)]
        facts = [fact for fact in said if not isinstance(fact, CostLedgerTold)]
        for fact in facts:
            self.said.setdefault(fact.condition(), fact)
        return facts

    async def echo(self) -> None:
        """What was said comes back from the stream."""
        for recorded in record([Told(fact, T0) for fact in self.said.values()]):
            if isinstance(recorded.fact, CostAccrued):
                await self.tracker.on_fact(recorded)

    async def spans(self) -> list[CostAccrued]:
        """The ledger, oldest first."""
        return list(reversed((await self.store.ledger(count_max=1000)).rows))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A tracker that was told nothing yet."""
    store = await SqliteStore.open(tmp_path / "store.db")
    yield World(store)
    await store.close()


async def test_a_lifetime_costs_what_the_invoice_says(world: World) -> None:
    """Charged in many odd spans, with pods coming and going, the ledger is the invoice and every span adds up."""
    world.tell(instance(), node(), pod("a", on="n", gpus=3))
    for minute in range(1, 40):
        at = T0 + minute * (MINUTE + 7 * SECOND)
        world.tell(listed(at), pod(f"p{minute}", on="n", gpus=minute % 5, at=at))
        await world.tick(at + SECOND)
    end = T0 + HOUR + SECOND / 3
    world.tell(instance("terminated", at=end + 20 * SECOND, terminated_at=end))
    await world.tick(end + 21 * SECOND)
    spans = await world.spans()
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(PRICE, end - T0)
    assert len(spans) > 30
    assert [span.from_at for span in spans[1:]] == [span.to_at for span in spans[:-1]]
    for span in spans:
        assert span.total_micro_usd == span.idle_micro_usd + sum(share.allocated_micro_usd for share in span.shares)


async def test_nothing_is_charged_beyond_the_clouds_last_list(world: World) -> None:
    """An end that nobody has told yet must not be charged over: the list is the proof that it runs."""
    world.tell(instance(), listed(T0 + 2 * MINUTE))
    await world.tick(T0 + HOUR)
    assert [span.to_at for span in await world.spans()] == [T0 + 2 * MINUTE]
    world.tell(instance("terminated", at=T0 + HOUR, terminated_at=T0 + 3 * MINUTE))
    await world.tick(T0 + HOUR + SECOND)
    assert sum(span.total_micro_usd for span in await world.spans()) == cost_micro_usd(PRICE, 3 * MINUTE)


async def test_our_own_step_ends_the_bill_where_the_cloud_is_silent(world: World) -> None:
    """The executor's word about the end is the cloud's answer to it."""
    end = T0 + 90 * SECOND
    gone = ScalingNodeTerminated(
        action_id=ActionId("drain"),
        plan_id=PlanId("p"),
        provider_id=INSTANCE,
        order_action_id=None,
        node_name="n",
        terminated_at=end,
    )
    world.tell(instance(), (Told(gone, end),))
    await world.tick(end + SECOND)
    assert [span.to_at for span in await world.spans()] == [end]


async def test_an_end_before_what_was_charged_is_given_back(world: World) -> None:
    """Should the cloud correct its word, a negative span makes the sum the invoice again."""
    world.tell(instance(), listed(T0 + 10 * MINUTE))
    await world.tick(T0 + 10 * MINUTE)
    world.tell(instance("terminated", at=T0 + 11 * MINUTE, terminated_at=T0 + 9 * MINUTE))
    await world.tick(T0 + 11 * MINUTE)
    spans = await world.spans()
    assert spans[-1].total_micro_usd < 0
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(PRICE, 9 * MINUTE)


async def test_a_restart_leaves_no_gap_and_charges_nothing_twice(world: World) -> None:
    """The new process goes on from the ledger."""
    world.tell(instance(), node(), listed(T0 + 5 * MINUTE))
    await world.tick(T0 + 5 * MINUTE)
    world.start()
    world.tell(listed(T0 + 9 * MINUTE))
    await world.tick(T0 + 9 * MINUTE)
    world.start()
    await world.tick(T0 + 9 * MINUTE)
    spans = await world.spans()
    assert [(span.from_at, span.to_at) for span in spans] == [
        (T0, T0 + 5 * MINUTE),
        (T0 + 5 * MINUTE, T0 + 9 * MINUTE),
    ]
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(PRICE, 9 * MINUTE)


async def test_two_trackers_charge_once(world: World) -> None:
    """A replica that was slower finds the ledger ahead of it, and goes on from there."""
    world.tell(instance(), listed(T0 + 5 * MINUTE))
    slow = CostTracker(world.view, world.store, instances_without_price=world.metrics.instances_without_price)
    slow.on_folded(record(world.told))
    await slow.on_tick(T0)  # has read the ledger while it was empty
    await world.tick(T0 + 5 * MINUTE)
    world.tell(listed(T0 + 7 * MINUTE))
    slow.on_folded(record(world.told))
    for seconds in range(3):
        await slow.on_tick(T0 + 7 * MINUTE + seconds * SECOND)
    assert sum(span.total_micro_usd for span in await world.spans()) == cost_micro_usd(PRICE, 7 * MINUTE)


async def test_a_span_is_told_until_the_stream_has_it(world: World) -> None:
    """The process dies between ledger and stream: the next one tells it; once it came back it is told no more."""
    world.tell(instance(), listed(T0 + 5 * MINUTE))
    await world.tracker.on_tick(T0 + 5 * MINUTE)  # what it returns is never published
    world.start()
    (again,) = await world.tick(T0 + 5 * MINUTE)
    assert isinstance(again, CostAccrued)
    assert again == (await world.spans())[0]
    await world.echo()
    assert await world.tick(T0 + 5 * MINUTE) == []


async def test_no_price_is_not_free(world: World) -> None:
    """Held and counted while nobody says the price; then the whole time is charged, with source and time."""
    world.tell(instance("pending", price=None), listed(T0 + HOUR))
    assert await world.tick(T0 + HOUR) == []
    assert world.metrics.instances_without_price._value.get() == 1
    world.tell(instance("running", at=T0 + HOUR), listed(T0 + 2 * HOUR))
    (span,) = await world.tick(T0 + 2 * HOUR)
    assert isinstance(span, CostAccrued)
    assert (span.total_micro_usd, span.price_source, span.price_at) == (
        2 * PRICE,
        "node.instance_observed.v1",
        T0 + HOUR,
    )
    assert world.metrics.instances_without_price._value.get() == 0


async def test_a_pod_that_is_gone_still_owes_its_time(world: World) -> None:
    """It came and went between two charges, and even between two processes; its job pays for its GPUs until then."""
    gone = PodGone(epoch=1_700_000_000, version=9, pod_uid=PodUid("uid-a"), namespace="default", name="a")
    world.tell(
        instance(),
        node(),
        job("train"),
        pod("a", on="n", gpus=8, job_id="train", at=T0 + MINUTE),
        (Told(gone, T0 + 2 * MINUTE),),
        listed(T0 + 4 * MINUTE),
    )
    world.start()
    (span,) = await world.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    (share,) = span.shares
    assert (share.job_id, share.project_id, share.namespace) == ("train", "research", "default")
    assert share.allocated_micro_usd == pytest.approx(span.total_micro_usd / 4, abs=1)


async def test_a_node_without_gpus_is_shared_by_cpu(world: World) -> None:
    """Half of the CPUs held: half of the money allocated."""
    world.tell(instance(), node(gpus=0), pod("a", on="n", gpus=0, cpu=48), listed(T0 + 4 * MINUTE))
    (span,) = await world.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    assert span.idle_micro_usd == pytest.approx(span.total_micro_usd / 2, abs=1)


async def test_daemons_owe_nothing(world: World) -> None:
    """A pod that belongs to its node is part of what the node costs."""
    world.tell(instance(), node(), pod("d", on="n", gpus=8, owner_kind="DaemonSet"), listed(T0 + 4 * MINUTE))
    (span,) = await world.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    assert span.idle_micro_usd == span.total_micro_usd


async def test_used_needs_telemetry(world: World) -> None:
    """Half busy is half used; without a window nobody says."""
    window = GpuNodeSummarised(
        epoch=1,
        version=1,
        node_uid=NodeUid("uid-n"),
        node_name="n",
        window_started_at=T0 + MINUTE,
        window_seconds=60.0,
        scrapes_expected_count=6,
        scrapes_answered_count=6,
        gpus=tuple(
            GpuSummary(gpu=str(gpu), gpu_uuid=str(gpu), samples_count=6, utilization_ratio_mean=0.5) for gpu in range(8)
        ),
    )
    world.tell(instance(), node(), pod("a", on="n", gpus=8), listed(T0 + MINUTE))
    (first,) = await world.tick(T0 + MINUTE)
    await world.echo()
    world.tell((Told(window, T0 + 2 * MINUTE),), listed(T0 + 2 * MINUTE))
    (second,) = await world.tick(T0 + 2 * MINUTE)
    assert isinstance(first, CostAccrued)
    assert isinstance(second, CostAccrued)
    assert first.shares[0].used_micro_usd is None
    assert second.shares[0].used_micro_usd == second.shares[0].allocated_micro_usd // 2


async def test_a_budget_is_told_at_80_and_100_percent_once(world: World) -> None:
    """Also after a restart: the stream says which marks were told."""
    world.tell(instance(), node(), job("train", budget_limit_micro_usd=PRICE), pod("a", on="n", gpus=8, job_id="train"))
    marks: list[float] = []
    for minute in (30, 48, 50, 60, 61):
        at = T0 + minute * MINUTE + SECOND
        world.tell(listed(at))
        crossed = [fact for fact in await world.tick(at) if isinstance(fact, CostBudgetCrossed)]
        marks += [fact.mark_ratio for fact in crossed]
        world.tell([Told(fact, at) for fact in crossed])
        world.start()
    assert marks == [0.8, 1.0]


def test_the_first_price_stays_for_an_instances_life() -> None:
    """A bill names one price; a later word of the same source does not change what was said first."""
    from gpu_autoscaler_services.cost_tracker.bills import Bills  # noqa: PLC0415 - the one test that looks inside

    bills = Bills()
    later = msgspec.structs.replace(instance("terminating")[0].fact, price_micro_usd_per_hour=1)
    bills.note(record([*instance(), Told(later, T0 + HOUR)]))
    (bill,) = bills.all()
    assert bill.price is not None
    assert bill.price.micro_usd_per_hour == PRICE


async def test_the_sums_of_the_ledger_are_told_once_a_day_and_on_a_new_stream(world: World) -> None:
    """Who never heard them learns what was spent before; spans that they have in them are told besides, and say whose
    limits they count against."""
    order = purchase("buy", pool="gpu", labels={PROJECT_ID: "speech"})
    world.tell(bought(order), instance(), node(), listed(T0 + HOUR))
    await world.tick(T0 + HOUR)
    (sums,) = world.sums
    (span,) = await world.spans()
    assert (span.pool, span.zone, span.bought_for) == ("gpu", "a", "speech")
    owners = ("cluster", "pool/gpu", "project/speech", "zone/a")
    names = [(period, owner) for period in ("2026-11", "2026-11-21") for owner in owners]
    assert [(each.period, each.owner, each.micro_usd) for each in sums.spent] == [(*name, PRICE) for name in names]
    assert [(each.provider_id, each.until_at) for each in sums.charged] == [(INSTANCE, T0 + HOUR)]
    world.tell([Told(sums, T0 + HOUR)])
    await world.tick(T0 + HOUR + MINUTE)
    assert len(world.sums) == 1
    world.told = [told for told in world.told if not isinstance(told.fact, CostLedgerTold)]
    world.start()
    await world.tick(T0 + 2 * HOUR)
    assert world.sums[1].spent == sums.spent


async def test_after_a_loss_the_ledger_tells_what_open_jobs_have_spent(world: World) -> None:
    """On a new stream nobody has said yet which jobs there are; the store knows, and their budgets count on."""
    queued = job("train", budget_limit_micro_usd=2 * PRICE)
    spec = next(told.fact.spec for told in queued if isinstance(told.fact, JobQueued))
    await world.store.accept_job(spec, request_digest="digest", accepted_at=T0)
    world.tell(instance(), node(), queued, pod("a", on="n", gpus=8, job_id="train"), listed(T0 + HOUR))
    await world.tick(T0 + HOUR)
    world.told = []
    world.start()
    await world.tick(T0 + HOUR + MINUTE)
    assert [(one.job_id, one.micro_usd) for one in world.sums[1].jobs] == [("train", PRICE)]
    await world.store.finish_job(spec.job_id, outcome="completed", finished_at=T0 + 2 * HOUR)
    world.start()
    await world.tick(T0 + 2 * HOUR)
    assert world.sums[2].jobs == ()
