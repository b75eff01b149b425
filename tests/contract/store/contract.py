"""Contract of every store of record. An implementation inherits StoreContract and provides how to open it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import JobId, PlanId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.store.protocol import Expiry, JobFilter, JobRow, Page, Store

T0 = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)

MIDNIGHT = T0.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
INSTANCES = (ProviderId("sim:///a/i-1"), ProviderId("sim:///a/i-2"))

Open = Callable[[], Awaitable[Store]]


def job(job_id: str = "job-1", project_id: str = "vision") -> JobSpec:
    """Return an accepted job."""
    return JobSpec(
        job_id=JobId(job_id),
        job_name="train",
        project_id=project_id,
        priority=500,
        member_count=1,
        member_resources=Resources(gpu_count=1),
        gpu_model=None,
        gpu_memory_bytes_min=None,
        image="train:1",
        command=("python", "train.py"),
        env={"EPOCHS": "3"},
        workload_type="training",
        is_preemptible=True,
        budget_limit_micro_usd=None,
        duration_seconds_max=3600.0,
        requested_at=T0,
    )


def span(minutes: int, *, provider_id: str = "sim:///a/i-1", job_id: str = "job-1", total: int = 100) -> CostAccrued:
    """Return the minute of an instance that begins `minutes` after T0: three quarters a job's, the rest idle."""
    return CostAccrued(
        provider_id=ProviderId(provider_id),
        node_name="gpu-1",
        instance_type="p4d.24xlarge",
        capacity_type=CapacityType.SPOT,
        from_at=T0 + timedelta(minutes=minutes),
        to_at=T0 + timedelta(minutes=minutes + 1),
        total_micro_usd=total,
        idle_micro_usd=total - total * 3 // 4,
        shares=(CostShare(allocated_micro_usd=total * 3 // 4, used_micro_usd=None, job_id=JobId(job_id)),),
        price_micro_usd_per_hour=6000,
        price_source="scaling.node_launched",
        price_at=T0,
    )


def final(minutes: int, *, provider_id: str = "sim:///a/i-1") -> CostAccrued:
    """Return the last minute of an instance."""
    return msgspec.structs.replace(span(minutes, provider_id=provider_id), is_final=True)


async def roll_up(store: Store, before: datetime) -> None:
    """Merge everything before the UTC day of this instant."""
    after: str | None = ""
    while after is not None:
        after = await store.roll_up(before=before.replace(hour=0, minute=0, second=0, microsecond=0), after=after)


async def delete_one_of_each(store: Store) -> int:
    """Delete a row of each kind that is past its retention."""
    end = T0 + timedelta(days=2)
    expiry = Expiry(ledger_before=end, silent_before=T0, jobs_before=end, plan_age=timedelta(days=3))
    return await store.delete_expired(expiry, count_max=1)


def plan(name: str) -> ScalingPlanMade:
    """Return a plan that does nothing."""
    return ScalingPlanMade(
        plan_id=PlanId(name), plan=Plan(as_of=T0, parent_sequence=0), cut=Cut(), policy_digest="p", core_digest="c"
    )


class StoreContract:
    """The claims. `open_store` opens the same store again each time it is called."""

    @pytest.fixture
    async def store(self, open_store: Open) -> AsyncIterator[Store]:
        """An empty store."""
        store = await open_store()
        yield store
        await store.close()

    async def test_a_job_is_accepted_once(self, store: Store) -> None:
        """The same request again is known; another request under the same id is a conflict and changes nothing."""
        assert await store.accept_job(job(), request_digest="a", accepted_at=T0) == "accepted"
        assert await store.accept_job(job(), request_digest="a", accepted_at=T0) == "same"
        assert await store.accept_job(job(project_id="x"), request_digest="b", accepted_at=T0) == "conflict"
        row = await store.job(JobId("job-1"))
        assert row is not None
        assert (row.spec, row.accepted_at, row.request_digest) == (job(), T0, "a")

    async def test_the_template_of_a_job_is_kept_as_it_was_accepted(self, store: Store) -> None:
        """Byte for byte; of the first request alone, and gone with its job."""
        text = '{"spec":{"containers":[{"name":"main","image":"x","args":["ü"]}]}}'.encode()
        await store.accept_job(job(), request_digest="a", accepted_at=T0, template=text)
        await store.accept_job(job(), request_digest="a", accepted_at=T0, template=b"{}")
        await store.accept_job(job("short"), request_digest="a", accepted_at=T0)
        assert await store.job_template(JobId("job-1")) == text
        assert await store.job_template(JobId("short")) is None
        assert await store.job_template(JobId("unknown")) is None
        await store.finish_job(JobId("job-1"), outcome="completed", finished_at=T0 + timedelta(days=1))
        while await delete_one_of_each(store):
            pass
        assert await store.job(JobId("job-1")) is None
        assert await store.job_template(JobId("job-1")) is None

    @pytest.mark.sweep
    async def test_an_ended_job_is_deleted_however_many_older_ones_are_open(self, store: Store) -> None:
        """More open ones than a cluster's queue: they stay, and what they precede goes."""
        opened = [JobId(f"open-{number}") for number in range(2100)]
        for job_id in opened:
            await store.accept_job(job(job_id), request_digest="a", accepted_at=T0)
        await store.accept_job(job("ended"), request_digest="a", accepted_at=T0)
        await store.finish_job(JobId("ended"), outcome="completed", finished_at=T0 + timedelta(days=1))
        assert await delete_one_of_each(store) == 1
        assert await store.job(JobId("ended")) is None
        assert await store.job(opened[0]) is not None

    async def test_of_two_processes_one_accepts_a_job(self, open_store: Open) -> None:
        """Many at once, through two openings of the same store: each job is accepted exactly once."""
        stores = [await open_store(), await open_store()]
        answers = await asyncio.gather(
            *(
                store.accept_job(job(f"job-{number}"), request_digest="a", accepted_at=T0)
                for number in range(20)
                for store in stores
            )
        )
        assert answers.count("accepted") == 20
        assert answers.count("same") == 20
        for store in stores:
            await store.close()

    async def test_rows_outlive_the_process(self, open_store: Open) -> None:
        """What was committed is there when the store is opened again."""
        first = await open_store()
        await first.accept_job(job(), request_digest="a", accepted_at=T0)
        await first.close()
        second = await open_store()
        assert await second.job(JobId("job-1")) is not None
        await second.close()

    async def test_the_first_final_state_is_kept(self, store: Store) -> None:
        """A job ends once; one that was never accepted does not end."""
        await store.accept_job(job("job-1"), request_digest="a", accepted_at=T0)
        await store.accept_job(job("job-2"), request_digest="a", accepted_at=T0)
        assert await store.finish_job(JobId("job-1"), outcome="completed", finished_at=T0)
        assert await store.finish_job(JobId("job-1"), outcome="failed", finished_at=T0 + timedelta(hours=1))
        assert not await store.finish_job(JobId("nobody"), outcome="failed", finished_at=T0)
        row = await store.job(JobId("job-1"))
        assert row is not None
        assert (row.outcome, row.finished_at) == ("completed", T0)
        assert [row.spec.job_id for row in await store.unfinished_jobs()] == ["job-2"]

    async def test_history_is_read_in_pages_newest_first(self, store: Store) -> None:
        """Pages follow each other without gap or repeat, also while rows are added; the last has no cursor."""
        for number in range(5):
            await store.accept_job(job(f"job-{number}", "a" if number % 2 else "b"), request_digest="a", accepted_at=T0)
        first = await store.jobs(count_max=2)
        await store.accept_job(job("job-9"), request_digest="a", accepted_at=T0)
        second = await store.jobs(count_max=2, cursor=first.next_cursor)
        third = await store.jobs(count_max=2, cursor=second.next_cursor)
        pages = [[row.spec.job_id for row in page.rows] for page in (first, second, third)]
        assert pages == [["job-4", "job-3"], ["job-2", "job-1"], ["job-0"]]
        assert third.next_cursor is None
        assert [row.spec.job_id for row in (await store.jobs(JobFilter(project_id="a"))).rows] == ["job-3", "job-1"]

    async def test_history_is_filtered_and_paged(self, store: Store) -> None:
        """By name, project, user, outcome and time, alone and together; pages hold wanted rows only."""
        for number in range(6):
            name, user = "eval" if number % 2 else 'tr"ain', "anna" if number < 4 else "ben"
            named = replace(job(f"job-{number}", "a"), job_name=name, submitted_by=user)
            await store.accept_job(named, request_digest="a", accepted_at=T0 + number * timedelta(hours=1))
        for job_id, outcome in (("job-1", "failed"), ("job-3", "completed"), ("job-4", "completed")):
            await store.finish_job(JobId(job_id), outcome=outcome, finished_at=T0)  # type: ignore[arg-type]  # from a table
        two_to_five = JobFilter(accepted_from=T0 + timedelta(hours=2), accepted_before=T0 + timedelta(hours=5))
        for wanted, numbers in (
            (JobFilter(job_name="eval"), [5, 3, 1]),
            (JobFilter(job_name='tr"ain'), [4, 2, 0]),
            (JobFilter(job_name="train"), []),
            (JobFilter(submitted_by="anna"), [3, 2, 1, 0]),
            (JobFilter(submitted_by="ben", job_name="eval"), [5]),
            (JobFilter(outcomes=("completed", "failed")), [4, 3, 1]),
            (two_to_five, [4, 3, 2]),
            (replace(two_to_five, project_id="a", job_name="eval", outcomes=("completed",)), [3]),
            (JobFilter(project_id="b", job_name="eval"), []),
        ):
            first = await store.jobs(wanted, count_max=2)
            rest = await store.jobs(wanted, cursor=first.next_cursor) if first.next_cursor else Page[JobRow](rows=())
            assert [row.spec.job_id for row in (*first.rows, *rest.rows)] == [f"job-{number}" for number in numbers]

    async def test_an_invalid_cursor_is_refused(self, store: Store) -> None:
        """An invalid cursor is an error, not an empty page."""
        assert await store.first_charged_at() is None
        with pytest.raises(ValueError, match="invalid cursor"):
            await store.jobs(cursor="1; DROP TABLE jobs")
        with pytest.raises(ValueError, match="invalid cursor"):
            await store.jobs(cursor="9" * 30)

    async def test_a_plan_is_recorded_once_and_whole(self, store: Store) -> None:
        """Plans come back as they were published."""
        assert await store.record_plan(plan("p1"), made_at=T0)
        assert not await store.record_plan(plan("p1"), made_at=T0)
        assert await store.record_plan(plan("p2"), made_at=T0)
        row = await store.plan(PlanId("p1"))
        assert row is not None
        assert row.fact == plan("p1")
        assert await store.plan(PlanId("p3")) is None
        assert [row.fact.plan_id for row in (await store.plans()).rows] == ["p2", "p1"]

    async def test_a_span_is_charged_once(self, store: Store) -> None:
        """A repeat, even with another amount, changes neither the ledger nor the totals."""
        assert await store.charge([span(0), span(1)]) == 2
        assert await store.charge([span(1, total=500), span(2)]) == 1
        rows = (await store.ledger(provider_id=ProviderId("sim:///a/i-1"))).rows
        assert rows == (span(2), span(1), span(0))
        assert await store.spent_by_job() == {"job-1": 225}

    async def test_the_ledger_returns_how_far_each_instance_is_charged(self, store: Store) -> None:
        """A restarted tracker continues exactly where the last one stopped."""
        await store.charge([span(0), span(1, total=101), span(0, provider_id="sim:///a/i-2", job_id="job-2")])
        charges = await store.last_charges()
        first = charges[ProviderId("sim:///a/i-1")]
        assert (first.last, first.from_at, first.total_micro_usd) == (span(1, total=101), T0, 201)
        assert charges[ProviderId("sim:///a/i-2")].total_micro_usd == 100
        assert await store.spent_by_job() == {"job-1": 150, "job-2": 75}

    async def test_the_ledger_is_added_up_by_day_and_month(self, store: Store) -> None:
        """For the cluster, and for each whose limit a span counts against; a repeat changes nothing."""
        of_pool = msgspec.structs.replace(span(1), pool="gpu")
        await store.charge([span(0), of_pool])
        await store.charge([of_pool])
        names = [(T0.strftime("%Y-%m"), "cluster", 200), (T0.strftime("%Y-%m"), "pool/gpu", 100)]
        names += [(T0.strftime("%Y-%m-%d"), "cluster", 200), (T0.strftime("%Y-%m-%d"), "pool/gpu", 100)]
        sums = [(each.period, each.owner, each.micro_usd) for each in await store.spent_by_period(T0)]
        assert sums == names
        assert list(await store.spent_by_period(T0 + timedelta(days=40))) == []

    async def test_a_charge_is_whole_or_not_at_all(self, store: Store) -> None:
        """Spans of one call are one transaction."""
        broken = msgspec.structs.replace(span(1), shares=(object(),))
        with pytest.raises(TypeError, match="object"):
            await store.charge([span(0), broken])
        assert (await store.ledger()).rows == ()

    async def test_a_charge_waits_for_the_word_that_the_stream_has_it(self, store: Store) -> None:
        """What a crash kept from the stream is known afterwards, oldest first."""
        await store.charge([span(0), span(1), span(2)])
        await store.confirm_charge(span(1))
        assert list(await store.unconfirmed_charges(10)) == [span(0), span(2)]
        assert list(await store.unconfirmed_charges(1)) == [span(0)]

    async def test_a_request_is_answered_once(self, store: Store) -> None:
        """The first claim of a key is free; a repeat gets the claim, later the answer."""
        assert await store.begin_request("k", request_digest="a", started_at=T0) is None
        held = await store.begin_request("k", request_digest="b", started_at=T0 + timedelta(seconds=1))
        assert held is not None
        assert (held.request_digest, held.status, held.started_at) == ("a", None, T0)
        await store.answer_request("k", status=202, answer=b"{}")
        answered = await store.begin_request("k", request_digest="a", started_at=T0)
        assert answered is not None
        assert (answered.status, answered.answer) == (202, b"{}")

    async def test_old_requests_are_forgotten(self, store: Store) -> None:
        """Keys do not pile up for ever, and a forgotten one is free again."""
        await store.begin_request("old", request_digest="a", started_at=T0)
        await store.begin_request("new", request_digest="a", started_at=T0 + timedelta(days=1))
        assert await store.delete_requests(T0 + timedelta(hours=1)) == 1
        assert await store.begin_request("old", request_digest="b", started_at=T0) is None
        assert await store.begin_request("new", request_digest="b", started_at=T0) is not None

    async def test_a_snapshot_comes_back_as_it_was_kept(self, open_store: Open) -> None:
        """Byte for byte, by another process, the last one first; bodies only for those who ask."""
        first, second = await open_store(), await open_store()
        await first.save_snapshot(label=b"one", body=bytes(range(256)), saved_at=T0)
        await first.save_snapshot(label=b"\x00\xff", body=b"", saved_at=T0 + timedelta(minutes=3))
        rows = await second.snapshots()
        assert [(row.label, row.saved_at) for row in rows] == [(b"\x00\xff", T0 + timedelta(minutes=3)), (b"one", T0)]
        assert [await second.snapshot_body(row.number) for row in rows] == [b"", bytes(range(256))]
        await first.close()
        await second.close()

    async def test_a_forgotten_snapshot_is_gone_and_its_number_with_it(self, store: Store) -> None:
        """Only the named ones are deleted; deleting twice is no error; numbers are not reused."""
        for label in (b"one", b"two"):
            await store.save_snapshot(label=label, body=label, saved_at=T0)
        newest, oldest = await store.snapshots()
        await store.delete_snapshots([newest.number])
        await store.delete_snapshots([newest.number])
        assert await store.snapshots() == [oldest]
        assert await store.snapshot_body(newest.number) is None
        await store.save_snapshot(label=b"three", body=b"three", saved_at=T0)
        assert (await store.snapshots())[0].number > newest.number

    async def test_snapshots_of_a_service_are_its_own(self, store: Store) -> None:
        """Those of the whole state are without a name, and neither sees the other."""
        await store.save_snapshot(label=b"state", body=b"1", saved_at=T0)
        await store.save_snapshot(label=b"memory", body=b"2", saved_at=T0, service="cost_tracker")
        assert [row.label for row in await store.snapshots()] == [b"state"]
        assert [row.label for row in await store.snapshots("cost_tracker")] == [b"memory"]

    async def test_old_days_are_merged_to_one_row_with_the_same_sums(self, store: Store) -> None:
        """Whole days before the limit, an instance and day a row; shares by user, unknown use apart from known. Pages,
        charges and sums are those from before."""
        used = CostShare(allocated_micro_usd=70, used_micro_usd=30, job_id=JobId("job-1"))
        spans = [span(minutes) for minutes in range(0, 60 * 60, 30)]  # from noon: three days
        spans[1] = msgspec.structs.replace(spans[1], shares=(used,), idle_micro_usd=30)
        other = [span(0, provider_id="sim:///a/i-2", job_id="job-2"), final(1, provider_id="sim:///a/i-2")]
        await store.charge([*spans, *other])
        for each in (*spans, *other):
            await store.confirm_charge(each)
        charges, periods = await store.last_charges(INSTANCES), await store.spent_by_period(T0)
        await roll_up(store, T0 + timedelta(days=2))

        rows = (await store.ledger(provider_id=ProviderId("sim:///a/i-1"))).rows
        assert [row for row in rows if row.from_at >= MIDNIGHT + timedelta(days=1)] == spans[:71:-1]
        second, first = rows[-2:]
        assert (first.from_at, first.to_at) == (T0, spans[23].to_at)
        assert (second.from_at, second.to_at) == (spans[24].from_at, spans[71].to_at)
        assert (first.total_micro_usd, first.idle_micro_usd) == (2400, 30 + 23 * 25)
        assert first.shares == (msgspec.structs.replace(spans[0].shares[0], allocated_micro_usd=23 * 75), used)
        begins = [MIDNIGHT - timedelta(days=1), MIDNIGHT, MIDNIGHT + timedelta(days=1), MIDNIGHT + timedelta(days=2)]
        counts = []
        for begin, end in pairwise(begins):  # each is in one day, merged or not
            found = await store.charges_between(begin, end, count_max=1000)
            counts.append(len(found))
            assert sorted(found, key=repr) == sorted(
                (row for row in (await store.ledger(count_max=1000)).rows if begin <= row.from_at < end), key=repr
            )
        assert counts == [3, 1, 48]
        assert len(await store.charges_between(begins[0], begins[-1], count_max=2)) == 2
        assert await store.first_charged_at() == begins[0]
        assert await store.last_charges(INSTANCES) == charges
        assert await store.spent_by_period(T0) == periods
        assert await store.spent_by_job() == {"job-1": 75 * len(spans) - 5 + 75, "job-2": 75}
        every = (await store.ledger(count_max=1000)).rows
        assert sum(row.total_micro_usd for row in every) == 100 * len(spans) + 200
        paged: list[CostAccrued] = []
        cursor: str | None = None
        while True:
            page = await store.ledger(count_max=7, cursor=cursor)
            paged += page.rows
            if (cursor := page.next_cursor) is None:
                break
        assert tuple(paged) == every

    async def test_a_merged_span_is_not_charged_again(self, store: Store) -> None:
        """A tracker that slept for days repeats it: nothing is added."""
        spans = [span(minutes) for minutes in (0, 1, 2)]
        await store.charge(spans)
        for each in spans:
            await store.confirm_charge(each)
        await roll_up(store, T0 + timedelta(days=2))
        assert await store.charge(spans) == 0
        assert (await store.spent_by_job(), await store.charge([span(3)])) == ({"job-1": 225}, 1)

    async def test_unconfirmed_spans_are_not_merged(self, store: Store) -> None:
        """The stream may not have them."""
        await store.charge([span(0), span(1), span(2)])
        await roll_up(store, T0 + timedelta(days=2))
        assert list(await store.unconfirmed_charges(10)) == [span(0), span(1), span(2)]
        assert len((await store.ledger()).rows) == 3

    async def test_jobs_past_their_retention_are_deleted_with_their_spend(self, store: Store) -> None:
        """Counted from their end, in small parts. One without an end stays; a deleted id can be used again."""
        ends = {"old-1": 1, "open": None, "new": 3, "old-2": 1}
        for minute, (name, days) in enumerate(ends.items()):
            await store.accept_job(job(name), request_digest="a", accepted_at=T0)
            await store.charge([span(minute, job_id=name)])
            if days is not None:
                end = T0 + timedelta(days=days)
                await store.finish_job(JobId(name), outcome="completed", finished_at=end)
        assert await delete_one_of_each(store) == 1
        assert len((await store.jobs()).rows) == 3
        while await delete_one_of_each(store):
            pass
        assert [row.spec.job_id for row in (await store.jobs()).rows] == ["new", "open"]
        assert set(await store.spent_by_job()) == {"new", "open"}
        assert await store.accept_job(job("old-1"), request_digest="b", accepted_at=T0) == "accepted"

    async def test_merged_spans_and_plans_past_their_retention_are_deleted(self, store: Store) -> None:
        """In small parts; the last plan is always kept, however old it is."""
        spans = [span(minutes) for minutes in range(0, 5 * 24 * 60, 120)]
        await store.charge(spans)
        for each in spans:
            await store.confirm_charge(each)
        for days in range(6):
            await store.record_plan(plan(f"p{days}"), made_at=T0 + timedelta(days=days))
        await roll_up(store, T0 + timedelta(days=9))
        assert await delete_one_of_each(store) == 1
        while await delete_one_of_each(store):
            pass
        assert [row.fact.plan_id for row in (await store.plans()).rows] == ["p5", "p4", "p3", "p2"]
        assert min(row.from_at for row in (await store.ledger()).rows) == T0 + timedelta(hours=36)
        await store.reclaim_space(T0 + timedelta(days=9), T0 + timedelta(days=7))
        assert await store.charge([final(5 * 24 * 60)]) == 1
