"""ProvisioningRequests in stories, and plans of them that the plan check accepts."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, TimedFact, given, pod, policy
from tests.support.timed_facts import EPOCH, resources

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodProvisioningObserved
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest, Plan
from gpu_autoscaler.model.demands import (
    BEST_EFFORT_ATOMIC,
    PodSet,
    ProvisioningClass,
    ProvisioningCondition,
    ProvisioningConditionType,
)
from gpu_autoscaler.model.labels import CONSUME_PROVISIONING_REQUEST, PROVISIONING_CLASS

NO_FINALIZERS = policy(removal={"is_finalizer_on": False}, watch_age_seconds_max=86_400.0)


def condition(
    of: ProvisioningConditionType, *, is_true: bool = True, at: datetime = T0, reason: str = ""
) -> ProvisioningCondition:
    """A condition in the status of a request."""
    return ProvisioningCondition(type=of, is_true=is_true, since=at, reason=reason)


def request(
    name: str = "r",
    *pods: int,
    gpus: int = 8,
    class_name: ProvisioningClass = BEST_EFFORT_ATOMIC,
    at: datetime = T0,
    conditions: Iterable[ProvisioningCondition] = (),
    version: int = 1,
    **changes: Any,  # noqa: ANN401 - further fields of PodProvisioningObserved
) -> Story:
    """A request for a pod set of each of these counts, one of two pods by default; each pod has `gpus`."""
    counts = pods or (2,)
    sets = tuple(PodSet(count=count, requests=resources(gpus=gpus, pods=1)) for count in counts)
    fact = PodProvisioningObserved(
        epoch=EPOCH,
        version=version,
        request_uid=f"uid-{name}",
        namespace="research",
        name=name,
        class_name=class_name,
        created_at=at,
        members_count=sum(counts),
        pod_sets=sets,
        conditions=tuple(conditions),
    )
    return (TimedFact(msgspec.structs.replace(fact, **changes), at),)


def consumer(
    name: str,
    of: str = "r",
    class_name: str = BEST_EFFORT_ATOMIC,
    *,
    annotations: Mapping[str, str] | None = None,
    **fields: Any,  # noqa: ANN401 - fields of a pod
) -> Story:
    """A pod that uses the capacity of a request."""
    own = {CONSUME_PROVISIONING_REQUEST[0]: of, PROVISIONING_CLASS[0]: class_name}
    return pod(name, namespace="research", annotations=own if annotations is None else annotations, **fields)


def planned_at(at: datetime, *stories: Story, rules: ScalingPolicy = NO_FINALIZERS) -> Plan:
    """Return the plan of these stories; the plan check accepts it."""
    state = given(*stories, as_of=at)
    return accepted_plan(state, rules, at)


def refusals(state: ClusterState, made: Plan, rules: ScalingPolicy = NO_FINALIZERS) -> list[str]:
    """Return what the plan check finds wrong."""
    return [str(violation) for violation in check(made, state, rules)]


def answers(made: Plan) -> list[tuple[str, bool, str]]:
    """Return the conditions that the plan sets: type, status and reason."""
    acts = (act for act in made.upkeep_decisions if isinstance(act, AnswerProvisioningRequest))
    return [(act.condition, act.is_true, act.code) for act in acts]


def deferrals(made: Plan) -> dict[str, str]:
    """Return the tag of the reason for each deferred subject."""
    return {deferred.subject: deferred.reason.tag() for deferred in made.deferred}
