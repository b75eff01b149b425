"""Whatever happens in whatever order, the brake's limits hold in every rolling hour, and no notice waits."""

import random
from collections.abc import Sequence
from datetime import timedelta

from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.braked_fleet import BrakedFleet, braked, forced
from tests.support.stories import HOUR, policy

from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.forced_removals import tripped_brake
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.money import MICRO_USD_PER_USD as USD

NODES_COUNT = 12
EVENTS = ("silence", "notice", "broke", "rich", "resume", "wait", "wait")
NODES_MAX, PRICE_MAX = 4, 100 * USD


def _rules(*, is_broke: bool) -> ScalingPolicy:
    """Nothing but the brake, and the health of nodes, limits removals."""
    rules = policy(
        removal=RemovalPolicy(expire_seconds_max=None, unhealthy_nodes_ok_count=100),
        disruption_ratio_max=1.0,
        limits=LimitsPolicy(spend=SpendPolicy(day_micro_usd_max=1 if is_broke else None)),
        idle_seconds_max=30 * 24 * 3600.0,
    )
    return braked(rules, nodes_ratio_max=0.0, nodes_ok_count=NODES_MAX, price_micro_usd_per_hour_max=PRICE_MAX)


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, Sequence[tuple[str, int, float]]]:
    """Prices by a seed, and events: what, at which node, and the minutes before the next plan."""
    event = st.tuples(st.sampled_from(EVENTS), st.integers(0, NODES_COUNT - 1), st.sampled_from((0.5, 5.0, 21.0, 61.0)))
    return draw(st.integers(0, 2**16)), draw(st.lists(event, min_size=5, max_size=25))


@settings(max_examples=60, deadline=None)
@for_all(stories())
def test_limits_hold_in_every_rolling_hour(story: tuple[int, Sequence[tuple[str, int, float]]]) -> None:
    """Between two resumes never more than the limits; nothing while the brake holds; every notice at once."""
    seed, events = story
    prices = random.Random(seed)  # noqa: S311 - a case, not a secret
    world = BrakedFleet(_rules(is_broke=False))
    alive = [f"n{number:02}" for number in range(NODES_COUNT)]
    for name in alive:
        world.add(name, usd=prices.choice((10.0, 20.0, 40.0)), created_at=world.now)
        world.add(f"spare-{name}", has_work=False, usd=10.0, created_at=world.now)
    silenced, under_notice = set[str](), set[str]()
    removed: list[tuple[int, object, int]] = []  # number of resumes before, instant, price
    resumes_count = 0
    for event, number, minutes in events:
        name = alive[number]
        if event == "silence" and name not in silenced:
            silenced.add(name)
            world.silence(name)
        elif event == "notice" and name not in under_notice:
            under_notice.add(name)
            world.notice(name)
        elif event in ("broke", "rich"):
            world.rules = _rules(is_broke=event == "broke")
        elif event == "resume" and tripped_brake(world.state) is not None:
            world.resume()
            resumes_count += 1
        was_held = tripped_brake(world.state) is not None
        made = world.plan()
        assert not (was_held and forced(made))
        assert event != "notice" or _is_going(world, name)
        marks = [each for each in made.drains if each.forced is not None]
        assert {each.node_name for each in marks} <= set(forced(made))
        for each in marks:
            assert each.forced is not None
            removed.append((resumes_count, world.now, each.forced.price_micro_usd_per_hour or 0))
        for generation, at, _ in removed:
            hour = [entry for entry in removed if entry[0] == generation and at <= entry[1] < at + HOUR]  # type: ignore[operator]
            assert len(hour) <= NODES_MAX
            assert sum(price for *_, price in hour) <= PRICE_MAX
        world.now += timedelta(minutes=minutes)


def _is_going(world: BrakedFleet, name: str) -> bool:
    """True if a forced drain was decided that ends no later than the notice allows, now or before."""
    drains = (record.decision for record in world.state.drains.values())
    return any(isinstance(each, DrainNode) and each.node_name == name and not each.is_voluntary for each in drains)
