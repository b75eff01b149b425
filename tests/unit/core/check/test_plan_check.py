"""The plan check rejects each kind of broken plan. Each story breaks a good plan, or makes one by hand."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.purchases import spread
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    bought,
    budget,
    drained,
    given,
    instance,
    job,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
    provider_id,
    purchase,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, Deferred, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import Frozen
from gpu_autoscaler.model.reasons.drain import (
    BootTimedOut,
    DemandReturned,
    DrainReason,
    NodeIdle,
    NodeUnderused,
    SpotReclaim,
)
from gpu_autoscaler.model.scheduling import LabelRequirement

NOW = T0 + HOUR
IDLE = NodeIdle(idle_seconds=3600.0, idle_seconds_max=600.0)
UNDERUSED = NodeUnderused(pods=(), saving_micro_usd_per_hour=1)
RECLAIM = SpotReclaim(notice_id="n", kind="terminate", reclaim_at=None)


def mistakes(
    state: ClusterState, *decisions: AnyDecision, under: ScalingPolicy | None = None, held: tuple[str, ...] = ()
) -> str:
    """Return the violations of a plan of these decisions as one text; `held` are deferred subjects."""
    made = Plan(
        as_of=NOW,
        parent_sequence=state.last_plan_sequence,
        decisions=decisions,
        deferred=tuple(Deferred(step="test", subject=subject, reason=Frozen()) for subject in held),
    )
    return "\n".join(check(made, state, under or policy()))


def buy(name: str = "new", **changes: Any) -> BuyNode:  # noqa: ANN401 - fields of BuyNode
    """A purchase of one node for job/train."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=10_000_000)
    return msgspec.structs.replace(purchase(name, at=NOW, reason=reason), **changes)


def drain(name: str = "n1", reason: DrainReason = IDLE, **changes: Any) -> DrainNode:  # noqa: ANN401 - of DrainNode
    """A drain by choice of the node of this name."""
    decision = DrainNode(
        action_id=ActionId(f"drain-{name}-now"),
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        provider_id=provider_id(f"buy-{name}"),
        is_voluntary=True,
        deadline_at=NOW + timedelta(minutes=10),
        reason=reason,
    )
    return msgspec.structs.replace(decision, **changes)


def world(*stories: Story) -> ClusterState:
    """Return the state of the stories an hour later, with the default offer."""
    return given(*stories, on_sale(), as_of=NOW)


def waiting(**changes: Any) -> Story:  # noqa: ANN401 - arguments of `job`
    """A job that waits."""
    return job("train", **changes)


def test_a_good_plan_is_accepted() -> None:
    """The basis of the other tests here."""
    assert mistakes(world(waiting()), buy()) == ""
    assert mistakes(world(node("n1")), drain()) == ""


# ---- identity


def test_a_shared_action_id_is_rejected() -> None:
    """The second would be taken for a repeat of the first."""
    assert "share the action id new" in mistakes(
        world(waiting(members=2)), buy(gang="job/train"), buy(gang="job/train")
    )


def test_a_reused_action_id_is_rejected() -> None:
    """It would be taken for done."""
    assert "earlier plan" in mistakes(world(waiting(), bought(purchase("new"))), buy())


def test_a_wrong_parent_plan_is_rejected() -> None:
    """Its parent is not the last one."""
    state = world(waiting())
    made = msgspec.structs.replace(plan(state, policy(), NOW), parent_sequence=7)

    assert any("follows plan 7" in sentence for sentence in check(made, state, policy()))


# ---- purchases


def test_a_purchase_under_a_freeze_is_rejected() -> None:
    """Nothing is to be changed."""
    assert "frozen" in mistakes(world(waiting()), buy(), under=policy(is_frozen=True))


@pytest.mark.parametrize(
    ("sold", "said"),
    [
        (offer("other"), "not an available offer"),
        (offer(usd_per_hour=9.0), "not an available offer"),
        (offer(usd_per_hour=None), "unknown price"),
    ],
)
def test_an_unavailable_offer_is_rejected(sold: Any, said: str) -> None:  # noqa: ANN401 - an Offer
    """Type and price must be in the sample."""
    assert said in mistakes(world(waiting()), buy(offer=sold))


@pytest.mark.parametrize(
    "pool",
    [
        NodePool(name="other"),
        NodePool(name="default", zones=("zone-b",)),
        NodePool(name="default", instance_types=("p5.48xlarge",)),
        NodePool(name="default", gpu_models=("H100",)),
        NodePool(name="default", capacity_types=(CapacityType.RESERVED,)),
        NodePool(name="default", labels={"team": "vision"}),
    ],
)
def test_an_offer_outside_the_pool_is_rejected(pool: NodePool) -> None:
    """Each filter of the pool, and its labels."""
    assert "for pool" in mistakes(world(waiting()), buy(), under=policy(pools=(pool,))) or "of pool" in mistakes(
        world(waiting()), buy(), under=policy(pools=(pool,))
    )


def test_a_purchase_during_the_back_off_is_rejected() -> None:
    """Not before its time."""
    refused = bought(purchase("old"), is_refused=True, retry_after=2 * HOUR)

    assert "was refused" in mistakes(world(waiting(), refused), buy())


def test_an_offer_launched_by_a_later_plan_is_accepted() -> None:
    """A launch by the same plan does not count: it took the last capacity."""
    refused = bought(purchase("old"), is_refused=True, retry_after=2 * HOUR)
    later = bought(purchase("sold", at=T0 + MINUTE), at=T0 + MINUTE)
    together = bought(purchase("sold"))

    assert "was refused" not in mistakes(world(waiting(), refused, later), buy())
    assert "was refused" in mistakes(world(waiting(), refused, together), buy())


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"nodes_count_max": 2}, "3 nodes of at most 2"),
        ({"gpu_count_max": 16}, "24 GPUs of at most 16"),
        ({"price_micro_usd_per_hour_max": 29_000_000}, "would cost 30000000"),
        ({"pools": (NodePool(name="default", nodes_count_max=2),)}, "pool default would have 3 nodes"),
    ],
)
def test_a_limit_includes_orders_in_flight(limits: dict[str, Any], said: str) -> None:
    """One node runs, one is planned, one is bought: three."""
    in_flight = bought(purchase("planned", at=NOW), at=NOW, is_ordered=False)

    assert said in mistakes(world(waiting(), node("n1"), in_flight), buy(), under=policy(**limits), held=("job/train",))


@pytest.mark.parametrize(
    ("usd_per_month_max", "count", "is_refused"),
    [(None, 2, False), (366, 1, False), (365, 1, True), (731, 2, False), (730, 2, True), (0, 1, True)],
)
def test_spot_is_spread_no_further_than_the_policy_allows(
    usd_per_month_max: int | None, count: int, *, is_refused: bool
) -> None:
    """A present node and each new one cost 365 USD a month for the share; only the last may reach the limit."""
    state = world(waiting(members=count), node("n1", reason=spread(10.0, 9.5)))
    buys = [buy(name, gang="job/train", reason=spread(10.0, 9.5)) for name in ("a", "b")[:count]]
    limit = None if usd_per_month_max is None else usd_per_month_max * MICRO_USD_PER_USD
    under = policy(spot={"capacity_pool_month_micro_usd_max": limit})

    assert ("for the share of capacity pools" in mistakes(state, *buys, under=under)) is is_refused


def test_a_plan_spreads_spot_no_further_than_the_policy_allows() -> None:
    """Twelve pods, and a present node that costs what the share may cost: the plan is accepted."""
    zones = offer(usd_per_hour=10.0), offer(zone="zone-b", usd_per_hour=10.5)
    present = node("n1", offer("small", usd_per_hour=2.5, gpus=1), reason=spread(2.5, 2.0), at=T0 - HOUR)
    state = given(present, *(pod(f"p{number}", gpus=8) for number in range(12)), on_sale(*zones))

    accepted_plan(state, policy(spot={"capacity_pool_month_micro_usd_max": 365 * MICRO_USD_PER_USD}), T0)


def test_refused_orders_do_not_count() -> None:
    """A refused launch never was."""
    refused = bought(purchase("old", offer("other")), is_refused=True)

    assert mistakes(world(waiting(), refused), buy(), under=policy(nodes_count_max=1)) == ""


def test_instances_without_an_order_count() -> None:
    """They have our tag and cost money."""
    state = world(waiting(), instance(purchase("stray"), at=NOW - MINUTE))

    assert "2 nodes of at most 1" in mistakes(state, buy(), under=policy(nodes_count_max=1))


def test_half_a_gang_is_rejected() -> None:
    """One node for two members of eight GPUs."""
    state = world(waiting(members=2))

    assert "part of a gang" in mistakes(state, buy(gang="job/train"))
    assert mistakes(state, buy("a", gang="job/train"), buy("b", gang="job/train")) == ""


def test_existing_capacity_completes_a_gang() -> None:
    """One member on a free node, one on the new one."""
    assert mistakes(world(node("n1"), waiting(members=2)), buy(gang="job/train")) == ""


def test_unaccounted_work_is_rejected() -> None:
    """Each waiting job and pod is bought for or deferred."""
    assert "job train waits" in mistakes(world(waiting()))
    assert "pod default/a waits" in mistakes(world(pod("a")))
    assert mistakes(world(waiting(), pod("a")), held=("job/train", "pod/uid-a")) == ""


# ---- removals


def test_a_removal_under_a_freeze_is_rejected() -> None:
    """If it is by choice."""
    assert "frozen" in mistakes(world(node("n1")), drain(), under=policy(is_frozen=True))


def test_a_removal_on_a_stale_list_is_rejected() -> None:
    """A failed list is not an empty cluster."""
    assert "old or missing list of pods" in mistakes(given(node("n1"), as_of=T0), drain())
    assert "old or missing list of nodes" in mistakes(given(node("n1"), is_synced=False), drain())


def test_a_drain_of_a_missing_node_is_rejected() -> None:
    """Uid and name must match."""
    assert "no such node" in mistakes(world(node("n1")), drain("n2"))
    assert "no such node" in mistakes(world(node("n1")), drain(node_name="n2"))


def test_a_drain_with_another_nodes_instance_is_rejected() -> None:
    """The wrong instance would end."""
    assert "not its own" in mistakes(world(node("n1")), drain(provider_id=provider_id("buy-n2")))


def test_a_drain_of_a_foreign_node_by_choice_is_rejected() -> None:
    """We remove what we bought."""
    assert "we did not buy it" in mistakes(world(node("n1", is_ours=False)), drain())


def test_a_forced_drain_without_a_notice_is_rejected() -> None:
    """Nothing else overrules protections."""
    assert "no notice is active" in mistakes(world(node("n1")), drain(reason=RECLAIM, is_voluntary=False))


def test_a_drain_of_an_annotated_node_is_rejected() -> None:
    """Its annotation says that it stays."""
    state = world(node("n1", annotations={labels.SCALE_DOWN_DISABLED: "true"}))

    assert "protected by an annotation" in mistakes(state, drain())


def test_a_node_with_work_is_not_idle() -> None:
    """Whatever the plan's reason."""
    assert "is drained as idle, but pod default/a is there" in mistakes(world(node("n1"), pod("a", on="n1")), drain())


@pytest.mark.parametrize(
    "protected",
    [
        pod("a", on="n1", annotations={labels.DO_NOT_DISRUPT: "true"}),
        pod("a", on="n1", annotations={labels.SAFE_TO_EVICT: "false"}),
        pod("a", on="n1", owner_kind=None),
        pod("a", on="n1", owner_kind="Job"),
        pod("a", on="n1", owner_kind="PyTorchJob"),
        pod("a", on="n1", has_local_storage=True),
        (*job("j", is_preemptible=False, placed_on=("n1",)), *pod("a", on="n1", job_id="j")),
    ],
)
def test_moving_a_protected_pod_is_rejected(protected: Story) -> None:
    """Each protection."""
    state = world(node("n1"), node("n2"), protected)

    assert "is protected" in mistakes(state, drain(reason=UNDERUSED))


def test_exceeding_a_pod_disruption_budget_is_rejected() -> None:
    """Two pods of a budget that allows one."""
    app = {"app": "x"}
    state = world(
        node("n1"),
        node("n2"),
        pod("a", on="n1", labels=app),
        pod("b", on="n1", labels=app),
        budget("x", match=(LabelRequirement(key="app", operator="In", values=("x",)),), disruptions_allowed=1),
    )

    assert "it allows 1" in mistakes(state, drain(reason=UNDERUSED))


@pytest.mark.parametrize(("others_gpus", "said"), [(8, "fits nowhere else"), (6, "do not all fit elsewhere")])
def test_moving_pods_without_another_place_is_rejected(others_gpus: int, said: str) -> None:
    """Alone, or all together."""
    mine = (pod("a", on="n1", gpus=2), pod("b", on="n1", gpus=2))

    assert said in mistakes(
        world(node("n1"), node("n2"), *mine, pod("c", on="n2", gpus=others_gpus)), drain(reason=UNDERUSED)
    )


def test_a_node_that_has_less_than_its_pods_request_takes_nothing_from_others() -> None:
    """Some of its memory is gone; what is free elsewhere still is."""
    short = (node("n3"), pod("c", on="n3", gpus=0, memory_gib=1200))
    moving = (pod("a", on="n1", gpus=4, memory_gib=540), pod("b", on="n1", gpus=4, memory_gib=540))

    assert "fit" not in mistakes(world(node("n1"), node("n2"), *short, *moving), drain(reason=UNDERUSED))


def test_too_many_removals_at_once_are_rejected() -> None:
    """A tenth of two, rounded up, is one; drains in progress count."""
    assert "2 nodes of 2" in mistakes(world(node("n1"), node("n2")), drain("n1"), drain("n2"))
    under_way = drained("n2", at=NOW - MINUTE)
    assert "2 nodes of 2" in mistakes(world(node("n1"), node("n2"), under_way), drain("n1"))


def test_draining_a_node_twice_is_rejected() -> None:
    """One decision is enough."""
    assert "twice" in mistakes(world(node("n1")), drain(), drain(action_id=ActionId("again")))


def test_removals_below_the_minimum_are_rejected() -> None:
    """One node, and one is wanted."""
    assert "0 nodes would be left of at least 1" in mistakes(
        world(node("n1")), drain(), under=policy(nodes_count_min=1)
    )


def release(order: str) -> ReleaseInstance:
    """An order given back as too late."""
    return ReleaseInstance(
        action_id=ActionId(f"release-{order}"),
        provider_id=None,
        order_action_id=ActionId(order),
        reason=BootTimedOut(booting_seconds=1000.0, boot_seconds_max=900.0),
    )


def test_wrong_releases_are_rejected() -> None:
    """A usable node, an order with time left, an order that is not ours."""
    in_time = bought(purchase("young", at=NOW), at=NOW)

    assert "is in use" in mistakes(world(node("n1")), release("buy-n1"))
    assert "before its deadline" in mistakes(world(in_time), release("young"))
    assert "not an open order of ours" in mistakes(world(), release("unheard-of"))
    assert mistakes(world(bought(purchase("late"))), release("late")) == ""


def test_canceling_a_drain_not_in_progress_is_rejected() -> None:
    """There is nothing to cancel."""
    decision = CancelDrain(
        action_id=ActionId("cancel"),
        drain_action_id=ActionId("drain-n1"),
        node_uid=NodeUid("uid-n1"),
        node_name="n1",
        reason=DemandReturned(demand=()),
    )

    assert "not in progress" in mistakes(world(node("n1")), decision)
    assert mistakes(world(node("n1"), drained("n1", at=NOW)), decision) == ""


def test_ignoring_an_at_risk_node_is_rejected() -> None:
    """It must drain, and its pods must be accounted for."""
    state = world(node("n1"), pod("a", on="n1"), notice("n1", reclaim_at=NOW + MINUTE, at=NOW))
    answer = drain(reason=RECLAIM, is_voluntary=False)

    assert "nothing drains it" in mistakes(state, held=("pod/uid-a",))
    assert "pod default/a loses its node" in mistakes(state, answer)
    assert mistakes(state, answer, held=("pod/uid-a",)) == ""
