"""Random clusters for property tests: nodes, pods, jobs, purchases, drains and notices in any mixture."""

from datetime import datetime, timedelta

import msgspec
from hypothesis import strategies as st
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    bought,
    budget,
    drained,
    given,
    job,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.scheduling import LabelRequirement

OFFERS: tuple[Offer, ...] = (
    offer(),
    offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0),
    offer(zone="zone-b", usd_per_hour=11.0),
    offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5),
    offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.8),
    offer("g5.xlarge", gpus=1, model="A10G", gpu_memory_gib=24, cpu=4, memory_gib=16, usd_per_hour=None),
    offer("m5.large", model=None, cpu=8, memory_gib=32, usd_per_hour=0.1),
)


class Situation(msgspec.Struct, frozen=True):
    """What a plan is made from."""

    state: ClusterState
    policy: ScalingPolicy
    as_of: datetime


_offers = st.sampled_from(OFFERS)
_ages = st.sampled_from((60 * MINUTE, 120 * MINUTE, 0 * MINUTE, MINUTE, 5 * MINUTE, 14 * MINUTE))
_sizes = st.sampled_from((1, 8, 2, 4, 1, 0, 16))
_models = st.sampled_from((None, "A100", None, "T4", None, "H100"))
_mostly = st.integers(0, 11).map(lambda number: number != 7)  # not at an end, where hypothesis looks most
_marks = st.sampled_from(({}, {}, {}, {}, {labels.DO_NOT_DISRUPT: "true"}, {labels.SAFE_TO_EVICT: "false"}))


@st.composite
def _node_stories(draw: st.DrawFn, number: int, as_of: datetime) -> Story:
    name, of, at = f"n{number}", draw(_offers.filter(lambda each: each.price_micro_usd_per_hour)), as_of - draw(_ages)
    story = node(
        name,
        of,
        at=at,
        is_ours=draw(_mostly),
        is_ready=draw(_mostly),
        is_cordoned=not draw(_mostly),
        annotations={labels.SCALE_DOWN_DISABLED: "true"} if not draw(_mostly) else {},
    )
    free = of.resources.gpu_count
    for index in range(draw(st.integers(0, 3))):
        gpus = draw(st.sampled_from((1, 1, 2, 4, 0)))
        if gpus > free:
            break
        free -= gpus
        story += pod(
            f"{name}-{index}",
            on=name,
            gpus=gpus,
            at=at,
            labels={"app": draw(st.sampled_from(("a", "b")))},
            annotations=draw(_marks),
            owner_kind=draw(st.sampled_from(("ReplicaSet", "ReplicaSet", "ReplicaSet", "Job", "DaemonSet", None))),
        )
    fate = draw(st.integers(0, 11))
    if fate == 7:
        story += notice(name, reclaim_at=draw(st.sampled_from((as_of + 2 * MINUTE, None))), at=as_of - 5 * SECOND)
    elif fate == 5:
        story += drained(name, at=as_of - MINUTE, is_started=draw(st.booleans()))
    return story


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Any mixture, small enough to read when it fails."""
    as_of = T0 + 3 * HOUR
    story: Story = on_sale(*draw(st.sampled_from((OFFERS, OFFERS[:2], OFFERS[2:], OFFERS[4:6]))), at=T0)
    for number in range(draw(st.integers(0, 8))):
        story += draw(_node_stories(number, as_of))
    for number in range(draw(st.sampled_from((0, 1, 3)))):
        decision = purchase(f"order-{number}", draw(_offers), at=as_of - draw(_ages))
        at = decision.deadline_at - timedelta(seconds=900)
        is_refused = draw(st.booleans())
        story += bought(decision, at=at, is_launched=draw(st.booleans()), is_refused=is_refused, retry_after=HOUR)
    for number in range(draw(st.sampled_from((0, 1, 3)))):
        story += job(
            f"j{number}",
            memory_gib=draw(st.sampled_from((4, 4, 300))),
            gpus=draw(_sizes),
            members=draw(st.integers(1, 4)),
            priority=draw(st.sampled_from((100, 500, 1000))),
            model=draw(_models),
            is_preemptible=draw(st.booleans()),
            at=as_of - draw(_ages),
        )
    for number in range(draw(st.sampled_from((0, 2, 5)))):
        story += pod(f"p{number}", gpus=draw(_sizes), model=draw(_models), at=as_of - draw(_ages))
    if draw(st.booleans()):
        match = (LabelRequirement(key="app", operator="In", values=("a",)),)
        story += budget("b", match=match, disruptions_allowed=draw(st.integers(0, 2)))
    is_synced = draw(_mostly)
    state = given(story, as_of=as_of, is_synced=is_synced)
    return Situation(state=state, policy=draw(policies()), as_of=as_of)


@st.composite
def policies(draw: st.DrawFn) -> ScalingPolicy:
    """Policies that bind now and then."""
    pools = draw(
        st.sampled_from(
            (
                (NodePool(name="default"),),
                (NodePool(name="default", nodes_count_max=2), NodePool(name="rest", priority=-1)),
                (NodePool(name="default", gpu_models=("T4",), gpu_count_max=6),),
            )
        )
    )
    return policy(
        nodes_count_min=draw(st.sampled_from((0, 0, 2))),
        nodes_count_max=draw(st.sampled_from((100, 100, 10, 4, 0))),
        gpu_count_max=draw(st.sampled_from((None, None, 40, 16, 0))),
        price_micro_usd_per_hour_max=draw(st.sampled_from((None, None, 40_000_000))),
        disruption_ratio_max=draw(st.sampled_from((0.1, 0.5, 1.0, 0.0))),
        is_frozen=not draw(_mostly),
        pools=pools,
    )
