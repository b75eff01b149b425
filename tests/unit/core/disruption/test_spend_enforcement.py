"""Before a hard spend limit is exceeded nodes are removed, cheapest to lose first; protected work stays, and is
reported.
"""

from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace
from tests.support.accepted import accepted_plan
from tests.support.money import USD, charged, clusters, ledger, spent
from tests.support.money_world import MoneyWorld
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    bought,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    pod,
    provider_id,
    purchase,
)
from tests.support.timed_facts import TimedFact
from tests.unit.core.placement.test_pod_affinity import WEB, apart, web

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.limits.spend import spend_caps, spend_snapshot_of
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.cost import Spent
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.model.decisions import Deferred, Plan, ReleaseInstance
from gpu_autoscaler.model.labels import DO_NOT_DISRUPT, HOSTNAME
from gpu_autoscaler.model.reasons.defer import PriceUnknown, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import Frozen, SpendEnforcementBlocked, SpendLimit
from gpu_autoscaler.model.reasons.drain import SpendExhausted

# A node of 10 USD/h costs another 720 s after its drain starts, which are 2 USD; a minute without a plan costs 0.17.
WAY_OUT = 2.0


def planned(state: ClusterState, rules: ScalingPolicy, as_of: datetime = T0) -> Plan:
    """The plan, which the plan check finds nothing wrong with."""
    return accepted_plan(state, rules, as_of)


def leaving(made: Plan) -> list[str]:
    """Nodes that go for want of money, in the order in which they were chosen."""
    drains = made.drains
    return [drain.node_name for drain in drains if isinstance(drain.reason, SpendExhausted)]


def crossing(made: Plan) -> list[Deferred]:
    """Return deferrals of nodes that exceed the limit."""
    return [held for held in made.deferred if isinstance(held.reason, SpendEnforcementBlocked)]


def working(name: str, *, priority: int = 500, hours: float = 24.0, annotations: dict[str, str] | None = None) -> Story:
    """A node of 10 USD an hour with a job on it that may take so long."""
    return (
        *node(name),
        *instance(purchase(f"buy-{name}")),
        *job(f"j-{name}", placed_on=(name,), is_running=True, priority=priority, duration_seconds_max=hours * 3600.0),
        *pod(f"{name}-0", on=name, gpus=8, job_id=f"j-{name}", owner_kind="Job", annotations=annotations, at=T0),
    )


def left(usd: float, limit: float = 100.0) -> Spent:
    """So much of the day's limit was spent that this is left."""
    return spent(limit - usd)


def test_nothing_is_removed_within_the_budget() -> None:
    """Twelve hours of two nodes are 240 USD."""
    state = given(ledger(), working("a"), working("b"))

    assert leaving(planned(state, clusters(day=250.0))) == []


def test_nothing_is_removed_before_it_is_necessary() -> None:
    """The budget will not last, but each node can still be removed later."""
    state = given(ledger(left(8.0)), working("a"), working("b"))

    assert leaving(planned(state, clusters(day=100.0))) == []


def test_the_cheapest_to_lose_is_removed_first() -> None:
    """Lower priority first, while the other can still follow."""
    state = given(ledger(left(6.0)), working("a", priority=900), working("b", priority=100))
    made = planned(state, clusters(day=100.0))

    assert leaving(made) == ["b"]
    (drain,) = made.drains
    assert not drain.is_voluntary
    assert drain.deadline_at == T0 + timedelta(seconds=600)
    assert "daily spend budget" in drain.reason.sentence()


def test_the_order_of_removal_is_noted_when_it_changes() -> None:
    """Work on a node of twice the price began later: after 40 s and 20 s its loss is as expensive as the other's."""
    cheap = offer("cheap", usd_per_hour=5.0)

    def order(since_seconds: float, as_of: datetime) -> list[str]:
        works = (
            (
                *node(name, of),
                *instance(purchase(f"buy-{name}", of)),
                *job(f"j-{name}", placed_on=(name,), is_running=True, duration_seconds_max=86_400.0),
                *pod(f"{name}-0", on=name, gpus=8, job_id=f"j-{name}", owner_kind="Job", started_at=started_at),
            )
            for name, of, started_at in (
                ("a", offer(), T0 - timedelta(seconds=10)),
                ("b", cheap, T0 - timedelta(seconds=since_seconds)),
            )
        )
        return leaving(plan(given(ledger(left(3.5)), on_sale(offer(), cheap), *works), clusters(day=100.0), as_of))

    as_of = TrackedInstant.of(T0)
    first = order(40.0, as_of)
    assert as_of.next_change_at is not None
    assert timedelta(seconds=19.9) < as_of.next_change_at - T0 < timedelta(seconds=20)
    assert first == order(40.0, as_of.next_change_at - timedelta(microseconds=1)) == ["a"]
    assert order(40.0, T0 + timedelta(seconds=21)) == ["b"]
    as_of = TrackedInstant.of(T0)  # the loss of the cheaper node never overtakes: noted is only that more is billed
    assert order(10.0, as_of) == ["b"]
    assert as_of.next_change_at == T0 + timedelta(seconds=30)


def test_pod_constraints_do_not_keep_a_node() -> None:
    """Its pods need no other place: the two have anti-affinity, and there are no other nodes."""
    keep = apart(HOSTNAME, WEB)
    state = given(
        ledger(left(4.1)),
        *((*node(name), *instance(purchase(f"buy-{name}")), *web(f"w-{name}", keep, on=name, at=T0)) for name in "ab"),
    )

    assert sorted(leaving(planned(state, clusters(day=100.0)))) == ["a", "b"]


def test_all_are_removed_when_the_budget_covers_only_their_drains() -> None:
    """The cheapest to lose first."""
    state = given(ledger(left(4.1)), working("a", priority=900), working("b", priority=100))

    assert leaving(planned(state, clusters(day=100.0))) == ["b", "a"]


@pytest.mark.parametrize("bound", [{"nodes_count_min": 1}, {"is_paused": True}])
def test_neither_minimum_nor_pause_of_a_pool_prevents_enforcement(bound: dict[str, int]) -> None:
    """The plan check rejected such plans, and all nodes exceeded the limit."""
    state = given(ledger(left(4.1)), working("a", priority=900), working("b", priority=100))
    rules = clusters(day=100.0)
    rules = replace(rules, pools=tuple(replace(pool, **bound) for pool in rules.pools))
    assert all(view.pool in {pool.name for pool in rules.pools} for view in node_views(state, T0))

    assert leaving(planned(state, rules)) == ["b", "a"]


def test_expensive_work_keeps_its_reserved_spend() -> None:
    """The first needs 14 USD for its hour, and gets them; the other one runs on the rest."""
    first = working("a", priority=900, hours=1.0)
    for usd, expected in ((19.0, []), (15.5, ["b"])):
        state = given(ledger(left(usd)), first, working("b", priority=100))
        assert leaving(planned(state, clusters(day=100.0))) == expected


def test_an_empty_node_is_removed_first() -> None:
    """Whatever its price."""
    state = given(ledger(left(4.5)), node("a"), instance(purchase("buy-a")), working("b", priority=0))

    assert leaving(planned(state, clusters(day=100.0)))[0] == "a"


def test_booting_nodes_are_released() -> None:
    """Nothing runs there yet; its bill has begun."""
    state = given(ledger(left(0.3)), bought(purchase("one")), instance(purchase("one"), state="pending"))
    made = planned(state, clusters(day=100.0))

    assert [type(each) for each in made.decisions] == [ReleaseInstance]
    assert isinstance(made.decisions[0].reason, SpendExhausted)


def test_protected_work_may_exceed_the_limit_and_is_reported() -> None:
    """With its protection and what is left."""
    kept = working("a", annotations={DO_NOT_DISRUPT: "true"})
    made = planned(given(ledger(left(4.2)), kept, working("b", priority=1000)), clusters(day=100.0))

    assert leaving(made) == ["b"]
    (held,) = crossing(planned(given(ledger(left(2.0)), kept), clusters(day=100.0)))
    assert held.subject == "node/uid-a"
    assert DO_NOT_DISRUPT in held.sentence()


def test_a_soft_limit_removes_nothing() -> None:
    """Only purchases stop."""
    state = given(ledger(spent(200.0)), on_sale(), working("a"), job("waits"))
    made = planned(state, clusters(day=100.0, is_hard=False))

    assert leaving(made) == []
    assert made.purchases == []
    assert any(isinstance(held.reason, SpendLimit) for held in made.deferred)


def test_a_freeze_stops_enforcement() -> None:
    """Somebody said that nothing is to be changed."""
    import msgspec  # noqa: PLC0415 - here alone

    frozen = msgspec.structs.replace(clusters(day=100.0), is_frozen=True)
    made = planned(given(ledger(left(1.0)), working("a")), frozen)

    assert leaving(made) == []
    assert any(isinstance(held.reason, Frozen) for held in made.deferred)


def test_draining_nodes_are_not_counted_twice() -> None:
    """A draining node costs the rest of its drain, and the others need not be removed for it."""
    state = given(ledger(left(6.0)), working("a", priority=900), working("b", priority=100))
    first = plan(state, clusters(day=100.0), T0)
    from tests.support.stories import planned as plan_made  # noqa: PLC0415 - another `planned`

    story = (*ledger(left(6.0)), *working("a", priority=900), *working("b", priority=100), *plan_made(*first.decisions))
    as_of = T0 + 5 * MINUTE / 60

    assert leaving(planned(given(story, as_of=as_of), clusters(day=100.0), as_of)) == []


def test_no_interleaving_of_purchases_and_charges_exceeds_the_limit() -> None:
    """Jobs come at random, run shorter or longer than they may, charges come late, nodes go: whatever the order, the
    bill of the day stays within, and the plan check agrees with every plan."""
    worlds = [MoneyWorld(seed, day_usd=60.0) for seed in range(5)]
    for world in worlds:
        world.run(hours=11.9)
        assert world.bill_micro_usd <= 60 * USD

    assert max(world.bill_micro_usd for world in worlds) > 40 * USD
    assert sum(world.gone_count for world in worlds) > 0  # the limit was in the way


def test_charged_time_is_not_counted_again() -> None:
    """What was charged is not counted again as time that is over."""
    as_of = T0 + HOUR
    story = (*ledger(), *working("a"), *charged("a", to_at=as_of))
    limit = 10.0 + 11 * 10.0 + 0.01

    assert leaving(planned(given(story, as_of=as_of), clusters(day=limit), as_of)) == []


def overdue(*charges: Story) -> tuple[Story, datetime]:
    """Two nodes with jobs, an hour after T0; nothing is left of the day's limit of 100 USD."""
    as_of = T0 + HOUR
    listing = NodeInstanceListed(provider_ids=(provider_id("buy-a"), provider_id("buy-b")), listed_at=as_of)
    return (
        *ledger(spent(96.0)), *working("a"), *working("b"), *(each for story in charges for each in story),
        TimedFact(listing, as_of),
    ), as_of  # fmt: skip


def test_nothing_is_forced_while_the_ledger_is_behind() -> None:
    """A charge that is missing looks like spend: the removal waits, with the reason, until the ledger is back."""
    story, as_of = overdue(charged("a", to_at=T0 + HOUR), charged("b", to_at=T0 + HOUR - 16 * MINUTE))
    made = planned(given(story, as_of=as_of), clusters(day=100.0), as_of)

    assert leaving(made) == []
    (held,) = (each for each in made.deferred if each.step == "enforce_spend_budgets")
    assert isinstance(held.reason, WatchStale)
    assert (held.subject, held.reason.source, held.reason.age_seconds) == ("cluster", "ledger", 960.0)

    story, as_of = overdue(charged("a", to_at=T0 + HOUR), charged("b", to_at=T0 + HOUR - 14 * MINUTE))
    assert sorted(leaving(planned(given(story, as_of=as_of), clusters(day=100.0), as_of))) == ["a", "b"]


def test_nothing_is_forced_while_a_price_is_unknown() -> None:
    """Neither is anything bought: the spend is unknown."""
    state = given(ledger(left(1.0)), working("a"), bought(purchase("one", offer(usd_per_hour=None))))
    made = planned(state, clusters(day=100.0))

    assert leaving(made) == []
    assert [type(held.reason) for held in made.deferred if held.step == "enforce_spend_budgets"] == [PriceUnknown]


def test_the_plan_check_refuses_removals_on_a_doubtful_ledger() -> None:
    """The plan of a planner that does not ask is refused."""
    story, as_of = overdue(charged("a", to_at=T0 + HOUR), charged("b", to_at=T0 + HOUR - 14 * MINUTE))
    made = planned(given(story, as_of=as_of), clusters(day=100.0), as_of)
    story, _ = overdue(charged("a", to_at=T0 + HOUR), charged("b", to_at=T0 + HOUR - 16 * MINUTE))
    violations = check(made, given(story, as_of=as_of), clusters(day=100.0))

    assert len(violations) == 2
    assert all("the ledger has not charged 960 s of sim:///zone-a/i-buy-b" in text for text in violations)


def test_a_charge_whose_spans_pause_is_not_counted_again() -> None:
    """For seven hours only the spans of other instances arrive: what was charged before is not counted from the launch
    again, and nothing is forced."""
    as_of = T0 + 10 * HOUR
    spans = [charged("a", to_at=T0 + 3 * HOUR)]
    spans += [charged("b", from_at=T0 + each * HOUR, to_at=T0 + (each + 1) * HOUR) for each in range(10)]
    listing = NodeInstanceListed(provider_ids=(provider_id("buy-a"), provider_id("buy-b")), listed_at=as_of)
    facts = (*ledger(), *working("a"), *working("b"), *(each for story in spans for each in story))
    state = given((*facts, TimedFact(listing, as_of)), as_of=as_of)
    rules = clusters(day=205.0)
    made = planned(state, rules, as_of)

    assert state.charges[provider_id("buy-a")].until_at == T0 + 3 * HOUR
    (cap,) = spend_caps(rules)
    total = spend_snapshot_of(state, node_views(state, as_of), {}, rules, as_of).spent[cap]
    assert total == pytest.approx(200 * USD, abs=USD)  # ten hours of two nodes, of which 130 USD are charged
    assert leaving(made) == []
