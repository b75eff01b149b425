"""A small cluster with everything that the page shows: nodes in most phases, jobs, plans, charges, a freeze."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from tests.support.purchases import drained
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    Story,
    TimedFact,
    bought,
    job,
    node,
    notice,
    offer,
    pod,
    purchase,
)
from tests.support.telemetry import minute
from tests.support.timed_facts import EPOCH

from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Deferred, Plan
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.ids import PlanId, PodUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer import NotYetIdle

ON_DEMAND = offer("p4de.24xlarge", zone="us-west-2b", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=40.9)
LONG_NAME = "finetune-llama-70b-with-a-name-as-long-as-people-give-them"


def left(pod_name: str, node_name: str, at: datetime) -> Story:
    """The pod of this name was deleted."""
    uid = PodUid(f"uid-{pod_name}")
    gone = PodGone(epoch=EPOCH, version=2, pod_uid=uid, namespace="default", name=pod_name, node_name=node_name)
    return (TimedFact(gone, at),)


def counting_down(number: int, subjects: Sequence[str], at: datetime) -> Story:
    """A plan that defers something for a while yet; such plans differ by their countdowns alone."""
    deferred = tuple(
        Deferred(
            step="release_idle",
            subject=subject,
            reason=NotYetIdle(idle_seconds=25.0 + 5 * number, idle_seconds_max=150.0),
        )
        for subject in subjects
    )
    plan = Plan(as_of=at, parent_sequence=0, deferred=deferred)
    fact = ScalingPlanMade(plan_id=PlanId(f"count-{number}"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")
    return (TimedFact(fact, at),)


def charge(number: int, *, until: datetime, idle: int, allocated: int) -> Story:
    """The charge of one hour, that many hours ago."""
    at = until - number * HOUR
    fact = CostAccrued(
        provider_id=ProviderId("i-1"),
        node_name="gpu-a",
        instance_type="p4d.24xlarge",
        capacity_type=CapacityType.SPOT,
        from_at=at - HOUR,
        to_at=at,
        total_micro_usd=idle + allocated,
        idle_micro_usd=idle,
        shares=(CostShare(allocated_micro_usd=allocated, used_micro_usd=None, project_id="research"),),
        price_micro_usd_per_hour=idle + allocated,
        price_source="sim",
        price_at=at,
    )
    return (TimedFact(fact, at),)


def frozen(now: datetime) -> Story:
    """A freeze for an hour."""
    given = PolicyDirectiveGiven(
        directive=Freeze(), reason="upgrade of the network", given_by="anna", given_at=now, until=now + HOUR
    )
    return (TimedFact(given, now),)


def cluster(now: datetime) -> tuple[Story, ...]:
    """Everything, as of `now`."""
    early = now - HOUR
    return (
        *(charge(number, until=early, idle=2_100_000, allocated=31_400_000 - number) for number in range(30, 0, -1)),
        node("gpu-a", at=early),
        job("training", at=early, placed_on=("gpu-a",), is_running=True),
        pod("training-0", on="gpu-a", gpus=8, at=early, job_id="training"),
        minute("gpu-a", now - 2 * MINUTE, busy=0.92),
        node("gpu-empty", at=early),
        pod("done-0", on="gpu-empty", gpus=8, at=early),
        minute("gpu-empty", now - 3 * MINUTE, busy=0.92),
        left("done-0", "gpu-empty", now - 150 * SECOND),
        node("gpu-spot-at-risk", at=early),
        pod("serving-7f9c", on="gpu-spot-at-risk", gpus=3, at=early),
        notice("gpu-spot-at-risk", reclaim_at=now + 2 * MINUTE, at=now),
        node("gpu-reserved", ON_DEMAND, at=early),
        pod("notebook", on="gpu-reserved", gpus=1, at=early),
        node("ip-10-0-113-27.us-west-2.compute.internal", at=early, is_cordoned=True),
        node("gpu-leaving", at=early),
        drained("gpu-leaving", at=now - MINUTE),
        bought(purchase("buy-next", at=now - MINUTE), at=now - MINUTE, is_launched=False),
        job("evaluation", at=now - 20 * MINUTE),
        job(LONG_NAME, at=now - 10 * MINUTE, members=4, model="A100"),
        pod("waiting-pod", at=now - 5 * MINUTE),
        *(
            counting_down(number, ["node/uid-gpu-empty"], now - timedelta(seconds=30 - 5 * number))
            for number in range(5)
        ),
    )
