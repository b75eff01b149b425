"""What is bought where limits are in the way: of zones, of projects, of the whole; and for whom."""

from tests.support.stories import MINUTE, SECOND, T0, Story, bought, given, job, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit

T4 = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
T4_FOUR = offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.4)
A100 = offer()


def purchases(made: Plan) -> list[BuyNode]:
    """What the plan buys."""
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


def offers(made: Plan) -> list[str]:
    """The offers that the plan buys."""
    return [decision.offer.key for decision in purchases(made)]


def held(made: Plan, subject: str) -> DeferReason:
    """The one reason for which this was held back."""
    (found,) = [each.reason for each in made.deferred if each.subject == subject]
    return found


def test_those_that_wait_longest_are_bought_for_where_a_limit_is_in_the_way() -> None:
    """Whatever their shape: of the alike pods the younger ones leave room to the older ones of another shape."""
    alike = [pod(f"alike-{n}", gpus=8, at=T0 - (10 if n < 2 else 1) * MINUTE) for n in range(6)]
    other = [pod(f"other-{n}", gpus=8, cpu=2, at=T0 - 5 * MINUTE) for n in range(2)]
    made = plan(given(*alike, *other, on_sale()), policy(nodes_count_max=4), T0)

    served = {key for each in purchases(made) for key in getattr(each.reason, "demand", ())}
    assert served == {"pod/uid-alike-0", "pod/uid-alike-1", "pod/uid-other-0", "pod/uid-other-1"}
    assert {each.reason.tag() for each in made.deferred} == {"nodes_limit"}


def test_a_pod_that_nothing_can_take_makes_no_other_dearer() -> None:
    """The others are bought for together, at the price of the whole."""
    pods = [pod("impossible", gpus=99), pod("large", gpus=3), pod("small", gpus=1)]
    made = plan(given(*pods, on_sale(T4, T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key]
    assert held(made, "pod/uid-impossible").tag() == "no_offer_fits"


def test_a_full_project_leaves_the_rest_to_others() -> None:
    """Its second job waits for its own limit; another project's job is bought for."""
    limits = LimitsPolicy(projects=(PartLimit(name="research", gpu_count_max=8),))
    jobs = (job("a"), job("b", at=T0 + MINUTE), job("c", at=T0 + MINUTE, project_id="vision"))
    made = plan(given(*jobs, on_sale()), policy(limits=limits), T0 + MINUTE)

    assert [dict(each.labels)[labels.PROJECT_ID] for each in purchases(made)] == ["research", "vision"]
    assert held(made, "job/b") == GpusLimit(gpu_count=8, gpu_count_max=8, owner="project/research")


def test_a_full_zone_sends_the_rest_to_another() -> None:
    """The dearer zone is bought from, not beyond its own limit."""
    dear = offer(zone="zone-b", usd_per_hour=12.0)
    limits = LimitsPolicy(
        zones=(PartLimit(name="zone-a", nodes_count_max=2), PartLimit(name="zone-b", gpu_count_max=8))
    )
    made = plan(given(*(pod(f"p{n}", gpus=8) for n in range(4)), on_sale(A100, dear)), policy(limits=limits), T0)

    assert sorted(offers(made)) == [A100.key, A100.key, dear.key]
    assert len(made.deferred) == 1


def test_forty_pods_over_ten_seconds_never_pass_sixteen_gpus() -> None:
    """Four pods a tick, each tick a plan, its orders reported or not: what is in flight counts from the plan on."""
    under = policy(gpu_count_max=16)
    for is_reported in (True, False):
        told: list[Story] = [on_sale(T4, T4_FOUR, A100)]
        ordered = 0
        for second in range(10):
            now = T0 + second * SECOND
            told += [pod(f"p{second}-{n}", at=now) for n in range(4)]
            state = given(*told, as_of=now)
            made = plan(state, under, now)
            assert check(made, state, under) == ()
            for each in purchases(made):
                told.append(bought(each, at=now, is_ordered=is_reported, is_launched=second % 2 == 0))
                ordered += each.offer.resources.gpu_count
            assert ordered <= 16
        assert ordered == 16
