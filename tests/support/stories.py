"""Whole situations in one line each: `given(node("n1"), pod("train-0", on="n1", gpus=8), as_of=T0 + HOUR)`.

Builders return facts with the instants of their publication; `given` folds them with the real `fold`, after which
both watches are complete and fresh at `as_of`. The builders do not depend on the structure of the state.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec
from tests.support.purchases import (
    bought,
    drained,
    evicted,
    instance,
    notice,
    offer,
    on_sale,
    planned,
    provider_id,
    purchase,
)
from tests.support.timed_facts import EPOCH, HOUR, LIST_VERSION, MINUTE, SECOND, T0, Story, TimedFact, record, resources

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobPlaced, JobQueued, JobRequested, JobStarted
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodBudgetListed, PodBudgetObserved, PodListed, PodObserved, PodQuotaObserved
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, JobSpec
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeDemands, Taint

__all__ = [
    "EPOCH",
    "HOUR",
    "LIST_VERSION",
    "MINUTE",
    "SECOND",
    "T0",
    "Story",
    "TimedFact",
    "bought",
    "budget",
    "drained",
    "evicted",
    "given",
    "instance",
    "job",
    "node",
    "notice",
    "offer",
    "on_sale",
    "planned",
    "pod",
    "policy",
    "provider_id",
    "purchase",
    "quota",
    "record",
    "request",
    "resources",
    "synced",
]


def given(*stories: Story, as_of: datetime = T0, is_synced: bool = True) -> ClusterState:
    """Return the state after the stories, with whole lists of pods, nodes and instances read at `as_of`."""
    told = [each for story in stories for each in story]
    return fold(EMPTY_STATE, record([*told, *(synced(told, as_of=as_of) if is_synced else ())]))


def synced(told: Iterable[TimedFact], *, as_of: datetime) -> Story:
    """Whole lists of everything that the story observed, read at `as_of`."""
    facts = [each.fact for each in told]
    pods = tuple(fact.pod_uid for fact in facts if isinstance(fact, PodObserved))
    nodes = tuple(fact.node_uid for fact in facts if isinstance(fact, NodeObserved))
    budgets = tuple(fact.budget_uid for fact in facts if isinstance(fact, PodBudgetObserved))
    instances = tuple(fact.provider_id for fact in facts if isinstance(fact, NodeInstanceObserved))
    return (
        TimedFact(PodListed(epoch=EPOCH, version=LIST_VERSION, pod_uids=pods, listed_at=as_of), as_of),
        TimedFact(PodBudgetListed(epoch=EPOCH, version=LIST_VERSION, budget_uids=budgets, listed_at=as_of), as_of),
        TimedFact(NodeListed(epoch=EPOCH, version=LIST_VERSION, node_uids=nodes, listed_at=as_of), as_of),
        TimedFact(NodeInstanceListed(provider_ids=instances, listed_at=as_of), as_of),
    )


def policy(**changes: Any) -> ScalingPolicy:  # noqa: ANN401 - fields of the policy, checked by the conversion
    """The default policy with these fields changed."""
    return msgspec.convert({**msgspec.to_builtins(ScalingPolicy()), **msgspec.to_builtins(changes)}, ScalingPolicy)


# ---- nodes


def node(
    name: str,
    of: Offer | None = None,
    *,
    is_ours: bool = True,
    is_ready: bool = True,
    gpus_allocatable: int | None = None,
    slices: Mapping[str, int] | None = None,
    at: datetime = T0,
    is_cordoned: bool = False,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    taints: tuple[Taint, ...] = (),
    pool: str = "default",
    version: int = 1,
    deleting_since: datetime | None = None,
    has_finalizer: bool = False,
    reason: BuyReason | None = None,
) -> Story:
    """A node of this offer, ready since `at` by default; one of ours comes with the purchase `buy-<name>`.

    `gpus_allocatable` is for a node whose GPUs are not all allocatable yet, `slices` for one with MIG slices.
    """
    of, cut = of or offer(), tuple(sorted((slices or {}).items()))
    decision = purchase(f"buy-{name}", of, pool=pool, at=at, reason=reason, labels=labels, taints=taints)
    decision = msgspec.structs.replace(decision, slices=cut)
    allocatable = decision.promised
    if gpus_allocatable is not None:
        allocatable = msgspec.structs.replace(allocatable, gpu_count=gpus_allocatable)
    fact = NodeObserved(
        epoch=EPOCH,
        version=version,
        node_uid=NodeUid(f"uid-{name}"),
        name=name,
        is_ready=is_ready,
        allocatable=allocatable,
        created_at=at,
        provider_id=provider_id(decision.action_id),
        instance_type=of.instance_type,
        zone=of.zone,
        capacity_type=of.capacity_type,
        gpu_model=of.gpu_model,
        gpu_memory_bytes=of.gpu_memory_bytes,
        is_cordoned=is_cordoned,
        ready_since=at if is_ready else None,
        deleting_since=deleting_since,
        has_finalizer=has_finalizer,
        labels=tuple(sorted((labels or {}).items())),
        annotations=tuple(sorted((annotations or {}).items())),
        taints=taints,
        action_id=decision.action_id if is_ours else None,
    )
    return (*(bought(decision, at=at) if is_ours else ()), TimedFact(fact, at))


# ---- pods and jobs


def pod(
    name: str,
    *,
    on: str | None = None,
    gpus: int = 1,
    cpu: float = 1,
    memory_gib: float = 4,
    slices: Mapping[str, int] | None = None,
    at: datetime = T0,
    unschedulable_since: datetime | None = None,
    demands: NodeDemands | None = None,
    model: str | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    owner_kind: str | None = "ReplicaSet",
    job_id: str | None = None,
    priority: int = 0,
    namespace: str = "default",
    version: int = 1,
    **changes: Any,  # noqa: ANN401 - further fields of PodObserved
) -> Story:
    """A pod: running on a node, or pending (and then unschedulable since `at` by default)."""
    fact = PodObserved(
        epoch=EPOCH,
        version=version,
        pod_uid=PodUid(f"uid-{name}"),
        namespace=namespace,
        name=name,
        phase="pending" if on is None else "running",
        requests=msgspec.structs.replace(
            resources(gpus=0 if slices else gpus, cpu=cpu, memory_gib=memory_gib, pods=1),
            slices=tuple(sorted((slices or {}).items())),
        ),
        created_at=at,
        node_name=on,
        is_ready=on is not None,
        unschedulable_since=(unschedulable_since or at) if on is None else None,
        started_at=None if on is None else at,
        priority=priority,
        demands=demands or NodeDemands(),
        gpu_model=model,
        labels=tuple(sorted((labels or {}).items())),
        annotations=tuple(sorted((annotations or {}).items())),
        owner_kind=owner_kind,
        job_id=None if job_id is None else JobId(job_id),
    )
    return (TimedFact(msgspec.structs.replace(fact, **changes), at),)


def budget(
    name: str, *, match: tuple[LabelRequirement, ...], disruptions_allowed: int, namespace: str = "default"
) -> Story:
    """A PodDisruptionBudget."""
    fact = PodBudgetObserved(
        epoch=EPOCH,
        version=1,
        budget_uid=f"uid-{name}",
        namespace=namespace,
        name=name,
        match_labels=match,
        disruptions_allowed=disruptions_allowed,
    )
    return (TimedFact(fact, T0),)


def quota(name: str, hard: Mapping[str, int], used: Mapping[str, int] | None = None, **changes: Any) -> Story:  # noqa: ANN401 - further fields of PodQuotaObserved
    """A ResourceQuota of the namespace `research` with whole amounts."""
    fact = PodQuotaObserved(
        epoch=EPOCH,
        version=1,
        quota_uid=f"uid-{name}",
        namespace="research",
        name=name,
        hard_milli=tuple(sorted((key, 1000 * amount) for key, amount in hard.items())),
        used_milli=tuple(sorted((key, 1000 * amount) for key, amount in (used or {}).items())),
    )
    return (TimedFact(msgspec.structs.replace(fact, **changes), T0),)


def request(job_id: str | None = "train", **changes: Any) -> JobRequested:  # noqa: ANN401 - fields of JobRequested
    """A request that is all right."""
    asked = JobRequested(
        job_name="train",
        project_id="research",
        gpu_requirements=GpuRequirements(gpu_count=1),
        container=ContainerRequest(image="registry.example/train:1"),
        job_id=None if job_id is None else JobId(job_id),
    )
    return msgspec.structs.replace(asked, **changes)


def job(
    job_id: str,
    *,
    gpus: int = 8,
    members: int = 1,
    priority: int = 500,
    model: str | None = None,
    cpu: float = 1,
    memory_gib: float = 4,
    at: datetime = T0,
    is_preemptible: bool = True,
    placed_on: tuple[str, ...] = (),
    attempt: int = 1,
    retries_used: int | None = None,
    is_running: bool = False,
    **changes: Any,  # noqa: ANN401 - further fields of JobSpec
) -> Story:
    """A job that was accepted at `at`; with `placed_on` it has a place, and may run."""
    name = JobId(job_id)
    spec = JobSpec(
        job_id=name,
        job_name=job_id,
        project_id="research",
        priority=priority,
        member_count=members,
        member_resources=resources(gpus=gpus, cpu=cpu, memory_gib=memory_gib, pods=1),
        gpu_model=model,
        gpu_memory_bytes_min=None,
        image="registry.example/train:1",
        command=(),
        env={},
        workload_type=None,
        is_preemptible=is_preemptible,
        budget_limit_micro_usd=None,
        duration_seconds_max=24 * 3600.0,
        requested_at=at,
    )
    queued = JobQueued(job_id=name, spec=msgspec.structs.replace(spec, **changes), queued_at=at)
    story: Story = (TimedFact(request(job_id), at), TimedFact(queued, at))
    if placed_on:
        nodes = tuple(NodeUid(f"uid-{each}") for each in placed_on)
        placed = JobPlaced(
            job_id=name,
            attempt=attempt,
            node_uids=nodes,
            node_names=placed_on,
            placed_at=at,
            retries_used_count=retries_used,
        )
        story = (*story, TimedFact(placed, at))
    if is_running:
        started = JobStarted(epoch=EPOCH, version=1, job_id=name, kube_job=f"jobs/{job_id}", started_at=at)
        story = (*story, TimedFact(started, at))
    return story
