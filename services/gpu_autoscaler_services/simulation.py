"""Composes every service as its `spec.py` does, on the simulation's adapters.

The simulator imports no service; ROLES is passed to it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.core.disruption.spot_returns import is_save_requested
from gpu_autoscaler.core.identity_cache import RecentValues, cached_by_identity
from gpu_autoscaler.core.limits.spend import SpendUse, counted_at
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.forecast_gauges import ForecastGauges
from gpu_autoscaler.core.queueing.job_budgets import job_spends
from gpu_autoscaler.core.queueing.scoring import is_to_be_scored, run_score
from gpu_autoscaler.core.state.queries import queue
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, Tombstone
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.runtime.config import StoreSettings
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.sim.adapters.assembly import AdapterBundle, Resume, Role, Roles
from gpu_autoscaler.sim.adapters.provider import EXPORTER_URL, METADATA_URL
from gpu_autoscaler.sim.tick_inputs import plan_inputs, queue_inputs
from gpu_autoscaler_services.cost_tracker.housekeeping import Housekeeping
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.idle_workloads import IdleWorkloads
from gpu_autoscaler_services.scaler.inventory import InstanceWatch
from gpu_autoscaler_services.scaler.node_taints import NodeTaints
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.request_answers import RequestAnswers
from gpu_autoscaler_services.scaler.service import Digests, Scaler
from gpu_autoscaler_services.scaler.upkeep import UpkeepSteps
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import Scheduler, scheduler_for
from gpu_autoscaler_services.spot_watcher.interruption_queue import InterruptionQueue
from gpu_autoscaler_services.spot_watcher.metadata_poller import ManagedNodesPoller
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher

NAMESPACE = "default"
# Rare enough for long runs, and at least one sample per minute of the summaries.
SCRAPE_SECONDS = 30.0

_MOMENT = timedelta(microseconds=1)
# Fields of the state that determine the spend of job budgets.
_SPENT_BY = (
    "jobs", "pods", "orders", "instances", "nodes", "nodes_gone", "drains", "notices", "spent_by_job", "charges",
)  # fmt: skip
_Spent = tuple[tuple[JobId, JobPlaced | None, bool], ...]
_spent_cache: RecentValues[tuple[int, ...], tuple[tuple[object, ...], _Spent]] = RecentValues(4)  # with its inputs

_core_digest = core_digest()
_retention = StoreSettings()
_metrics = Metrics("simulation")  # never exported; created once, as creating gauges is slow


class _Figures:
    """Reports at once that the plan check refused a plan; ignores forecasts and budgets."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report

    def count_refused_plan(self) -> None:
        """Report a refused plan."""
        self._report()

    def set_forecast(self, forecast: ForecastGauges) -> None:
        """Ignore the forecast."""

    def set_spend(self, uses: Callable[[], Sequence[SpendUse]]) -> None:
        """Ignore the spend budgets."""


def prices(adapters: AdapterBundle) -> Service:
    """Samples offers, and reads the interruption queue if there is one."""
    events = adapters.interruption_queue
    queue = None if events is None else InterruptionQueue(adapters.view, events)
    return SpotWatcher(OffersPoller(adapters.view, adapters.provider), queue)


def scaler(adapters: AdapterBundle) -> Service:
    """Plans and executes."""
    installation = adapters.cluster.installation
    purchases = Purchases(adapters.view, adapters.provider, installation, adapters.clock.now)
    return Scaler(
        adapters.view,
        adapters.policy,
        Executor(
            purchases,
            Drains(adapters.view, adapters.kube, adapters.clock, adapters.hooks),
            adapters.store,
            UpkeepSteps(
                Finalizers(adapters.kube),
                NodeTaints(adapters.kube),
                CheckpointNotices(adapters.kube, adapters.hooks),
                OrphanedNodes(adapters.kube, adapters.provider),
                RequestAnswers(adapters.kube),
                IdleWorkloads(adapters.kube),
                adapters.clock.now,
            ),
        ),
        DecisionRecovery(adapters.store, adapters.policy, adapters.seed),
        InstanceWatch(adapters.provider, installation, adapters.clock),
        digests=Digests(policy=policy_digest(adapters.policy), core=_core_digest),
        metrics=_Figures(adapters.on_refused_plan),
    )


def scheduler(adapters: AdapterBundle) -> Service:
    """Queues, places and releases jobs."""
    return scheduler_for(adapters.policy)(
        adapters.view,
        adapters.policy,
        adapters.store,
        Binder(adapters.kube, NAMESPACE),
        adapters.clock.now,
        adapters.seed,
    )


def scaler_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """Return the inputs of the scaler's tick; before the first plan every tick reads past decisions from the store."""
    if view.state.last_plan_sequence == 0 and view.state.restored_at is None:
        return object()  # never equal
    return plan_inputs(view, policy, now)


def schedule_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """Return the inputs of the scheduler's tick: job budgets that are spent, and capacity while jobs are queued; losses
    are looked up outside, estimates are scored at once, and a job that is asked to save ends by what many facts tell.
    """
    waiting_for = _waiting_for(view.state.jobs, view.state.pods, view.state.pods_gone, policy)
    if waiting_for in ("loss", "score") or is_save_requested(view.state, policy):
        return object()  # never equal
    spent = _spent(view.state, counted_at(now))
    if waiting_for != "capacity":
        return (spent, waiting_for)
    is_planned = policy.quotas.is_priority_preemption_on  # a plan tells where buying is barred
    return (spent, (plan_inputs if is_planned else queue_inputs)(view, policy, now))


def _spent(state: ClusterState, slot_end: datetime) -> _Spent:
    """Return the jobs that have nearly spent their job budget, with their placement, and whether nothing is left of it.
    Within one slot this changes only with these facts.

    Of nodes only prices count: telemetry and signs of life change nothing.
    """
    inputs = (*(getattr(state, name) for name in _SPENT_BY), slot_end)
    key = tuple(map(id, inputs))
    cached = _spent_cache.get(key)
    if cached is None:
        spends = job_spends(state, slot_end - _MOMENT)
        ids = ((spend.spec.job_id, spend.is_spent) for spend in spends if spend.is_nearly_spent)
        cached = (inputs, tuple((job_id, state.jobs[job_id].placed, is_spent) for job_id, is_spent in ids))
        _spent_cache.put(key, cached)
    return cached[1]


_ALL_CAUSES_KNOWN_AT = datetime.max.replace(tzinfo=UTC)


@cached_by_identity(8)
def _waiting_for(
    jobs: Mapping[JobId, JobRecord],
    pods: Mapping[PodUid, PodObserved],
    pods_gone: Mapping[int, Mapping[PodUid, Tombstone]],
    policy: ScalingPolicy,
) -> str:
    state = ClusterState(jobs=jobs, pods=pods, pods_gone=pods_gone)
    if losses(state, policy, _ALL_CAUSES_KNOWN_AT):
        return "loss"
    completed = ((job_id, job) for job_id, job in jobs.items() if job.finished and not job.run_scored)
    if any(is_to_be_scored(job) for job in jobs.values()) or any(
        run_score(job_id, job, _ALL_CAUSES_KNOWN_AT) for job_id, job in completed
    ):
        return "score"
    return "capacity" if queue(state) else "nothing"


def snapshots_of(service: type[Service]) -> Resume:
    """Return how a service resumes from snapshots: of the scaler, or with a memory its own."""
    return lambda adapters, memory: Snapshots(
        service,
        adapters.view,
        adapters.store if memory is None else adapters.store_apart,
        adapters.streams if memory is None else adapters.streams_apart,
        clock=adapters.clock,
        metrics=_metrics,
        core_digest=_core_digest,
        memory=memory,
    )


def cost_tracker(adapters: AdapterBundle) -> Service:
    """Charges instances, and keeps the store from growing."""
    housekeeping = Housekeeping(
        adapters.store_apart,
        span_days=_retention.span_days,
        ledger_days=_retention.ledger_days,
        plan_days=_retention.plan_days,
        job_days=_retention.job_days,
    )
    return CostTracker(
        adapters.view,
        adapters.store,
        instances_without_price=_metrics.instances_without_price,
        housekeeping=housekeeping,
    )


ROLES: Roles = {
    "pod_watcher": Role(
        lambda adapters: PodWatcher(
            adapters.kube,
            adapters.cluster,
            are_quotas_watched=adapters.are_quotas_watched,
            are_provisioning_requests_served=adapters.are_provisioning_requests_served,
            are_namespaces_watched=adapters.are_namespaces_watched,
        )
    ),
    "dcgm_ingest": Role(
        lambda adapters: DcgmIngest(
            adapters.view, adapters.exporters, dcgm_url=EXPORTER_URL, scrape_seconds=SCRAPE_SECONDS
        ),
        snapshots=snapshots_of(DcgmIngest),
        needs_store=False,
    ),
    "notices": Role(
        lambda adapters: SpotWatcher(ManagedNodesPoller(adapters.view, adapters.metadata, metadata_url=METADATA_URL)),
        snapshots=snapshots_of(SpotWatcher),
        needs_store=False,
    ),
    "prices": Role(prices, snapshots=snapshots_of(SpotWatcher), needs_store=False),
    "scheduler": Role(scheduler, tick_inputs=schedule_inputs, snapshots=snapshots_of(Scheduler)),
    "scaler": Role(scaler, tick_inputs=scaler_inputs, snapshots=snapshots_of(Scaler), keeps_snapshots=True),
    "cost_tracker": Role(cost_tracker, snapshots=snapshots_of(CostTracker), keeps_snapshots=True, has_memory=True),
}
