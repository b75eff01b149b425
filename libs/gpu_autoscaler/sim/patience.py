"""Invariants of liveness: work that could be served does not wait, and the first of a burst waits no longer than the
policy says.

Checked while no fault is active, and at the end of the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.spending.money import spend_caps
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.kubernetes import Kubernetes
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.store import Tables
from gpu_autoscaler.sim.timeline import VirtualLoop
from gpu_autoscaler.sim.workloads import Workloads

LOOKED_SECONDS = 60.0
WAITING_SECONDS_MAX = 1800.0  # two of the longest boot timeouts: the first purchase may fail
WORK_SERVED = "work is served"


class Run(Protocol):
    """Parts of the run that are checked."""

    loop: VirtualLoop
    faults: Faults
    cluster: Kubernetes
    cloud: Cloud
    policies: Policies
    tables: Tables
    workloads: Workloads


class Patience:
    """Tracks since when each servable job waits."""

    def __init__(self, run: Run, breaks: Callable[[str, str], None]) -> None:
        self._run = run
        self._breaks = breaks
        self._since: dict[JobId, float] = {}

    def begin(self) -> None:
        """Check every minute."""
        self._run.loop.call_later(LOOKED_SECONDS, self._look)

    def _look(self) -> None:
        now, run = self._run.loop.time(), self._run
        calm_at = max(run.faults.disturbed_until() + LOOKED_SECONDS, now if run.policies.now.is_frozen else 0.0)
        self._since = {job_id: max(self._since.get(job_id, now), calm_at) for job_id in servable(run)}
        for job_id, since in self._since.items():
            if now - since > WAITING_SECONDS_MAX:
                self._breaks(WORK_SERVED, f"job {job_id} has waited for {now - since:.0f} s, and could have been served")
                return
        run.loop.call_later(LOOKED_SECONDS, self._look)


class Asked(Protocol):
    """Parts of the run that decide whether a job is servable."""

    cluster: Kubernetes
    cloud: Cloud
    policies: Policies
    tables: Tables
    workloads: Workloads


def servable(run: Asked) -> list[JobId]:
    """Return waiting jobs for whose members nodes are available within all limits."""
    standing = [machine for machine in run.cloud.machines if machine.state != "terminated"]
    gpus = sum(machine.offer.resources.gpu_count for machine in standing)
    price = sum(machine.price_micro_usd_per_hour for machine in standing)
    policy = run.policies.now
    if spend_caps(policy):
        return []  # whether the spend limits leave enough is not predicted here
    at_work = Counter(
        pod.metadata.labels.get(labels.JOB_ID)
        for pod in run.cluster.all(PODS)
        if pod.spec.node_name and pod.status.phase != "Succeeded"
    )
    for work in run.workloads.works.values():  # completed members wait for nothing, even without a pod
        at_work[work.job.metadata.name] += len(work.done)
    # A size schedule of the policy may set a lower maximum for a while.
    sizes = (size.nodes_count_max for size in policy.scheduled_limits if size.holds(run.cluster.now()))
    nodes_max = min((policy.nodes_count_max, *(most for most in sizes if most is not None)))
    found: list[JobId] = []
    for row in run.tables.jobs.values():
        wanted = row.spec
        waits = row.outcome is None and at_work[wanted.job_id] < wanted.gang_count
        is_limited = wanted.project_id in {part.name for part in policy.limits.projects}
        if not waits or is_limited or len(standing) + wanted.gang_count > nodes_max:
            continue
        if any(
            _is_allowed(policy, gpus, price, wanted, offer)
            for offer in _right_for(wanted, policy, run.cloud)
            if not run.cloud.is_out_of(offer)
        ):
            found.append(wanted.job_id)
    return found


def _right_for(wanted: JobSpec, policy: ScalingPolicy, cloud: Cloud) -> Iterator[Offer]:
    for offer in cloud.offers:
        if (
            any(_allows(pool, offer) for pool in policy.pools)
            and offer.zone not in {part.name for part in policy.limits.zones}
            and wanted.member_resources.fits_in(offer.resources)
            and (not wanted.models or offer.gpu_model in wanted.models)
            and (wanted.gpu_memory_bytes_min or 0) <= (offer.gpu_memory_bytes or 0)
            and (wanted.is_preemptible or offer.capacity_type is not CapacityType.SPOT)
        ):
            yield offer


def _is_allowed(policy: ScalingPolicy, gpus: int, price: int, wanted: JobSpec, offer: Offer) -> bool:
    """True if one node of the offer per member is within the cluster's limits."""
    gpus_then = gpus + wanted.gang_count * offer.resources.gpu_count
    price_then = price + wanted.gang_count * (offer.price_micro_usd_per_hour or 0)
    price_max = policy.price_micro_usd_per_hour_max
    return (policy.gpu_count_max is None or gpus_then <= policy.gpu_count_max) and (
        price_max is None or price_then <= price_max
    )


def _allows(pool: NodePool, offer: Offer) -> bool:
    """True if the pool accepts the offer and has no limits of its own."""
    is_unlimited = pool.nodes_count_max is None and pool.gpu_count_max is None
    return is_unlimited and all(
        not wanted or value in wanted
        for wanted, value in (
            (pool.instance_types, offer.instance_type),
            (pool.gpu_models, offer.gpu_model),
            (pool.zones, offer.zone),
            (pool.capacity_types, offer.capacity_type),
        )
    )
