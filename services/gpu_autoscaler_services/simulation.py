"""The system for the simulator: every service put together as in `wiring.py`, on the adapters of a run.

The simulator imports no service; it is handed ROLES.
"""

from collections.abc import Callable, Hashable, Mapping
from datetime import datetime, timedelta

from gpu_autoscaler.core.buying.sparing import is_to_leave_spot
from gpu_autoscaler.core.foresight import ForecastGauges
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.job_budgets import job_spends
from gpu_autoscaler.core.queueing.scoring import is_to_be_scored
from gpu_autoscaler.core.remembered import Kept, remembered
from gpu_autoscaler.core.removing.deleted import guards_due
from gpu_autoscaler.core.removing.leftovers import leftovers
from gpu_autoscaler.core.spending.money import counted_at
from gpu_autoscaler.core.state import ClusterState, JobRecord, Tombstone
from gpu_autoscaler.core.views import queue
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.sim.glances import plan_inputs, queue_inputs
from gpu_autoscaler.sim.seat import EXPORTER_URL, METADATA_URL, Resume, Role, Roles, Seat
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.farewells import Farewells
from gpu_autoscaler_services.scaler.guards import Guards
from gpu_autoscaler_services.scaler.inventory import InstanceWatch
from gpu_autoscaler_services.scaler.leftovers import Leftovers
from gpu_autoscaler_services.scaler.past import Past
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.service import Digests, Scaler
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import Scheduler
from gpu_autoscaler_services.spot_watcher.events import CloudEvents
from gpu_autoscaler_services.spot_watcher.offers import CentralOffers
from gpu_autoscaler_services.spot_watcher.polls import NodesNotices
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher

NAMESPACE = "default"
# Seldom enough for long runs, often enough that every minute's summary has its sample.
SCRAPE_SECONDS = 30.0

_MOMENT = timedelta(microseconds=1)
# What says how much of their budgets jobs have spent.
_SPENT_BY = (
    "jobs", "pods", "orders", "instances", "nodes", "nodes_gone", "drains", "notices", "spent_by_job", "charges",
)  # fmt: skip
_spent: Kept[tuple[tuple[object, ...], bool]] = Kept(4)  # with what it was read from

_core_digest = core_digest()
_metrics = Metrics("simulation")  # nobody reads them; they are made once, as gauges are dear


class _Figures:
    """Says at once that the second opinion refused a plan; nobody looks at what is foreseen."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring

    def count_refused_plan(self) -> None:
        """A plan was refused."""
        self._ring()

    def set_forecast(self, foresight: ForecastGauges) -> None:
        """Take it in."""


def pod_watcher(seat: Seat) -> Service:
    """Kubernetes -> facts."""
    return PodWatcher(seat.kube, seat.cluster)


def dcgm_ingest(seat: Seat) -> Service:
    """Exporters -> facts."""
    return DcgmIngest(seat.view, seat.exporters, dcgm_url=EXPORTER_URL, scrape_seconds=SCRAPE_SECONDS)


def notices(seat: Seat) -> Service:
    """Metadata of all nodes -> facts."""
    return SpotWatcher(NodesNotices(seat.view, seat.metadata, metadata_url=METADATA_URL))


def prices(seat: Seat) -> Service:
    """What is for sale, and the cloud's queue where it has one -> facts."""
    events = None if seat.events is None else CloudEvents(seat.view, seat.events)
    return SpotWatcher(CentralOffers(seat.view, seat.provider), events)


def scaler(seat: Seat) -> Service:
    """State -> plan -> effect."""
    installation = seat.cluster.installation
    purchases = Purchases(seat.view, seat.provider, installation, seat.clock.now)
    return Scaler(
        seat.view,
        seat.policy,
        Executor(
            purchases,
            Drains(seat.view, seat.kube, seat.clock),
            seat.store,
            Guards(seat.kube),
            Farewells(seat.kube),
            Leftovers(seat.kube, seat.provider),
        ),
        Past(seat.store, seat.policy),
        InstanceWatch(seat.provider, installation, seat.clock),
        digests=Digests(policy=policy_digest(seat.policy), core=_core_digest),
        figures=_Figures(seat.on_refused_plan),
    )


def scheduler(seat: Seat) -> Service:
    """Requests -> queue -> placements -> Kubernetes Jobs."""
    return Scheduler(seat.view, seat.policy, seat.store, Binder(seat.kube, NAMESPACE), seat.clock.now, seat.seed)


def cost_tracker(seat: Seat) -> Service:
    """Instances and pods -> money."""
    return CostTracker(seat.view, seat.store, instances_without_price=_metrics.instances_without_price)


def scaler_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """What the scaler's tick depends on; before the first plan the store is asked each time what was decided before."""
    if view.state.last_plan_sequence == 0 and view.state.restored_at is None:
        return object()  # equal to nothing
    if guards_due(view.state, policy, now) or leftovers(view.state, policy, now):
        return object()  # a write may fail, and is tried again; a cloud is asked more than once
    return plan_inputs(view, policy, now)


def schedule_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """What the scheduler's tick depends on: room while somebody waits for it; a loss is asked about outside, and an
    expectation is held against what came as soon as that is known."""
    what = _asked_of(view.state.jobs, view.state.pods, view.state.pods_gone, policy)
    if what in ("a loss", "a score"):
        return object()  # equal to nothing
    if any(is_to_leave_spot(job, policy, now) for job in queue(view.state)):
        return object()  # its Job is looked at
    if _is_nearly_spent(view.state, counted_at(now)):
        return object()  # somebody is told, or ends
    return queue_inputs(view, policy, now) if what == "a place" else what


def _is_nearly_spent(state: ClusterState, slot_end: datetime) -> bool:
    """True where a job has spent its budget, or nearly so; which in one slot of money changes by facts alone.

    Of what nodes are it is their prices that count: telemetry and signs of life say nothing new.
    """
    read = (*(getattr(state, name) for name in _SPENT_BY), slot_end)
    key = tuple(map(id, read))
    kept = _spent.get(key)
    if kept is None:
        kept = (read, any(each.is_nearly_spent for each in job_spends(state, slot_end - _MOMENT)))
        _spent.put(key, kept)
    return kept[1]


@remembered(8)
def _asked_of(
    jobs: Mapping[JobId, JobRecord],
    pods: Mapping[PodUid, PodObserved],
    pods_gone: Mapping[int, Mapping[PodUid, Tombstone]],
    policy: ScalingPolicy,
) -> str:
    state = ClusterState(jobs=jobs, pods=pods, pods_gone=pods_gone)
    if losses(state, policy):
        return "a loss"
    if any(is_to_be_scored(job) for job in jobs.values()):
        return "a score"
    return "a place" if queue(state) else "nothing"


def snapshots_of(service: type[Service]) -> Resume:
    """How a service starts that says so."""
    return lambda seat: Snapshots(
        service,
        seat.view,
        seat.store,
        seat.streams,
        clock=seat.clock,
        metrics=_metrics,
        core_digest=_core_digest,
    )


ROLES: Roles = {
    "pod_watcher": Role(pod_watcher),
    "dcgm_ingest": Role(dcgm_ingest),
    "notices": Role(notices),
    "prices": Role(prices),
    "scheduler": Role(scheduler, glance=schedule_inputs, snapshots=snapshots_of(Scheduler)),
    "scaler": Role(scaler, glance=scaler_inputs, snapshots=snapshots_of(Scaler), keeps_snapshots=True),
    "cost_tracker": Role(cost_tracker),
}
