"""Invariant: after the broker lost everything, state is rebuilt from Kubernetes, the cloud and the store within one
reconcile period, without purchases or drains that would not have been made otherwise.

Checked while no other fault has occurred since the loss; all other invariants hold throughout.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import cast

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.node import NodeInstanceListed, NodeListed
from gpu_autoscaler.events.pod import PodListed
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.drain import NodeIdle
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.sim.cluster.scheduler import FINISHED
from gpu_autoscaler.sim.faults.injection import CLOUD, KINDS, RECORD, Faults
from gpu_autoscaler.sim.invariants import STATE_REBUILT
from gpu_autoscaler.sim.process_pool import ProcessPool
from gpu_autoscaler.sim.virtual_time import VirtualLoop

REBUILT_SECONDS = 40.0  # one reconcile period of 30 s and the ticks it needs, once all services run
COVERED_SECONDS = 120.0  # after a loss: nothing ordered before is bought again
MARGIN_SECONDS = 60.0  # of a boot that is not late yet
SKEW_SECONDS = 10.0  # between the clocks of the pod watcher and the scaler
_LISTS: tuple[type[Fact], ...] = (PodListed, NodeListed, NodeInstanceListed)


class RecoveryInvariant:
    """Tracks the state at the time of the loss."""

    def __init__(
        self,
        loop: VirtualLoop,
        bus: SimBus,
        faults: Faults,
        tables: Tables,
        policies: Policies,
        workloads: Workloads,
        cloud: Cloud,
        report: Callable[[str, str], None],
    ) -> None:
        self.process_pool: ProcessPool | None = None  # set after construction
        self._loop = loop
        self._bus = bus
        self._faults = faults
        self._tables = tables
        self._policies = policies
        self._cloud = cloud
        self._report = report
        self._lost_at: datetime | None = None
        self._happened_count = 0
        self._accepted: frozenset[JobId] = frozenset()
        self._bought_for: dict[str, frozenset[ActionId]] = {}  # by demand: purchases of the last plan
        self._busy_at: dict[str, datetime] = {}  # by node: when a pod last ran there
        self._at_work: set[str] = set()  # pod uids
        self._unlisted: set[type[Fact]] = set()  # lists not published since the loss
        workloads.cluster.listen(self._on_change)
        bus.listen(self._on_fact)

    def streams_lost(self) -> None:
        """All streams are lost now."""
        self._lost_at = self._loop.now()
        self._unlisted = set(_LISTS)
        self._happened_count = len(self._faults.happened)
        self._accepted = frozenset(job_id for job_id, row in self._tables.jobs.items() if row.outcome is None)
        self._wait_for_services(self._lost_at)

    def _wait_for_services(self, lost_at: datetime) -> None:
        """Wait until every service runs."""
        if lost_at != self._lost_at:
            return
        is_back = self.process_pool is not None and self.process_pool.is_complete and not self._bus.is_away
        seconds, then = (REBUILT_SECONDS, self._check_jobs) if is_back else (1.0, self._wait_for_services)
        self._loop.call_later(seconds, then, lost_at)

    def _check_jobs(self, lost_at: datetime) -> None:
        if lost_at != self._lost_at or not self._is_quiet():
            return
        known_jobs = {
            recorded.fact.job_id for recorded in self._bus.facts["JOB"] if isinstance(recorded.fact, JobQueued)
        }
        if forgotten := sorted(self._accepted - known_jobs):
            self._report(STATE_REBUILT, f"accepted jobs unknown {REBUILT_SECONDS:g} s after the restart: {forgotten}")

    def _is_quiet(self, *except_at: str) -> bool:
        """True if no other fault has occurred since the loss, except at these places."""
        since = self._faults.happened[self._happened_count :]
        return self._lost_at is not None and all(KINDS[kind].place in ("", RECORD, *except_at) for kind, _ in since)

    def _on_fact(self, recorded: Recorded) -> None:
        self._unlisted.discard(type(recorded.fact))
        if isinstance(recorded.fact, ScalingDecisionsRestored) and self._unlisted:
            missing = ", ".join(sorted(fact.__name__ for fact in self._unlisted))
            self._report(STATE_REBUILT, f"past decisions are resumed before these lists were published: {missing}")
        if isinstance(recorded.fact, ScalingPlanMade):
            plan = recorded.fact.plan
            # Orders are known from the store, whatever the cloud does or shows.
            if self._lost_at is not None and self._is_quiet(CLOUD):
                self._check_purchases(plan, self._lost_at)
            if self._is_quiet():
                self._check_drains(plan)
            self._record_purchases(plan)

    def _record_purchases(self, plan: Plan) -> None:
        bought: dict[str, set[ActionId]] = {}
        for decision in plan.purchases:
            if isinstance(decision.reason, UnmetDemand):
                for key in decision.reason.demand:
                    # A gang may be bought by several plans, whose nodes become late or ended at different times.
                    before = self._bought_for.get(key, ()) if decision.gang is not None else ()
                    bought.setdefault(key, set(filter(self._is_alive, before))).add(decision.action_id)
        self._bought_for.update({key: frozenset(actions) for key, actions in bought.items()})

    def _is_alive(self, action: ActionId) -> bool:
        machine = self._cloud.of_token(action)
        return machine is None or machine.is_alive

    def _check_purchases(self, plan: Plan, lost_at: datetime) -> None:
        """Work with a node booting since before the loss gets no second node."""
        if (self._loop.now() - lost_at).total_seconds() > COVERED_SECONDS:
            return
        for decision in plan.purchases:
            if isinstance(decision.reason, UnmetDemand):
                demand = decision.reason.demand
                if demand and all(self._is_covered(key, lost_at) for key in demand):
                    self._report(STATE_REBUILT, f"{decision.action_id} buys a second node for {', '.join(demand)}")

    def _is_covered(self, key: str, lost_at: datetime) -> bool:
        youngest = self._loop.now() - timedelta(seconds=self._policies.now.boot_seconds_max - MARGIN_SECONDS)
        machines = [self._cloud.of_token(action) for action in self._bought_for.get(key, ())]
        return bool(machines) and all(
            machine is not None
            and youngest < machine.launched_at < lost_at
            and machine.is_alive
            and not machine.is_usable
            and machine.notice is None
            for machine in machines
        )

    def _check_drains(self, plan: Plan) -> None:
        """A node is drained as idle only after the idle time."""
        for decision in plan.drains:
            if not isinstance(decision.reason, NodeIdle):
                continue
            busy_at = self._busy_at.get(decision.node_name)
            if busy_at is None:
                continue
            idle_seconds = (self._loop.now() - busy_at).total_seconds()
            if idle_seconds < decision.reason.idle_seconds_max - SKEW_SECONDS:
                self._report(
                    STATE_REBUILT, f"{decision.node_name} drains as idle, but had work {idle_seconds:.0f} s ago"
                )

    def _on_change(self, plural: str, entry: Entry) -> None:
        if plural != PODS.plural:
            return
        pod = cast("core.Pod", entry.object)
        uid, node_name = pod.metadata.uid, pod.spec.node_name
        if node_name is None:
            return
        is_over = entry.is_deleted or pod.status.phase in FINISHED
        if not is_over or uid in self._at_work:
            self._busy_at[node_name] = self._loop.now()
        if is_over:
            self._at_work.discard(uid)
        else:
            self._at_work.add(uid)
