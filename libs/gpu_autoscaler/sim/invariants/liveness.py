"""Invariants of liveness: work that could be served does not wait, and the first of a burst waits no longer than the
policy says.

Checked while no fault is active, and at the end of the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

from gpu_autoscaler.core.deferred_groups import member_digests
from gpu_autoscaler.core.limits.spend import spend_caps
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.invariants import WORK_SERVED
from gpu_autoscaler.sim.virtual_time import VirtualLoop

CHECK_SECONDS = 60.0
WAITING_SECONDS_MAX = 1800.0  # two of the longest boot timeouts: the first purchase may fail


class CheckedRun(Protocol):
    """Parts of the run that are checked."""

    loop: VirtualLoop
    faults: Faults
    cluster: Kubernetes
    cloud: Cloud
    policies: Policies
    tables: Tables
    workloads: Workloads


class LivenessInvariant:
    """Tracks since when each servable job waits."""

    def __init__(self, run: CheckedRun, report: Callable[[str, str], None]) -> None:
        self._run = run
        self._report = report
        self._since: dict[JobId, float] = {}

    def begin(self) -> None:
        """Check every minute."""
        self._run.loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        now, run = self._run.loop.time(), self._run
        calm_at = max(run.faults.disturbed_until() + CHECK_SECONDS, now if run.policies.now.is_frozen else 0.0)
        self._since = {job_id: max(self._since.get(job_id, now), calm_at) for job_id in servable(run)}
        for job_id, since in self._since.items():
            if now - since > WAITING_SECONDS_MAX:
                self._report(
                    WORK_SERVED, f"job {job_id} has waited for {now - since:.0f} s, and could have been served"
                )
                return
        run.loop.call_later(CHECK_SECONDS, self._check)


class ServableInputs(Protocol):
    """Parts of the run that decide whether a job is servable."""

    cluster: Kubernetes
    cloud: Cloud
    policies: Policies
    tables: Tables
    workloads: Workloads


def servable(run: ServableInputs) -> list[JobId]:
    """Return waiting jobs for whose members nodes are available within all limits."""
    machines = [machine for machine in run.cloud.machines if machine.state != "terminated"]
    gpu_count = sum(machine.offer.resources.gpu_count for machine in machines)
    price = sum(machine.price_micro_usd_per_hour for machine in machines)
    policy = run.policies.now
    if spend_caps(policy) or _lets_wait(policy):
        return []  # whether spend limits, quotas and reservations leave enough is not predicted here
    at_work = Counter(
        pod.metadata.labels.get(labels.JOB_ID)
        for pod in run.cluster.all(PODS)
        if pod.spec.node_name and pod.status.phase != "Succeeded"
    )
    for work in run.workloads.works.values():  # completed members wait for nothing, even without a pod
        at_work[work.job.metadata.name] += len(work.done)
    # A size schedule of the policy may set a lower maximum for a while.
    sizes = (size.nodes_count_max for size in policy.scheduled_limits if size.is_active(run.cluster.now()))
    nodes_max = min((policy.nodes_count_max, *(limit for limit in sizes if limit is not None)))
    servable_jobs: list[JobId] = []
    for row in run.tables.jobs.values():
        spec = row.spec
        is_waiting = row.outcome is None and at_work[spec.job_id] < spec.gang_count
        is_limited = spec.project_id in {part.name for part in policy.limits.projects}
        if not is_waiting or is_limited or len(machines) + spec.gang_count > nodes_max:
            continue
        if any(
            _is_allowed(policy, gpu_count, price, spec, offer)
            for offer in _matching_offers(spec, policy, run.cloud)
            if not run.cloud.is_out_of(offer)
        ):
            servable_jobs.append(spec.job_id)
    return servable_jobs


def _lets_wait(policy: ScalingPolicy) -> bool:
    """True if jobs wait for quota, or for jobs ahead of them, while nodes could be bought."""
    holds = (queue.is_strict or queue.reserve_after_seconds is not None for queue in policy.queues)
    return policy.quotas.is_set or bool(policy.tenancy.namespace_template) or any(holds)


def _matching_offers(spec: JobSpec, policy: ScalingPolicy, cloud: Cloud) -> Iterator[Offer]:
    for offer in cloud.offers:
        if (
            cloud.allows_gpus(offer)
            and offer.price_micro_usd_per_hour is not None  # such an offer is not bought
            and any(_allows(pool, offer) for pool in policy.pools)
            and offer.zone not in {part.name for part in policy.limits.zones}
            and _is_selected(spec, offer)
            and spec.member_resources.fits_in(offer.resources)
            and (not spec.models or offer.gpu_model in spec.models)
            and (spec.gpu_memory_bytes_min or 0) <= (offer.gpu_memory_bytes or 0)
            and (spec.is_preemptible or offer.capacity_type is not CapacityType.SPOT)
        ):
            yield offer


def _is_selected(spec: JobSpec, offer: Offer) -> bool:
    """True if the node selector of the job's template names nothing but this offer; what affinity allows is not
    predicted."""
    known = {
        labels.ZONE: offer.zone,
        labels.INSTANCE_TYPE: offer.instance_type,
        labels.CAPACITY_TYPE: offer.capacity_type,
        labels.GPU_MODEL: offer.gpu_model,
    }
    asked = spec.demands.node_selector
    return not spec.demands.node_affinity and all(known.get(key) == value for key, value in asked)


def _is_allowed(policy: ScalingPolicy, gpu_count: int, price: int, spec: JobSpec, offer: Offer) -> bool:
    """True if one node of the offer per member is within the cluster's limits."""
    total_gpu_count = gpu_count + spec.gang_count * offer.resources.gpu_count
    total_price = price + spec.gang_count * (offer.price_micro_usd_per_hour or 0)
    price_max = policy.price_micro_usd_per_hour_max
    return (policy.gpu_count_max is None or total_gpu_count <= policy.gpu_count_max) and (
        price_max is None or total_price <= price_max
    )


def _allows(pool: NodePool, offer: Offer) -> bool:
    """True if the pool accepts the offer and has no limits of its own."""
    is_unlimited = pool.nodes_count_max is None and pool.gpu_count_max is None
    return is_unlimited and all(
        not accepted or value in accepted
        for accepted, value in (
            (pool.instance_types, offer.instance_type),
            (pool.gpu_models, offer.gpu_model),
            (pool.zones, offer.zone),
            (pool.capacity_types, offer.capacity_type),
        )
    )


# Invariant: the first of a burst waits for the rest no longer than the policy says.

SKEW = timedelta(seconds=10)  # twice the clock skew between two planners, and the tick after the wait


class BurstWaitInvariant:
    """Tracks since which plan each subject waits for a burst."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._since: dict[bytes, Instant] = {}  # by digest of the subject

    def on_plan(self, plan: Plan, policy: ScalingPolicy) -> None:
        """A plan was published under this policy."""
        waiting = [group for group in plan.deferred_groups if isinstance(group.reason, BatchWindowOpen)]
        members = [(member, group) for group in waiting for member in member_digests(group)]
        self._since = {member: self._since.get(member, plan.as_of) for member, _ in members}
        longest = timedelta(seconds=policy.batching.wait_seconds_max)
        for member, group in members:
            since = self._since[member]
            if plan.as_of - since > longest + SKEW:
                waited_seconds = (plan.as_of - since).total_seconds()
                names = ", ".join(group.subjects)
                what = f"one of {names} and others has waited for {waited_seconds:.0f} s for the rest of a burst"
                self._report(WORK_SERVED, f"{what}, the policy allows {longest.total_seconds():g} s")
                return
