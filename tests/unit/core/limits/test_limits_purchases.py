"""Purchases under limits of zones, projects and the cluster."""

from msgspec.structs import replace
from tests.support.accepted import accepted_plan
from tests.support.money import clusters, ledger
from tests.support.stories import (
    MINUTE,
    SECOND,
    T0,
    Story,
    bought,
    given,
    job,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
    resources,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.limits.limits import trim
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit

T4 = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
T4_FOUR = offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.4)
A100 = offer()


def purchases(result: Plan) -> list[BuyNode]:
    """The purchases of the plan."""
    return result.purchases


def offers(result: Plan) -> list[str]:
    """The offers that the plan buys."""
    return [decision.offer.key for decision in purchases(result)]


def deferral(result: Plan, subject: str) -> DeferReason:
    """The only reason of this deferral."""
    (found,) = [each.reason for each in result.deferred if each.subject == subject]
    return found


def test_under_a_limit_the_longest_waiting_pods_are_served() -> None:
    """Whatever their shape: younger pods do not take capacity from older ones of another shape."""
    alike = [pod(f"alike-{n}", gpus=8, at=T0 - (10 if n < 2 else 1) * MINUTE) for n in range(6)]
    other = [pod(f"other-{n}", gpus=8, cpu=2, at=T0 - 5 * MINUTE) for n in range(2)]
    result = plan(given(*alike, *other, on_sale()), policy(nodes_count_max=4), T0)

    served = {key for each in purchases(result) for key in getattr(each.reason, "demand", ())}
    assert served == {"pod/uid-alike-0", "pod/uid-alike-1", "pod/uid-other-0", "pod/uid-other-1"}
    assert {each.reason.tag() for each in result.deferred} == {"nodes_limit"}


def test_an_unsatisfiable_pod_does_not_make_others_more_expensive() -> None:
    """The others are bought together, at the price of the whole."""
    pods = [pod("impossible", gpus=99), pod("large", gpus=3), pod("small", gpus=1)]
    result = plan(given(*pods, on_sale(T4, T4_FOUR)), policy(), T0)

    assert offers(result) == [T4_FOUR.key]
    assert deferral(result, "pod/uid-impossible").tag() == "no_offer_fits"


def test_a_project_limit_does_not_affect_other_projects() -> None:
    """Its second job waits; a job of another project is served."""
    limits = LimitsPolicy(projects=(PartLimit(name="research", gpu_count_max=8),))
    jobs = (job("a"), job("b", at=T0 + MINUTE), job("c", at=T0 + MINUTE, project_id="vision"))
    result = plan(given(*jobs, on_sale()), policy(limits=limits), T0 + MINUTE)

    assert [dict(each.labels)[labels.PROJECT_ID] for each in purchases(result)] == ["research", "vision"]
    assert deferral(result, "job/b") == GpusLimit(gpu_count=8, gpu_count_max=8, owner="project/research")


def test_a_zone_limit_moves_purchases_to_another_zone() -> None:
    """The more expensive zone, within its own limit."""
    expensive = offer(zone="zone-b", usd_per_hour=12.0)
    limits = LimitsPolicy(
        zones=(PartLimit(name="zone-a", nodes_count_max=2), PartLimit(name="zone-b", gpu_count_max=8))
    )
    result = plan(given(*(pod(f"p{n}", gpus=8) for n in range(4)), on_sale(A100, expensive)), policy(limits=limits), T0)

    assert sorted(offers(result)) == [A100.key, A100.key, expensive.key]
    assert len(result.deferred) == 1


def test_forty_pods_within_ten_seconds_stay_within_sixteen_gpus() -> None:
    """Four pods per tick; launches in flight count from their plan."""
    under = policy(gpu_count_max=16)
    for is_reported in (True, False):
        event: list[Story] = [on_sale(T4, T4_FOUR, A100)]
        ordered = 0
        for second in range(10):
            now = T0 + second * SECOND
            event += [pod(f"p{second}-{n}", at=now) for n in range(4)]
            state = given(*event, as_of=now)
            result = accepted_plan(state, under, now)
            for each in purchases(result):
                event.append(bought(each, at=now, is_ordered=is_reported, is_launched=second % 2 == 0))
                ordered += each.offer.resources.gpu_count
            assert ordered <= 16
        assert ordered == 16


def test_a_gang_dropped_for_a_budget_is_bought_for_nowhere() -> None:
    """Its second node exceeds the budget once its long work counts on the node of a short job: that node is bought for
    the short job alone, and a job that waits is named by no purchase.
    """
    state = given(ledger(), on_sale(T4_FOUR), *_short_job_and_long_gang())
    budgeted = clusters(month=40.0)
    result = plan(state, budgeted, T0)

    assert [each.reason.demand for each in purchases(result) if isinstance(each.reason, UnmetDemand)] == [
        ("job/short",)
    ]
    assert deferral(result, "job/long").tag() == "spend_limit"
    assert check(result, state, budgeted) == ()


def test_the_plan_check_refuses_a_purchase_for_a_gang_that_a_limit_defers() -> None:
    """A plan that both buys for a gang and defers it contradicts itself."""
    state = given(ledger(), on_sale(T4_FOUR), *_short_job_and_long_gang())
    budgeted = clusters(month=40.0)
    result = plan(state, budgeted, T0)
    (buy,) = purchases(result)
    assert isinstance(buy.reason, UnmetDemand)
    reason = replace(buy.reason, demand=("job/short", "job/long"))
    contradictory = replace(result, decisions=(replace(buy, reason=reason),))

    (violation,) = check(contradictory, state, budgeted)
    assert "job/long" in violation


def test_a_node_that_only_a_dropped_gang_would_use_is_not_bought() -> None:
    """The pod that it was bought for found its place elsewhere. The gang on it loses its own node to the limit."""
    trimmed = _trimmed(_buy("one", "job/g"), _buy("two", "job/g", gang="job/g"))

    assert trimmed.purchases == ()
    assert [each.subject for each in trimmed.deferred] == ["job/g"]


def test_elastic_members_are_not_bought_for_a_gang_that_is_dropped() -> None:
    """Their node is within the limit that the two of the gang exceed, and is of no use without the gang."""
    trimmed = _trimmed(
        _buy("one", "job/g", gang="job/g"), _buy("two", "job/g", gang="job/g"), _buy("three", "member/g/3")
    )

    assert trimmed.purchases == ()
    assert {each.subject for each in trimmed.deferred} == {"job/g", "member/g/3"}


def test_a_dropped_elastic_member_leaves_its_gang() -> None:
    """The gang runs without it."""
    trimmed = _trimmed(_buy("one", "job/g", gang="job/g"), _buy("two", "member/g/3"))

    assert [each.transaction for each in trimmed.purchases] == ["job/g"]
    assert [each.subject for each in trimmed.deferred] == ["member/g/3"]


def _buy(name: str, subject: str, gang: str | None = None) -> Purchase:
    reason = UnmetDemand(demand=(subject,), offers_considered=1, price_micro_usd_per_hour=500_000)
    return Purchase(decision=purchase(name, T4, reason=reason, gang=gang), transaction=gang or name)


def _trimmed(*purchases: Purchase) -> Draft:
    """The purchases for a gang of two and its elastic member, under a limit of one node."""
    gang = DemandItem(
        key="job/g",
        source=DemandSource.QUEUED_JOB,
        shape=Shape(resources=resources(gpus=1, pods=1)),
        member_count=2,
        priority=0,
        since=T0,
        gang="job/g",
        job_id=JobId("g"),
    )
    elastic = replace(gang, key="member/g/3", source=DemandSource.ELASTIC_MEMBER, member_count=1, gang=None)
    draft = replace(Draft.start(given(on_sale(T4)), T0), demand=(gang, elastic), purchases=purchases)
    return trim(draft, policy(nodes_count_max=1))


def _short_job_and_long_gang() -> tuple[Story, ...]:
    """A node of four GPUs for the short job has capacity for one of the gang's two members."""
    short = job("short", gpus=1, priority=1000, duration_seconds_max=900.0)
    return short, job("long", gpus=3, members=2, priority=500, duration_seconds_max=24 * 3600.0)
