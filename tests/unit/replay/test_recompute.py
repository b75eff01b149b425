"""A recorded plan is recomputed from its facts byte for byte; each obstacle has its own verdict."""

from collections.abc import AsyncIterator, Collection
from datetime import timedelta

import msgspec
import pytest
from tests.support.braked_fleet import BROKE, BrakedFleet, forced
from tests.support.memory_bus import MemoryBus
from tests.support.stories import HOUR, MINUTE, T0, TimedFact, given, job, node, on_sale, policy, synced
from tests.support.timed_facts import Story, record

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.streams import BusDeclaration, StreamLimits, streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.catalog import FACTS, OneJobFact
from gpu_autoscaler.events.envelope import encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.replay.recompute import Verdict, find_start, recompute
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.snapshot_codec import Label, StreamMark, decode_label, encode_snapshot, fact_types
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables

PLAN = "plan-of-the-test"
AS_OF = T0 + HOUR
STORIES: tuple[Story, ...] = (on_sale(at=T0), node("n1", at=T0), job("j1", gpus=8, at=T0 + MINUTE), job("j2", gpus=8))


class Wall:
    """Wall time that the test advances. No fact of a test is ahead of it: `recorded` would date it back."""

    now = AS_OF


@pytest.fixture
def wall() -> Wall:
    """The broker's clock."""
    return Wall()


@pytest.fixture
async def bus(wall: Wall) -> AsyncIterator[MemoryBus]:
    """A broker that keeps jobs for an hour."""
    limits = {"JOB": StreamLimits(max_age_seconds=3600, max_bytes=1 << 20)}
    opened = MemoryBus(MemoryBroker(), BusDeclaration(streams=streams(limits)), now=lambda: wall.now)
    await opened.ensure()
    yield opened
    await opened.close()


async def _tell(bus: MemoryBus, facts: Story) -> dict[str, int]:
    """Publish facts; return the last sequence of each stream."""
    last: dict[str, int] = {}
    for recorded in record(facts):
        envelope = recorded.envelope
        ack = await bus.publish(recorded.fact.subject(), encode(envelope), message_id=envelope.id)
        last[ack.stream] = ack.sequence
    return last


async def _made(bus: MemoryBus, **changes: object) -> ScalingPlanMade:
    """The situation and the plan that it leads to, on the record; `changes` falsify the plan's fact."""
    told = tuple(each for story in STORIES for each in story)
    last = await _tell(bus, (*told, *synced(told, as_of=AS_OF)))
    made = plan(given(*STORIES, as_of=AS_OF), DEFAULT_POLICY, AS_OF)
    assert made.decisions, "a plan that decides nothing would prove little"
    fact = ScalingPlanMade(
        plan_id=PlanId(PLAN),
        plan=made,
        cut=Cut(last_sequences=tuple(sorted(last.items()))),
        policy_digest=policy_digest(DEFAULT_POLICY),
        core_digest=core_digest(),
    )
    fact = msgspec.structs.replace(fact, **changes)
    await _tell(bus, (TimedFact(fact, AS_OF),))
    return fact


async def test_a_plan_is_recomputed_byte_for_byte(bus: MemoryBus) -> None:
    """Only facts up to the cut count, whatever happened since."""
    await _made(bus)
    await _tell(bus, job("later", at=AS_OF))

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock())

    assert found.verdict is Verdict.EQUAL, found
    assert found.facts_count > 5


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_plan_that_holds_removals_is_recomputed(bus: MemoryBus, *, resumes: bool) -> None:
    """The first trips the brake; the next one holds what it held, or removes as many after a resume."""
    world = BrakedFleet(BROKE)
    for number in range(10):
        world.add(f"n{number}")
    tripping = world.plan()
    if resumes:
        world.resume()
    world.plan()
    cut: dict[str, int] = {}
    made: list[ScalingPlanMade] = []
    for entry in world.facts:
        fact = entry.fact
        if isinstance(fact, ScalingPlanMade):
            last = Cut(last_sequences=tuple(sorted(cut.items())))
            fact = msgspec.structs.replace(
                fact, cut=last, policy_digest=policy_digest(BROKE), core_digest=core_digest()
            )
            made.append(fact)
        cut |= await _tell(bus, (TimedFact(fact, entry.envelope.time),))
    made = made[-2:]  # the others bought the nodes
    verdicts = [(await recompute(bus, fact.plan_id, BROKE, Clock())).verdict for fact in made]

    assert tripping.brake is not None
    assert verdicts == [Verdict.EQUAL, Verdict.EQUAL]
    assert [len(forced(fact.plan)) for fact in made] == [3, 3 if resumes else 0]


async def test_dead_letters_of_the_cut_stay_excluded(bus: MemoryBus) -> None:
    """A message that was a dead letter when the plan was made does not count now."""
    await _tell(bus, job("a-dead-letter", gpus=4))
    aside = tuple(("JOB", sequence) for sequence in range(1, await bus.last_sequence("JOB") + 1))
    fact = await _made(bus)
    assert (await recompute(bus, PLAN, DEFAULT_POLICY, Clock())).verdict is Verdict.DIFFERS

    knowing = msgspec.structs.replace(
        fact, plan_id=PlanId("knowing"), cut=msgspec.structs.replace(fact.cut, set_aside=aside)
    )
    await _tell(bus, (TimedFact(knowing, AS_OF),))

    assert (await recompute(bus, "knowing", DEFAULT_POLICY, Clock())).verdict is Verdict.EQUAL


async def test_a_different_plan_shows_the_differing_lines(bus: MemoryBus) -> None:
    """Exit 1 with the lines that differ."""
    true = plan(given(*STORIES, as_of=AS_OF), DEFAULT_POLICY, AS_OF)
    await _made(bus, plan=msgspec.structs.replace(true, decisions=true.decisions[1:]))

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock())

    assert found.verdict is Verdict.DIFFERS
    assert any(line.startswith("+") and "action_id" in line for line in found.difference)


async def test_expired_facts_are_named(bus: MemoryBus, wall: Wall) -> None:
    """The sentence names the stream and the first sequence kept."""
    await _made(bus)
    wall.now += 2 * HOUR
    await _tell(bus, job("later", at=AS_OF))

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock())

    assert found.verdict is Verdict.FACTS_EXPIRED
    assert "JOB" in found.sentence


async def _snapshot(
    bus: MemoryBus, tables: Tables, *, core: str = "", base: str = "", without: Collection[type[Fact]] = ()
) -> str:
    """Save a snapshot of everything that is in the streams now, and return its checksum. `without`: fact types that
    its version did not know."""
    marks, recorded = [], []
    for spec in streams():
        facts = [fact for fact in FACTS if fact.stream() == spec.name and fact not in without]
        span = await bus.span(spec.name)
        async for batch in History(bus, Clock()).read(spec.name, facts):
            recorded += [stored.recorded for stored in batch]
        if facts and spec.name != "COST":
            marks.append(StreamMark(stream=spec.name, created_at=span.created_at, last_sequence=span.last_sequence))
    label = Label(
        core_digest=core or core_digest(),
        fact_types=fact_types(
            fact for fact in FACTS if fact.stream() != "COST" and fact not in (GpuNodeSampled, *without)
        ),
        marks=tuple(marks),
        base=base,
    )
    state = fold(EMPTY_STATE, recorded)
    if core:  # each version folds in its own way: the other one keeps no jobs
        state = msgspec.structs.replace(state, jobs={})
    sealed, body = encode_snapshot(label, state)
    await MemoryStore(tables).save_snapshot(label=sealed, body=body, saved_at=Wall.now)
    return _label(sealed).checksum


def _label(sealed: bytes) -> Label:
    label = decode_label(sealed)
    assert isinstance(label, Label)
    return label


async def _aged(bus: MemoryBus, wall: Wall, tables: Tables, *, core: str = "") -> None:
    """Expire the facts: the jobs are only in a snapshot, and of the plan's facts only the last job is left."""
    told = tuple(each for story in STORIES for each in story)
    last = await _tell(bus, told)
    await _snapshot(bus, tables, core=core)
    wall.now += timedelta(minutes=50)
    later = job("late", gpus=1, at=AS_OF)
    last |= await _tell(bus, (*later, *synced((*told, *later), as_of=AS_OF)))
    fact = ScalingPlanMade(
        plan_id=PlanId(PLAN),
        plan=plan(given(*STORIES, later, as_of=AS_OF), DEFAULT_POLICY, AS_OF),
        cut=Cut(last_sequences=tuple(sorted(last.items()))),
        policy_digest=policy_digest(DEFAULT_POLICY),
        core_digest=core_digest(),
    )
    await _tell(bus, (TimedFact(fact, AS_OF),))
    await _tell(bus, job("after", at=AS_OF))
    await _snapshot(bus, tables)  # unusable: it contains facts unknown to the plan
    wall.now += timedelta(minutes=30)


async def test_a_snapshot_replaces_expired_facts(bus: MemoryBus, wall: Wall) -> None:
    """The nearest one below the plan's cut, and the facts from there to the cut; the sentence says so."""
    tables = Tables()
    await _aged(bus, wall, tables)

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock(), MemoryStore(tables))

    assert found.verdict is Verdict.EQUAL, found
    assert "from the snapshot of " in found.sentence
    assert 0 < found.facts_count < 10


async def test_a_missing_snapshot_is_explained(bus: MemoryBus, wall: Wall) -> None:
    """No store, no snapshot, or only snapshots of another core."""
    tables = Tables()
    await _aged(bus, wall, tables, core="another")

    for store, phrase in (
        (None, "no store is configured"),
        (MemoryStore(Tables()), "no snapshot replaces them: none of 0 is below the plan's cut"),
        (MemoryStore(tables), "no snapshot replaces them: none of 2 is below the plan's cut and leads to it"),
    ):
        found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock(), store)
        assert found.verdict is Verdict.FACTS_EXPIRED
        assert "facts have expired (JOB: the first sequence kept is " in found.sentence
        assert phrase in found.sentence


async def _continued(bus: MemoryBus, tables: Tables, *, without: Collection[type[Fact]] = ()) -> ScalingPlanMade:
    """A plan of this version, which continued a snapshot of another one. That one kept no job; the facts of types that
    it did not know were read when this version started."""
    told = tuple(each for story in STORIES for each in story)
    await _tell(bus, told)
    base = await _snapshot(bus, tables, core="another", without=without)
    later = job("late", gpus=1, at=AS_OF)
    await _tell(bus, (*later, *synced((*told, *later), as_of=AS_OF)))
    read = tuple(each for each in told if not isinstance(each.fact, OneJobFact) or type(each.fact) in without)
    fact = ScalingPlanMade(
        plan_id=PlanId(PLAN),
        plan=plan(given(read, later, as_of=AS_OF), DEFAULT_POLICY, AS_OF),
        cut=await _cut(bus, base),
        policy_digest=policy_digest(DEFAULT_POLICY),
        core_digest=core_digest(),
    )
    await _tell(bus, (TimedFact(fact, AS_OF),))
    return fact


async def _cut(bus: MemoryBus, base: str) -> Cut:
    """Everything that is in the streams now."""
    folded = sorted({fact.stream() for fact in FACTS} - {"COST"})
    last = {stream: await bus.last_sequence(stream) for stream in folded}
    return Cut(last_sequences=tuple((stream, sequence) for stream, sequence in last.items() if sequence), base=base)


async def test_a_plan_is_recomputed_from_the_snapshot_that_its_state_continued(bus: MemoryBus) -> None:
    """Although no fact has expired: this version would fold the first ones in another way."""
    tables = Tables()
    await _continued(bus, tables)

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock(), MemoryStore(tables))

    assert found.verdict is Verdict.EQUAL, found
    assert "from the snapshot of " in found.sentence


async def test_a_lost_base_is_named(bus: MemoryBus) -> None:
    """Whole streams lead to another plan, which is no proof of a bug."""
    await _continued(bus, Tables())

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock(), MemoryStore(Tables()))

    assert found.verdict is Verdict.FACTS_EXPIRED
    assert "the state continued snapshot " in found.sentence
    assert "none of 0 is below the plan's cut and leads to it" in found.sentence


async def test_facts_of_added_types_belong_to_the_state_that_is_continued(bus: MemoryBus) -> None:
    """The live process read them when it started."""
    tables = Tables()
    await _continued(bus, tables, without=(JobQueued,))

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock(), MemoryStore(tables))

    assert found.verdict is Verdict.EQUAL, found


async def test_a_snapshot_of_another_descent_is_not_used(bus: MemoryBus) -> None:
    """However near it is; one that continued the same base is."""
    tables, history = Tables(), History(bus, Clock())
    first = await _continued(bus, tables)
    await _snapshot(bus, tables)
    later = msgspec.structs.replace(first, cut=await _cut(bus, first.cut.base))

    assert (await find_start(history, later, MemoryStore(tables))).state.jobs == {}

    await _snapshot(bus, tables, base=first.cut.base)
    start = await find_start(history, later, MemoryStore(tables))
    assert (start.missing, len(start.state.jobs)) == ("", 3)


async def test_another_core_is_reported_without_comparing(bus: MemoryBus) -> None:
    """With another core an equal plan proves nothing."""
    await _made(bus, core_digest="another", service_version="0.0.1")

    found = await recompute(bus, PLAN, DEFAULT_POLICY, Clock())

    assert found.verdict is Verdict.CORE_CHANGED
    assert "0.0.1" in found.sentence


async def test_another_policy_is_reported_without_comparing(bus: MemoryBus) -> None:
    """The recorded policy is required."""
    await _made(bus)

    found = await recompute(bus, PLAN, policy(idle_seconds_max=1.0), Clock())

    assert found.verdict is Verdict.POLICY_CHANGED


async def test_an_unknown_plan_is_reported(bus: MemoryBus) -> None:
    """With and without other plans in the stream."""
    assert (await recompute(bus, PLAN, DEFAULT_POLICY, Clock())).verdict is Verdict.UNKNOWN_PLAN
    await _made(bus)
    assert (await recompute(bus, "nobody", DEFAULT_POLICY, Clock())).verdict is Verdict.UNKNOWN_PLAN
