"""No more nodes are removed by force within an hour than the policy allows; the others wait for a person."""

import pytest
from msgspec.structs import replace
from tests.support.braked_fleet import BROKE, BrakedFleet, braked, forced, noticed
from tests.support.stories import HOUR, MINUTE, T0, TimedFact, given, instance, policy, purchase

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.intake.directives import BRAKE_RELEASES_COUNT_MAX
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.forced_removals import removed_by_force, tripped_brake
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.policy import PolicyDirectiveLifted
from gpu_autoscaler.model.decisions import DrainNode, ForcedRemoval, Plan
from gpu_autoscaler.model.directives import BRAKE
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.money import MICRO_USD_PER_USD as USD
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped, Frozen
from gpu_autoscaler.model.reasons.drain import NodeIdle, NodeOrphaned


def fleet(count: int, rules: ScalingPolicy = BROKE, **details: object) -> BrakedFleet:
    """A fleet of this number of nodes with work."""
    made = BrakedFleet(rules)
    for number in range(count):
        made.add(f"n{number:02}", **details)  # type: ignore[arg-type]
    return made


# Every unhealthy node may go at once, as far as other rules are concerned.
HEALTH = policy(removal=RemovalPolicy(expire_seconds_max=None, unhealthy_nodes_ok_count=100), disruption_ratio_max=1.0)


def silent_fleet(count: int, rules: ScalingPolicy, *, usd: float | None = 10.0) -> BrakedFleet:
    """Nodes with work that have been silent for too long, and as many empty ones for the work."""
    world = BrakedFleet(rules)
    for number in range(count):
        world.add(f"n{number:02}", usd=usd)
        world.silence(f"n{number:02}")
        world.add(f"spare-{number:02}", has_work=False, usd=usd)
    world.now += 21 * MINUTE
    return world


def held(made: Plan) -> list[str]:
    """What the brake holds."""
    return [deferral.subject for deferral in made.deferred if isinstance(deferral.reason, BrakeTripped)]


# ---- limits


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (10, {}, 3),  # a fifth would be two; three are always allowed
        (30, {}, 6),
        (31, {}, 7),  # rounded up
        (30, {"nodes_ratio_max": 0.0, "nodes_ok_count": 0}, 0),
        (10, {"nodes_ratio_max": 0.0}, 3),
        (10, {"nodes_ratio_max": 1.0, "nodes_ok_count": 0}, 10),
        (10, {"nodes_ratio_max": 1.0, "price_micro_usd_per_hour_max": 45 * USD}, 4),
        (10, {"price_micro_usd_per_hour_max": 0}, 0),
        (10, {"is_on": False, "price_micro_usd_per_hour_max": 0}, 10),
    ],
)
def test_removals_by_force_stop_at_the_limits(count: int, settings: dict[str, float], expected: int) -> None:
    """The rest is deferred, each with the trip as its reason."""
    world = fleet(count, braked(BROKE, **settings))
    made = world.plan()

    assert len(forced(made)) == expected
    assert len(held(made)) == count - expected
    assert (made.brake is None) == (expected == count)


def test_the_trip_names_what_was_exceeded() -> None:
    """With the figures of the hour and the next step."""
    by_nodes = fleet(10).plan().brake
    by_price = fleet(10, braked(BROKE, nodes_ratio_max=1.0, price_micro_usd_per_hour_max=45 * USD)).plan().brake

    assert by_nodes == BrakeTripped(
        tripped_at=T0, node="n03", nodes_count=3, nodes_count_max=3, price_micro_usd_per_hour=40 * USD,
        price_micro_usd_per_hour_max=1000 * USD, is_of_price=False,
    )  # fmt: skip
    assert by_nodes is not None
    assert by_price is not None
    assert "3 nodes were removed by force" in by_nodes.sentence()
    assert "limit of 3 nodes" in by_nodes.sentence()
    assert "gpu-autoscaler resume brake" in by_nodes.remedy()
    assert "$50.00" in by_price.sentence()
    assert "price_micro_usd_per_hour_max" in by_price.remedy()


def test_an_unknown_price_counts_as_the_highest_known_one() -> None:
    """A third node of an unknown price may cost 30 USD, which with the two before would be 90."""
    world = silent_fleet(4, braked(HEALTH, nodes_ratio_max=1.0, price_micro_usd_per_hour_max=85 * USD), usd=None)
    world.add("known", usd=30.0, has_work=False, created_at=world.now)
    made = world.plan()
    marks = [drain.forced for drain in made.drains if not drain.is_voluntary]

    assert marks == [ForcedRemoval(price_micro_usd_per_hour=30 * USD)] * 2
    assert len(held(made)) == 2
    assert made.brake is not None
    assert made.brake.price_micro_usd_per_hour == 90 * USD


def test_without_any_known_price_nothing_is_forced() -> None:
    """It cannot be shown that the limit is kept: unknown is not zero."""
    made = silent_fleet(1, HEALTH, usd=None).plan()

    assert forced(made) == []
    assert made.brake is not None
    assert "price is unknown" in made.brake.sentence()


# ---- what is by force


def test_nodes_without_work_are_neither_counted_nor_held() -> None:
    """They end no work; with a budget that is exceeded, all of them go."""
    world = fleet(10, has_work=False)
    world.add("busy-1")
    made = world.plan()

    assert len(forced(made)) == 11
    assert [drain.forced is not None for drain in made.drains].count(True) == 1
    assert made.brake is None


def test_notices_go_on() -> None:
    """The cloud ends these nodes in any case."""
    world = fleet(10)
    world.plan()
    for name in ("n05", "n06", "n07", "n08"):
        world.notice(name)
    made = world.plan()

    assert noticed(made) == ["n05", "n06", "n07", "n08"]
    assert forced(made) == []
    assert all(drain.forced is None for drain in made.drains)


def test_a_node_that_a_user_deletes_goes_on() -> None:
    """A person has decided on this node; it counts for nothing."""
    world = fleet(10)
    world.plan()
    before = world.state.nodes[NodeUid("uid-n09")]
    world.fact(replace(before, version=2, deleting_since=T0, has_finalizer=True))
    (drain,) = (each for each in world.plan().decisions if isinstance(each, DrainNode))

    assert (drain.node_name, drain.is_voluntary, drain.forced) == ("n09", False, None)


def test_idle_nodes_leave_while_the_brake_holds() -> None:
    """A removal by choice ends no work."""
    rules = braked(policy(removal=RemovalPolicy(expire_seconds_max=None)), nodes_ratio_max=0.0, nodes_ok_count=0)
    world = BrakedFleet(rules)
    for number in range(12):
        world.add(f"n{number:02}", has_work=number > 0)
    world.silence("n05")
    world.now += 30 * MINUTE
    made = world.plan()

    assert made.brake is not None
    assert [drain.node_name for drain in made.decisions if isinstance(drain.reason, NodeIdle)] == ["n00"]


def test_an_instance_whose_node_is_unknown_counts() -> None:
    """After the loss of all records every instance looks orphaned: only a few are ended."""
    rules = policy()
    now = T0 + HOUR
    orphans = [instance(purchase(f"buy-{number}"), at=T0) for number in range(9)]
    state = given(*orphans, as_of=now)
    made = plan(state, rules, now)
    released = made.releases

    assert check(made, state, rules) == ()
    assert len(released) == 3
    assert all(isinstance(each.reason, NodeOrphaned) and each.forced is not None for each in released)
    assert len(held(made)) == 6


def test_no_replacement_is_bought_for_a_node_that_stays() -> None:
    """It would be paid for as long as nobody resumes."""
    rules = braked(policy(removal=RemovalPolicy(expire_seconds_max=None)), nodes_ratio_max=0.0, nodes_ok_count=0)
    world = fleet(4, rules)
    world.silence("n01")
    world.now += 30 * MINUTE
    made = world.plan()

    assert made.decisions == ()
    assert held(made) == ["node/uid-n01"]


def test_nothing_trips_under_a_freeze() -> None:
    """The freeze defers the removals itself."""
    made = fleet(10, replace(BROKE, is_frozen=True)).plan()

    assert made.brake is None
    assert {type(deferral.reason) for deferral in made.deferred} == {Frozen}


# ---- the latch


def test_the_brake_holds_after_its_hour() -> None:
    """Nothing but a person ends it."""
    world = fleet(10)
    tripped = world.plan().brake
    for _ in range(3):
        world.now += HOUR
        made = world.plan()

        assert forced(made) == []
        assert made.brake == tripped


def test_what_a_resume_releases_counts_anew() -> None:
    """Of ten, three go with each step; what went before a resume is no cause of the next trip."""
    world = fleet(10)
    counts = [len(forced(world.plan()))]
    while tripped_brake(world.state) is not None:
        world.now += MINUTE
        world.resume()
        counts.append(len(forced(world.plan())))

    assert counts == [3, 3, 3, 1]
    assert world.plans[-1].brake is None
    assert len(removed_by_force(world.state, world.now)) == 1


def test_removals_leave_the_count_after_an_hour() -> None:
    """Three each hour go on for ever without a trip; a fourth within the hour is one too many."""
    world = silent_fleet(3, HEALTH)
    first = world.plan()
    world.now += 40 * MINUTE
    for name in ("m1", "m2", "m3", "m4"):
        world.add(name, created_at=world.now)
    for name in ("m1", "m2", "m3"):
        world.silence(name)
    world.now += 20 * MINUTE
    for name in ("m1", "m2", "m3", "m4"):
        world.add(f"spare-{name}", has_work=False, created_at=world.now)
    second = world.plan()
    world.silence("m4")
    world.now += 20 * MINUTE
    third = world.plan()

    assert (len(forced(first)), len(forced(second)), forced(third)) == (3, 3, [])
    assert second.brake is None
    assert third.brake is not None
    assert third.brake.nodes_count == 3


def test_a_resume_in_any_order_and_repeated_is_the_same() -> None:
    """It names the trip that it ends, so neither clocks nor streams matter."""
    world = fleet(10)
    world.plan()
    world.resume()
    resumed = world.facts[-1]
    others = world.facts[:-1]
    early = fold(fold(EMPTY_STATE, [resumed]), others)
    twice = fold(world.state, [resumed])

    assert (early.brake, early.brake_releases) == (world.state.brake, world.state.brake_releases)
    assert tripped_brake(early) is None
    assert twice == world.state


def test_a_resume_of_an_earlier_trip_ends_no_later_one() -> None:
    """A person decides on what they have seen."""
    world = fleet(10)
    world.plan()
    earlier = T0 - HOUR
    world.fact(PolicyDirectiveLifted(key=BRAKE, lifted_by="ada", lifted_at=world.now, tripped_at=earlier))
    world.fact(PolicyDirectiveLifted(key=BRAKE, lifted_by="ada", lifted_at=world.now))

    assert tripped_brake(world.state) is not None
    assert forced(world.plan()) == []


def test_resumes_of_a_limited_number_of_trips_are_kept() -> None:
    """The earliest trip is forgotten first."""
    trips = [T0 + number * MINUTE for number in range(BRAKE_RELEASES_COUNT_MAX + 2)]
    resumes = [PolicyDirectiveLifted(key=BRAKE, lifted_by="ada", lifted_at=at, tripped_at=at) for at in trips]
    state = given(tuple(TimedFact(resume, resume.lifted_at) for resume in resumes))
    assert list(state.brake_releases.values()) == resumes[2:]


def test_switching_the_brake_off_releases_what_it_holds() -> None:
    """A policy without a brake is a decision of a person as well; a later brake knows of no trip."""
    world = fleet(10)
    world.plan()
    world.rules = braked(BROKE, is_on=False)
    off = world.plan()

    assert len(forced(off)) == 7
    assert off.brake is None
    assert world.state.brake is None


# ---- the plan check


def test_the_plan_check_finds_what_the_brake_would_have_held() -> None:
    """It counts again: beyond the limit, without a mark, and while the brake holds."""
    world = fleet(10)
    world.plan()
    strict, state = world.rules, world.planned_on
    loose = plan(state, braked(BROKE, is_on=False), T0)
    unmarked = replace(loose, decisions=tuple(replace(each, forced=None) for each in loose.drains)[:1])
    later = plan(world.state, braked(BROKE, is_on=False), T0)

    assert any("10 of 10 nodes" in violation for violation in check(loose, state, strict))
    assert any("does not count" in violation for violation in check(unmarked, state, strict))
    assert any("has held since" in violation for violation in check(later, world.state, strict))
