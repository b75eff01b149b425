"""The ledger equals the provider's invoice, through crashes, late facts and missing prices."""

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from tests.support.stories import bought, job, pod, purchase
from tests.support.timed_facts import HOUR, MINUTE, SECOND, T0, TimedFact, record, resources

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.limits.spend import LEDGER_SECONDS_MAX
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.cost import CostAccrued, CostBudgetCrossed, CostLedgerReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSummary
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.node import InstanceState, NodeInstanceListed, NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.scaling import ScalingNodeLaunched, ScalingNodeTerminated
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.labels import PROJECT_ID
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.holdings import WINDOWS_COUNT_MAX
from gpu_autoscaler_services.cost_tracker.service import CostTracker, span_seconds
from gpu_autoscaler_services.scaler.living import living

PRICE = 32_772_601  # odd, so that roundings would show
INSTANCE = ProviderId("sim:///a/i-1")


def instance(
    state: InstanceState = "running",
    *,
    at: datetime = T0,
    terminated_at: datetime | None = None,
    price: int | None = PRICE,
) -> tuple[TimedFact, ...]:
    """Return the cloud's observation of the instance."""
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
    return (TimedFact(fact, at),)


def listed(at: datetime) -> tuple[TimedFact, ...]:
    """Return a list that has the instance."""
    return (TimedFact(NodeInstanceListed(provider_ids=(INSTANCE,), listed_at=at), at),)


def node(at: datetime = T0, gpus: int = 8) -> tuple[TimedFact, ...]:
    """Return the node of the instance."""
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
    return (TimedFact(fact, at),)


class Bench:
    """A cost tracker on a store; `echo` returns its published facts to it."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.metrics = Metrics("cost_tracker")
        self.recorded: list[TimedFact] = []
        self.published: dict[str | None, Fact] = {}
        self.sums: list[CostLedgerReported] = []
        self.start()

    def start(self) -> None:
        """Start a new process: memory is empty, and the streams are read from their start."""
        self.view = StateView()
        self.tracker = CostTracker(self.view, self.store, instances_without_price=self.metrics.instances_without_price)
        self._fold(record(self.recorded))

    def record_stories(self, *stories: Sequence[TimedFact]) -> None:
        """Fold more facts."""
        before = len(self.recorded)
        self.recorded += [recorded for story in stories for recorded in story]
        self._fold(record(self.recorded)[before:])

    def _fold(self, recorded: Iterable[Recorded]) -> None:
        recorded = tuple(recorded)
        self.view.advance(fold(self.view.state, recorded), {})
        self.tracker.on_folded(recorded)

    async def tick(self, now: datetime) -> list[Fact]:
        """Run one tick and publish its facts, once per condition; the day's sums are kept apart."""
        outputs = await self.tracker.on_tick(now)
        self.sums += [fact for fact in outputs if isinstance(fact, CostLedgerReported)]
        facts = [fact for fact in outputs if not isinstance(fact, CostLedgerReported)]
        for fact in facts:
            self.published.setdefault(fact.condition(), fact)
        return facts

    async def echo(self) -> None:
        """Return the published facts to the tracker."""
        for recorded in record([TimedFact(fact, T0) for fact in self.published.values()]):
            if isinstance(recorded.fact, CostAccrued):
                await self.tracker.on_fact(recorded)

    async def spans(self) -> list[CostAccrued]:
        """Return the ledger, oldest first."""
        return list(reversed((await self.store.ledger(count_max=1000)).rows))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A tracker without any facts."""
    store = await SqliteStore.open(tmp_path / "store.db")
    yield Bench(store)
    await store.close()


async def test_lifetime_cost_equals_invoice(bench: Bench) -> None:
    """Charged in many odd spans with changing pods, the ledger is the invoice and every span adds up."""
    bench.record_stories(instance(), node(), pod("a", on="n", gpus=3))
    for minute in range(1, 40):
        at = T0 + minute * (MINUTE + 7 * SECOND)
        bench.record_stories(listed(at), pod(f"p{minute}", on="n", gpus=minute % 5, at=at))
        await bench.tick(at + SECOND)
    end = T0 + HOUR + SECOND / 3
    bench.record_stories(instance("terminated", at=end + 20 * SECOND, terminated_at=end))
    await bench.tick(end + 21 * SECOND)
    spans = await bench.spans()
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(PRICE, end - T0)
    assert len(spans) > 30
    assert [span.from_at for span in spans[1:]] == [span.to_at for span in spans[:-1]]
    for span in spans:
        assert span.total_micro_usd == span.idle_micro_usd + sum(share.allocated_micro_usd for share in span.shares)


async def test_nothing_is_charged_beyond_last_list(bench: Bench) -> None:
    """An end that is not reported yet must not be charged over."""
    bench.record_stories(instance(), listed(T0 + 2 * MINUTE))
    await bench.tick(T0 + HOUR)
    assert [span.to_at for span in await bench.spans()] == [T0 + 2 * MINUTE]
    bench.record_stories(instance("terminated", at=T0 + HOUR, terminated_at=T0 + 3 * MINUTE))
    await bench.tick(T0 + HOUR + SECOND)
    assert sum(span.total_micro_usd for span in await bench.spans()) == cost_micro_usd(PRICE, 3 * MINUTE)


async def test_own_termination_ends_the_bill(bench: Bench) -> None:
    """The executor's fact is the cloud's answer."""
    end = T0 + 90 * SECOND
    gone = ScalingNodeTerminated(
        action_id=ActionId("drain"),
        plan_id=PlanId("p"),
        provider_id=INSTANCE,
        order_action_id=None,
        node_name="n",
        terminated_at=end,
    )
    bench.record_stories(instance(), (TimedFact(gone, end),))
    await bench.tick(end + SECOND)
    assert [span.to_at for span in await bench.spans()] == [end]


async def test_earlier_end_is_refunded(bench: Bench) -> None:
    """If the cloud corrects the end, a negative span makes the sum the invoice."""
    bench.record_stories(instance(), listed(T0 + 10 * MINUTE))
    await bench.tick(T0 + 10 * MINUTE)
    bench.record_stories(instance("terminated", at=T0 + 11 * MINUTE, terminated_at=T0 + 9 * MINUTE))
    await bench.tick(T0 + 11 * MINUTE)
    spans = await bench.spans()
    assert spans[-1].total_micro_usd < 0
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(PRICE, 9 * MINUTE)


async def test_restart_leaves_no_gap_and_no_overlap(bench: Bench) -> None:
    """The new process continues from the ledger."""
    bench.record_stories(instance(), node(), listed(T0 + 5 * MINUTE))
    await bench.tick(T0 + 5 * MINUTE)
    bench.start()
    bench.record_stories(listed(T0 + 9 * MINUTE))
    await bench.tick(T0 + 9 * MINUTE)
    bench.start()
    await bench.tick(T0 + 9 * MINUTE)
    spans = await bench.spans()
    assert [(span.from_at, span.to_at) for span in spans] == [(T0, T0 + 5 * MINUTE), (T0 + 5 * MINUTE, T0 + 9 * MINUTE)]
    assert sum(span.total_micro_usd for span in spans) == cost_micro_usd(PRICE, 9 * MINUTE)


@pytest.mark.parametrize("listed_as", ["terminated", None], ids=["listed by the cloud", "in no list of the cloud"])
async def test_what_ended_while_no_tracker_ran_is_charged(bench: Bench, listed_as: InstanceState | None) -> None:
    """To its end and to its account, by what the scaler publishes again, although the streams have nothing else."""
    end = T0 + 30 * MINUTE
    buy = purchase("buy", pool="gpu", labels={PROJECT_ID: "speech"})
    *decided, launch, _ = bought(buy)
    assert isinstance(launch.fact, ScalingNodeLaunched)
    launched = msgspec.structs.replace(launch.fact, provider_id=INSTANCE, price_micro_usd_per_hour=PRICE)
    terminated = ScalingNodeTerminated(
        action_id=buy.action_id,
        plan_id=PlanId("plan-buy"),
        provider_id=INSTANCE,
        order_action_id=buy.action_id,
        node_name=None,
        terminated_at=end,
    )
    seen = () if listed_as is None else instance(listed_as, at=end, terminated_at=end)
    story = [*decided, TimedFact(launched, T0), *seen]
    story += [TimedFact(terminated, end), TimedFact(NodeInstanceListed(provider_ids=(), listed_at=end), end)]
    again = living(fold(EMPTY_STATE, record(story)))

    bench.record_stories([TimedFact(fact, T0 + 3 * HOUR) for fact in again])
    await bench.tick(T0 + 4 * HOUR)

    (span,) = await bench.spans()
    assert (span.from_at, span.to_at, span.is_final) == (T0, end, True)
    assert span.total_micro_usd == cost_micro_usd(PRICE, 30 * MINUTE)
    assert (span.pool, span.bought_for) == ("gpu", "speech")


async def test_two_trackers_charge_once(bench: Bench) -> None:
    """A slower replica finds the ledger ahead of it and continues from there."""
    bench.record_stories(instance(), listed(T0 + 5 * MINUTE))
    slow = CostTracker(bench.view, bench.store, instances_without_price=bench.metrics.instances_without_price)
    slow.on_folded(record(bench.recorded))
    await slow.on_tick(T0)  # has read the ledger while it was empty
    await bench.tick(T0 + 5 * MINUTE)
    bench.record_stories(listed(T0 + 7 * MINUTE))
    slow.on_folded(record(bench.recorded))
    for seconds in range(3):
        await slow.on_tick(T0 + 7 * MINUTE + seconds * SECOND)
    assert sum(span.total_micro_usd for span in await bench.spans()) == cost_micro_usd(PRICE, 7 * MINUTE)


async def test_span_is_published_until_confirmed(bench: Bench) -> None:
    """After a crash between ledger and stream the next process publishes it; a confirmed span is not repeated."""
    bench.record_stories(instance(), listed(T0 + 5 * MINUTE))
    await bench.tracker.on_tick(T0 + 5 * MINUTE)  # what it returns is never published
    bench.start()
    (again,) = await bench.tick(T0 + 5 * MINUTE)
    assert isinstance(again, CostAccrued)
    assert again == (await bench.spans())[0]
    await bench.echo()
    assert await bench.tick(T0 + 5 * MINUTE) == []


async def test_missing_price_defers_the_charge(bench: Bench) -> None:
    """Counted while the price is unknown; then the whole time is charged, with source and time."""
    bench.record_stories(instance("pending", price=None), listed(T0 + HOUR))
    assert await bench.tick(T0 + HOUR) == []
    assert bench.metrics.instances_without_price._value.get() == 1
    bench.record_stories(instance("running", at=T0 + HOUR), listed(T0 + 2 * HOUR))
    (span,) = await bench.tick(T0 + 2 * HOUR)
    assert isinstance(span, CostAccrued)
    assert (span.total_micro_usd, span.price_source, span.price_at) == (
        2 * PRICE,
        "node.instance_observed.v1",
        T0 + HOUR,
    )
    assert bench.metrics.instances_without_price._value.get() == 0


async def test_deleted_pod_is_charged(bench: Bench) -> None:
    """Bound and deleted between two charges and two processes; its job pays for its GPUs until then."""
    gone = PodGone(epoch=1_700_000_000, version=9, pod_uid=PodUid("uid-a"), namespace="default", name="a")
    bench.record_stories(
        instance(),
        node(),
        job("train"),
        pod("a", on="n", gpus=8, job_id="train", at=T0 + MINUTE),
        (TimedFact(gone, T0 + 2 * MINUTE),),
        listed(T0 + 4 * MINUTE),
    )
    bench.start()
    (span,) = await bench.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    (share,) = span.shares
    assert (share.job_id, share.project_id, share.namespace) == ("train", "research", "default")
    assert share.allocated_micro_usd == pytest.approx(span.total_micro_usd / 4, abs=1)


async def test_node_without_gpus_is_split_by_cpu(bench: Bench) -> None:
    """Half of the CPUs requested: half of the cost allocated."""
    bench.record_stories(instance(), node(gpus=0), pod("a", on="n", gpus=0, cpu=48), listed(T0 + 4 * MINUTE))
    (span,) = await bench.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    assert span.idle_micro_usd == pytest.approx(span.total_micro_usd / 2, abs=1)


async def test_daemonset_pods_are_not_charged(bench: Bench) -> None:
    """They are part of the node's cost."""
    bench.record_stories(instance(), node(), pod("d", on="n", gpus=8, owner_kind="DaemonSet"), listed(T0 + 4 * MINUTE))
    (span,) = await bench.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    assert span.idle_micro_usd == span.total_micro_usd


def summary(minute: int, busy_ratio: float) -> tuple[TimedFact, ...]:
    """Return the summary of the node for this minute, with all GPUs equally busy."""
    gpus = tuple(
        GpuSummary(gpu=str(gpu), gpu_uuid=str(gpu), samples_count=6, utilization_ratio_mean=busy_ratio)
        for gpu in range(8)
    )
    fact = GpuNodeSummarized(
        epoch=1,
        version=minute,
        node_uid=NodeUid("uid-n"),
        node_name="n",
        window_started_at=T0 + minute * MINUTE,
        window_seconds=60.0,
        scrapes_expected_count=6,
        scrapes_answered_count=6,
        gpus=gpus,
    )
    return (TimedFact(fact, T0 + (minute + 1) * MINUTE),)


async def test_used_cost_needs_telemetry(bench: Bench) -> None:
    """Half busy is half used; without a window it is unknown."""
    bench.record_stories(instance(), node(), pod("a", on="n", gpus=8), listed(T0 + MINUTE))
    (first,) = await bench.tick(T0 + MINUTE)
    await bench.echo()
    bench.record_stories(summary(1, 0.5), listed(T0 + 2 * MINUTE))
    (second,) = await bench.tick(T0 + 2 * MINUTE)
    assert isinstance(first, CostAccrued)
    assert isinstance(second, CostAccrued)
    assert first.shares[0].used_micro_usd is None
    assert second.shares[0].used_micro_usd == second.shares[0].allocated_micro_usd // 2


async def test_used_cost_averages_the_minutes_of_a_span(bench: Bench) -> None:
    """A quiet last minute must not make a busy span look idle; a restart from a snapshot keeps the minutes."""
    bench.record_stories(instance(), node(), pod("a", on="n", gpus=8))
    for minute, busy_ratio in enumerate((1.0, 1.0, 1.0, 0.0)):
        bench.record_stories(summary(minute, busy_ratio))
    memory = bench.tracker.encode_memory()
    bench.tracker = CostTracker(bench.view, bench.store, instances_without_price=bench.metrics.instances_without_price)
    bench.tracker.restore_memory(memory)
    bench.record_stories(listed(T0 + 4 * MINUTE))
    (span,) = await bench.tick(T0 + 4 * MINUTE)
    assert isinstance(span, CostAccrued)
    assert span.shares[0].used_micro_usd == span.shares[0].allocated_micro_usd * 3 // 4


async def test_telemetry_of_a_limited_number_of_minutes_is_kept(bench: Bench) -> None:
    """Where the cloud's lists fail for hours, the last minutes stand for the others."""
    bench.record_stories(instance(), node(), pod("a", on="n", gpus=8))
    for minute in range(2 * WINDOWS_COUNT_MAX):
        bench.record_stories(summary(minute, float(minute < WINDOWS_COUNT_MAX)))
    end = T0 + 2 * WINDOWS_COUNT_MAX * MINUTE
    bench.record_stories(listed(end))
    (span,) = await bench.tick(end)
    assert isinstance(span, CostAccrued)
    assert (span.to_at, span.shares[0].used_micro_usd) == (end, 0)


@pytest.mark.parametrize(("instances_count", "seconds"), [(1, 60.0), (100, 60.0), (400, 240.0), (10_000, 600.0)])
def test_spans_of_many_instances_are_longer(instances_count: int, seconds: float) -> None:
    """A hundred spans a minute, whatever the size of the fleet, but none so long that the ledger counts as stale."""
    assert span_seconds(instances_count) == seconds < LEDGER_SECONDS_MAX - 2 * MINUTE.total_seconds()


def instances(ids: Iterable[ProviderId]) -> tuple[TimedFact, ...]:
    """Return the cloud's observations of these instances."""
    (first,) = (item.fact for item in instance())
    assert isinstance(first, NodeInstanceObserved)
    return tuple(TimedFact(msgspec.structs.replace(first, provider_id=provider_id), T0) for provider_id in ids)


async def test_a_tick_publishes_a_limited_number_of_spans(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are charged at once; the others are published when these are confirmed."""
    monkeypatch.setattr("gpu_autoscaler_services.cost_tracker.service.PUBLISHED_COUNT_MAX", 2)
    ids = tuple(ProviderId(f"sim:///a/i-{number}") for number in range(3))
    at = T0 + MINUTE
    bench.record_stories(instances(ids), (TimedFact(NodeInstanceListed(provider_ids=ids, listed_at=at), at),))
    assert len(await bench.tick(at)) == 2
    assert len(await bench.spans()) == 3
    await bench.echo()
    assert len(await bench.tick(at)) == 1


async def test_a_large_fleet_has_few_spans(bench: Bench) -> None:
    """300 instances are charged every three minutes, and to the last micro-dollar when they end."""
    ids = [ProviderId(f"sim:///a/i-{number}") for number in range(300)]
    bench.record_stories(instances(ids))
    for minute in range(1, 7):
        at = T0 + minute * MINUTE
        bench.record_stories((TimedFact(NodeInstanceListed(provider_ids=tuple(ids), listed_at=at), at),))
        await bench.tick(at)
        await bench.echo()
    assert len([fact for fact in bench.published.values() if isinstance(fact, CostAccrued)]) == 2 * len(ids)
    end = T0 + 7 * MINUTE + SECOND
    (last,) = (item.fact for item in instance("terminated", at=end, terminated_at=end))
    assert isinstance(last, NodeInstanceObserved)
    bench.record_stories(
        tuple(TimedFact(msgspec.structs.replace(last, provider_id=provider_id), end) for provider_id in ids)
    )
    await bench.tick(end + SECOND)
    day, *_ = await bench.store.spent_by_period(T0)
    assert day.micro_usd == len(ids) * cost_micro_usd(PRICE, end - T0)


async def test_budget_marks_are_published_once(bench: Bench) -> None:
    """At 80 and 100 percent, also after a restart: the stream has the published marks."""
    bench.record_stories(
        instance(), node(), job("train", budget_limit_micro_usd=PRICE), pod("a", on="n", gpus=8, job_id="train")
    )
    marks: list[float] = []
    for minute in (30, 48, 50, 60, 61):
        at = T0 + minute * MINUTE + SECOND
        bench.record_stories(listed(at))
        crossed = [fact for fact in await bench.tick(at) if isinstance(fact, CostBudgetCrossed)]
        marks += [fact.mark_ratio for fact in crossed]
        bench.record_stories([TimedFact(fact, at) for fact in crossed])
        bench.start()
    assert marks == [0.8, 1.0]


async def test_the_marks_of_a_forgotten_job_are_published(bench: Bench) -> None:
    """It ended while no tracker ran, and its facts left the streams: the store has its budget."""
    (_, queued) = job("train", budget_limit_micro_usd=PRICE)
    assert isinstance(queued.fact, JobQueued)
    await bench.store.accept_job(queued.fact.spec, request_digest="digest", accepted_at=T0)
    bench.record_stories(instance(), node(), pod("a", on="n", gpus=8, job_id="train"), listed(T0 + 50 * MINUTE))

    facts = await bench.tick(T0 + 51 * MINUTE)

    assert [fact.mark_ratio for fact in facts if isinstance(fact, CostBudgetCrossed)] == [0.8]
    # The mark comes first: a process that ends between the two publishes the span again, and looks again.
    assert [type(fact) for fact in facts] == [CostBudgetCrossed, CostAccrued]
    bench.start()
    again = await bench.tick(T0 + 51 * MINUTE)
    assert [fact.condition() for fact in again] == [fact.condition() for fact in facts]


async def test_published_marks_are_forgotten_with_their_jobs(bench: Bench) -> None:
    """The memory grows with the open jobs and the pods that are not charged, not with its age."""
    for number in range(50):
        crossed = CostBudgetCrossed(
            scope="job", scope_id=f"job-{number}", mark_ratio=0.8, spent_micro_usd=8, limit_micro_usd=10, crossed_at=T0
        )
        bench.record_stories([TimedFact(crossed, T0)])
    bench.record_stories(job("job-7"), node(), instance(), pod("a", on="n", gpus=8, job_id="job-9"))

    await bench.tick(T0 + MINUTE)

    memory = msgspec.msgpack.decode(bench.tracker.encode_memory())
    assert sorted(memory["marks_published"]) == ["budget/job/job-7/10/0.8", "budget/job/job-9/10/0.8"]


def test_first_price_stays_for_instance_lifetime() -> None:
    """A later price of the same source does not change the bill."""
    from gpu_autoscaler_services.cost_tracker.bills import Bills  # noqa: PLC0415 - the only test of internals

    bills = Bills()
    later = msgspec.structs.replace(instance("terminating")[0].fact, price_micro_usd_per_hour=1)
    bills.note(record([*instance(), TimedFact(later, T0 + HOUR)]))
    (bill,) = bills.all()
    assert bill.price is not None
    assert bill.price.micro_usd_per_hour == PRICE


async def test_ledger_sums_are_published_daily_and_on_new_stream(bench: Bench) -> None:
    """Spans included in the sums name whose limits they count against."""
    order = purchase("buy", pool="gpu", labels={PROJECT_ID: "speech"})
    bench.record_stories(bought(order), instance(), node(), listed(T0 + HOUR))
    await bench.tick(T0 + HOUR)
    (sums,) = bench.sums
    (span,) = await bench.spans()
    assert (span.pool, span.zone, span.bought_for) == ("gpu", "a", "speech")
    owners = ("cluster", "pool/gpu", "project/speech", "zone/a")
    names = [(period, owner) for period in ("2026-11", "2026-11-21") for owner in owners]
    assert [(entry.period, entry.owner, entry.micro_usd) for entry in sums.spent] == [(*name, PRICE) for name in names]
    assert [(entry.provider_id, entry.until_at) for entry in sums.charged] == [(INSTANCE, T0 + HOUR)]
    bench.record_stories([TimedFact(sums, T0 + HOUR)])
    await bench.tick(T0 + HOUR + MINUTE)
    assert len(bench.sums) == 1
    bench.recorded = [recorded for recorded in bench.recorded if not isinstance(recorded.fact, CostLedgerReported)]
    bench.start()
    await bench.tick(T0 + 2 * HOUR)
    assert bench.sums[1].spent == sums.spent


@pytest.mark.parametrize("has_memory", [False, True])
async def test_ledger_sums_have_open_jobs_after_stream_loss(bench: Bench, *, has_memory: bool) -> None:
    """A new stream has no jobs yet; the store has them, and their budgets count on. The snapshot with the memory of the
    tracker is in the store: it survives."""
    queued = job("train", budget_limit_micro_usd=2 * PRICE)
    spec = next(recorded.fact.spec for recorded in queued if isinstance(recorded.fact, JobQueued))
    await bench.store.accept_job(spec, request_digest="digest", accepted_at=T0)
    bench.record_stories(instance(), node(), queued, pod("a", on="n", gpus=8, job_id="train"), listed(T0 + HOUR))
    await bench.tick(T0 + HOUR)
    bench.record_stories([TimedFact(bench.sums[0], T0 + HOUR)])
    memory = bench.tracker.encode_memory()
    bench.recorded = []
    bench.start()
    if has_memory:
        bench.tracker.restore_memory(memory)
    await bench.tick(T0 + HOUR + MINUTE)
    assert [(entry.job_id, entry.micro_usd) for entry in bench.sums[1].jobs] == [("train", PRICE)]
    await bench.store.finish_job(spec.job_id, outcome="completed", finished_at=T0 + 2 * HOUR)
    bench.start()
    await bench.tick(T0 + 2 * HOUR)
    assert bench.sums[2].jobs == ()
