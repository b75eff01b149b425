"""Invariants of the ledger and the store: the scaler knows what is charged and forces nothing while that is in doubt;
work pays for the nodes that it holds; the store keeps what its retention says.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.cost import CostAccrued, CostLedgerReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.drain import SpendExhausted
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes
from gpu_autoscaler.sim.cluster.scheduler import FINISHED
from gpu_autoscaler.sim.faults.injection import BROKER, COST_TRACKER, RECORD, STORE
from gpu_autoscaler.sim.invariants import LEDGER_EXACT, SPEND_LIMITED, STORE_BOUNDED
from gpu_autoscaler.sim.virtual_time import VirtualLoop

CHECK_SECONDS = 60.0
CALM_SECONDS = 60.0  # without a fault on the way from the ledger to the scaler
# Twice what the scaler tolerates: it takes a ledger that is 15 minutes behind for unknown.
IN_DOUBT = timedelta(minutes=30)
# A pod that has held its node for so long is known to the cost tracker, whatever was killed or unavailable meanwhile.
KNOWN = timedelta(minutes=30)
SETTLED = timedelta(minutes=1)
# The retention of the settings' defaults, and a day in which housekeeping may run.
SPANS_KEPT, PLANS_KEPT, SNAPSHOTS_KEPT = timedelta(days=2), timedelta(days=8), timedelta(days=8)
_GPUS = "nvidia.com/gpu"


class _Holding(NamedTuple):
    """A pod of a job on a node with its GPUs."""

    node_name: str
    job_id: JobId
    from_at: datetime


class BookkeepingInvariant:
    """Compares the ledger with the pods, and the scaler's state and the store with the ledger."""

    def __init__(
        self,
        loop: VirtualLoop,
        cluster: Kubernetes,
        cloud: Cloud,
        tables: Tables,
        report: Callable[[str, str], None],
        scaler_state: Callable[[], ClusterState | None],
        *,
        calm_since: Callable[..., float],
    ) -> None:
        self._loop = loop
        self._cloud = cloud
        self._tables = tables
        self._report = report
        self._scaler_state = scaler_state
        self._calm_since = calm_since
        self._holdings: dict[str, _Holding] = {}  # by uid of the pod
        self._held: list[tuple[_Holding, datetime]] = []  # of ended pods, with the end
        self._lost_at: list[datetime] = []
        self._is_reported = True  # the sums of the ledger are in the streams, or have never been there
        cluster.listen(self._on_change)

    def begin(self) -> None:
        """Check every minute."""
        self._loop.call_later(CHECK_SECONDS, self._look)

    def streams_lost(self) -> None:
        """What is known of pods and charges is lost until it is published again."""
        self._lost_at.append(self._loop.now())
        self._is_reported = False

    # ---- the scaler knows up to when each instance is charged

    def _look(self) -> None:
        state, tables = self._scaler_state(), self._tables
        away = () if self._is_reported else (COST_TRACKER,)
        calm_since = self._calm_since(BROKER, RECORD, STORE, "scaler", "scaler-2", *away)
        is_calm = self._loop.time() - calm_since > CALM_SECONDS
        for machine in self._cloud.alive() if state is not None and is_calm else ():
            charge = tables.charges.get(machine.provider_id)
            if charge is None or state is None or (machine.provider_id, charge.last.from_at) in tables.unconfirmed:
                continue
            known = state.charges.get(machine.provider_id)
            if known is None or known.until_at < charge.last.from_at:
                what = f"{machine.provider_id} is charged to {charge.last.to_at}, which the scaler has forgotten"
                self._report(LEDGER_EXACT, what)
                return
        self._loop.call_later(CHECK_SECONDS, self._look)

    # ---- nothing is forced while the ledger is in doubt

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        self._is_reported |= isinstance(recorded.fact, CostLedgerReported)
        if not isinstance(recorded.fact, ScalingPlanMade):
            return
        drains = recorded.fact.plan.drains
        forced = next((drain for drain in drains if isinstance(drain.reason, SpendExhausted)), None)
        if forced is None or (state := self._scaler_state()) is None:
            return
        for machine in self._cloud.alive():
            charge, seen_at = (
                self._tables.charges.get(machine.provider_id),
                state.instances_seen_at.get(machine.provider_id),
            )
            until_at = machine.launched_at if charge is None else charge.last.to_at
            if machine.is_ordered and seen_at is not None and seen_at - until_at > IN_DOUBT:
                what = f"{forced.node_name} is drained for spend, but {machine.provider_id} is charged to {until_at}"
                self._report(SPEND_LIMITED, what)
                return

    # ---- work pays for the nodes that it holds

    def _on_change(self, plural: str, entry: Entry) -> None:
        pod = entry.object
        if plural != PODS.plural or not isinstance(pod, core.Pod):
            return
        uid = pod.metadata.uid
        if entry.is_deleted or pod.status.phase in FINISHED:
            if (holding := self._holdings.pop(uid, None)) is not None:
                self._held.append((holding, self._loop.now()))
        elif uid not in self._holdings and (node_name := pod.spec.node_name) is not None:
            job_id = pod.metadata.labels.get(labels.JOB_ID)
            if job_id and _GPUS in pod.spec.containers[0].resources.requests:
                self._holdings[uid] = _Holding(node_name, JobId(job_id), self._loop.now())

    def judge(self) -> None:
        """Report at rest what the ledger and the store lack or have too much."""
        now = self._loop.now()
        held: dict[str, list[tuple[_Holding, datetime]]] = {}
        for holding, until_at in (*self._held, *((holding, now) for holding in self._holdings.values())):
            held.setdefault(holding.node_name, []).append((holding, until_at))
        for span in self._tables.ledger.values():
            paying = {share.job_id for share in span.shares}
            for holding, until_at in held.get(span.node_name or "", ()):
                is_known = holding.from_at + KNOWN < span.from_at and span.to_at < until_at - SETTLED
                if is_known and holding.job_id not in paying and span.total_micro_usd and not self._was_lost(span):
                    what = f"{holding.job_id} held {span.node_name} from {span.from_at}, and has no share of its cost"
                    self._report(LEDGER_EXACT, what)
                    return
        self._judge_store(now)

    def _was_lost(self, span: CostAccrued) -> bool:
        return any(lost_at < span.to_at and span.from_at < lost_at + KNOWN for lost_at in self._lost_at)

    # ---- the store keeps what its retention says

    def _judge_store(self, now: datetime) -> None:
        tables = self._tables
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        last = {id(charge.last) for charge in tables.charges.values()}
        spans = [
            span
            for key, span in tables.ledger.items()
            if span.from_at < midnight - SPANS_KEPT and key not in tables.unconfirmed and id(span) not in last
        ]
        newest = max((row.made_at for row in tables.plans.values()), default=now)
        plans = [row for row in tables.plans.values() if row.made_at < newest - PLANS_KEPT]
        snapshots = [row for row, _ in tables.snapshots.values() if row.saved_at < now - SNAPSHOTS_KEPT]
        for name, rows in (("spans", spans), ("plans", plans), ("snapshots", snapshots)):
            if rows:
                self._report(STORE_BOUNDED, f"the store has {len(rows)} {name} beyond their retention")
                return
