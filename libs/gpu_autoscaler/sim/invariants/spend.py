"""Invariants of spend: no purchase exceeds a daily or monthly limit of the simulated invoice; running nodes exceed a
hard limit only for protected work, during faults or while the brake holds; a job ends when its job budget is spent.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.policy.limit_settings import SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.drain import SpendExhausted
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.cluster.scheduler import FINISHED
from gpu_autoscaler.sim.invariants import SPEND_LIMITED
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.store.protocol import JobRow

CHECK_SECONDS = 60.0
# A drain, a termination and a boot: decisions made during faults or for protected work have effect for this long.
EXCUSED_SECONDS = 3600.0
# A pod created this shortly before its node's drain may not have been known.
NEW_SECONDS = 60.0
# From exceeding a lowered limit to cordoning the last unprotected node: a few plans.
OVERRUN_SECONDS = 300.0


class Cap(NamedTuple):
    """One spend limit, read from the policy independently of the core."""

    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    period: str
    micro_usd_max: int
    is_hard: bool


def caps(policy: ScalingPolicy) -> Iterator[Cap]:
    """Yield every daily or monthly spend limit."""
    owned: list[tuple[str, SpendPolicy]] = [("cluster", policy.limits.spend)]
    owned += [(f"pool/{part.name}", part.spend) for part in policy.pools]
    owned += [(f"zone/{part.name}", part.spend) for part in policy.limits.zones]
    owned += [(f"project/{part.name}", part.spend) for part in policy.limits.projects]
    for owner, spend in owned:
        for period, limit in (("day", spend.day_micro_usd_max), ("month", spend.month_micro_usd_max)):
            if limit is not None:
                yield Cap(owner, period, limit, spend.is_hard)


class SpendInvariant:
    """Computes the cloud's invoice by the owner of each limit."""

    def __init__(
        self,
        loop: VirtualLoop,
        cloud: Cloud,
        cluster: Kubernetes,
        policies: Policies,
        jobs: Mapping[JobId, JobRow],
        report: Callable[[str, str], None],
        *,
        calm_since: Callable[..., float],
    ) -> None:
        self._loop = loop
        self._cloud = cloud
        self._cluster = cluster
        self._policies = policies
        self._jobs = jobs
        self._report = report
        self._calm_since = calm_since
        self.is_braked: Callable[[], bool] = lambda: False  # removals by force wait for a person
        self._excused_at: dict[str, float] = {}  # by owner: when exceeding its limit was last excused
        self._drained_at: dict[str, datetime] = {}  # by node name: when it was drained to enforce a limit
        self._machines: dict[ActionId, Machine] = {}
        self._on_order: dict[ActionId, BuyNode] = {}
        self._known = {cap[:2]: cap for cap in caps(policies.now)}
        self._lowered: set[tuple[str, str]] = set()
        self._open_since: dict[tuple[str, str], dict[str, float]] = {}  # by limit and node name
        loop.call_later(CHECK_SECONDS, self._look)

    def on_plan(self, plan: Plan, *, is_calm: bool) -> None:
        """Check purchases against limits and reserved spend; note nodes drained to enforce a limit. With faults a plan
        may not know all orders.
        """
        for decision in plan.decisions:
            if isinstance(decision, DrainNode) and isinstance(decision.reason, SpendExhausted):
                self._drained_at[decision.node_name] = self._loop.now()
            elif isinstance(decision, ReleaseInstance):
                self.order_ended(decision.order_action_id)
        bought = plan.purchases
        for cap in caps(self._policies.now) if bought else ():
            counted = [
                purchase
                for purchase in bought
                if _is_counted(cap, purchase.pool, purchase.offer, dict(purchase.labels))
            ]
            if counted and self._bill(cap) > cap.micro_usd_max:
                self._report(SPEND_LIMITED, f"{len(counted)} nodes are bought, but {self._description(cap)}")
            elif counted and is_calm and self._bill(cap) + self._reserved(cap, counted) > cap.micro_usd_max:
                self._report(
                    SPEND_LIMITED, f"{self._reserved(cap, counted)} more are reserved, but {self._description(cap)}"
                )
        self._on_order = {key: purchase for key, purchase in self._on_order.items() if self._is_coming(purchase)}
        self._on_order.update((purchase.action_id, purchase) for purchase in bought)

    def order_ended(self, action_id: ActionId) -> None:
        """The order was refused or released."""
        self._on_order.pop(action_id, None)

    def on_launch(self, machine: Machine) -> None:
        """Track the machine of an order."""
        self._machines[machine.order.action_id] = machine

    def _reserved(self, cap: Cap, bought: list[BuyNode]) -> int:
        """Return the maximum cost of the work that orders were placed for. Running machines, boots and drains are left
        out, so the reserved spend is never less.
        """
        now = self._loop.now()
        coming = [purchase for purchase in self._on_order.values() if self._is_coming(purchase)]
        counted = [
            purchase for purchase in coming if _is_counted(cap, purchase.pool, purchase.offer, dict(purchase.labels))
        ]
        total = 0
        for purchase in (*counted, *bought):
            remaining = _period_end(cap.period, now) - now
            if purchase.work_seconds_max is not None:
                remaining = min(remaining, timedelta(seconds=purchase.work_seconds_max))
            total += cost_micro_usd(purchase.offer.price_micro_usd_per_hour or 0, remaining)
        return total

    def _is_coming(self, order: BuyNode) -> bool:
        machine = self._machines.get(order.action_id)
        if machine is None:
            return self._loop.now() < order.deadline_at
        return machine.is_alive and not machine.is_usable and machine.notice is None

    def may_disrupt(self, machine: Machine, pod: core.Pod) -> bool:
        """True if the node was drained to enforce a spend limit and the pod was not protected then."""
        drained_at = self._drained_at.get(machine.node_name)
        if drained_at is None:
            return False
        started_at = pod.status.start_time
        is_new = started_at is None or (drained_at - started_at).total_seconds() < NEW_SECONDS
        return is_new or not self._is_protected(pod)

    def _look(self) -> None:
        now = self._loop.time()
        self._note_lowered()
        for cap in caps(self._policies.now):
            machines = [machine for machine in self._cloud.machines if machine.is_alive and self._is_of(cap, machine)]
            is_protected = any(self._is_protected(pod) for machine in machines for pod in self._cloud.pods_on(machine))
            if is_protected or self._is_held():
                self._excused_at[cap.owner] = now
            since = max(self._excused_at.get(cap.owner, 0.0), self._calm_since())
            if not cap.is_hard:
                continue
            if cap[:2] in self._lowered:
                if (machine := self._overrunning_machine(cap, machines)) is not None:
                    self._report(SPEND_LIMITED, f"{machine.node_name} is not drained, but {self._description(cap)}")
                    return
            elif now - since > EXCUSED_SECONDS and self._bill(cap) > cap.micro_usd_max:
                self._report(SPEND_LIMITED, self._description(cap))
                return
        self._loop.call_later(CHECK_SECONDS, self._look)

    def _is_held(self) -> bool:
        """True while no node is removed to enforce a limit, by a freeze or by the brake."""
        return self._policies.now.is_frozen or self.is_braked()

    def _note_lowered(self) -> None:
        """A tightened limit may already be exceeded by earlier purchases."""
        now = {cap[:2]: cap for cap in caps(self._policies.now)}
        for key, cap in now.items():
            before = self._known.get(key)
            if before is None or not before.is_hard or cap.micro_usd_max < before.micro_usd_max:
                self._lowered.add(key)
        self._known = now

    def _overrunning_machine(self, cap: Cap, machines: list[Machine]) -> Machine | None:
        """Return an unprotected node that still accepts pods long after a lowered limit was exceeded."""
        is_passed = not self._is_held() and self._bill(cap) > cap.micro_usd_max
        free = [machine for machine in machines if self._is_removable(machine)] if is_passed else []
        known = self._open_since.get(cap[:2], {})
        now = self._loop.time()
        self._open_since[cap[:2]] = open_since = {
            machine.node_name: known.get(machine.node_name, now) for machine in free
        }
        late = (machine for machine in free if now - open_since[machine.node_name] > OVERRUN_SECONDS)
        return next(late, None) if now - self._calm_since() > OVERRUN_SECONDS else None

    def _is_removable(self, machine: Machine) -> bool:
        """True for a node that is not being removed and runs only work that may be repeated."""
        node = self._cluster.find(NODES, "", machine.node_name)
        if node is None or node.spec.unschedulable or node.metadata.annotations or machine.notice is not None:
            return False
        if node.metadata.deletion_timestamp is not None or not machine.is_usable:
            return False
        pods = self._cloud.pods_on(machine)
        return all(pod.metadata.labels.get(labels.JOB_ID) in self._jobs and not self._is_protected(pod) for pod in pods)

    def _bill(self, cap: Cap) -> int:
        """Return the invoice of the limit's period up to now."""
        now = self._loop.now()
        start, total = _period_start(cap.period, now), 0
        for machine in self._cloud.machines:
            until = min(machine.terminated_at or now, now)
            since = max(machine.launched_at, start)
            if self._is_of(cap, machine) and until > since:
                total += cost_micro_usd(machine.price_micro_usd_per_hour, until - since)
        return total

    def _is_of(self, cap: Cap, machine: Machine) -> bool:
        return _is_counted(cap, machine.order.pool, machine.offer, dict(machine.order.labels))

    def _is_protected(self, pod: core.Pod) -> bool:
        """True for work that is kept whatever it costs: by annotation, as not preemptible, or without a controller."""
        marks = pod.metadata.annotations
        row = self._jobs.get(JobId(pod.metadata.labels.get(labels.JOB_ID, "")))
        is_on_demand = row is not None and not row.spec.is_preemptible
        is_bare = not pod.metadata.owner_references
        protections = (marks.get(labels.DO_NOT_DISRUPT), marks.get(labels.KARPENTER_DO_NOT_DISRUPT))
        return is_on_demand or is_bare or any(protections) or marks.get(labels.SAFE_TO_EVICT) == "false"

    def _description(self, cap: Cap) -> str:
        bill = self._bill(cap)
        return f"{cap.owner} has spent {bill} micro-dollars in the {cap.period}, the limit is {cap.micro_usd_max}"


def _is_counted(cap: Cap, pool: str, offer: Offer, labels_: Mapping[str, str]) -> bool:
    return cap.owner in ("cluster", f"pool/{pool}", f"zone/{offer.zone}", f"project/{labels_.get(labels.PROJECT_ID)}")


def _period_start(period: str, at: datetime) -> datetime:
    midnight = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight if period == "day" else midnight.replace(day=1)


def _period_end(period: str, at: datetime) -> datetime:
    start = _period_start(period, at)
    return start + timedelta(days=1) if period == "day" else _period_start(period, start + timedelta(days=32))


# Invariant: a job whose spend exceeds its job budget ends.

CHECK_SECONDS = 60.0
# A read of the ledger (every minute), an eviction with its grace period, and the termination by the cloud.
ENDED_SECONDS_MAX = 300.0


class JobBudgetsInvariant:
    """Tracks since when each job runs beyond its budget without an active fault."""

    def __init__(
        self,
        loop: VirtualLoop,
        cluster: Kubernetes,
        tables: Tables,
        report: Callable[[str, str], None],
        *,
        calm_since: Callable[..., float],
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._tables = tables
        self._report = report
        self._calm_since = calm_since
        self._since: dict[JobId, float] = {}

    def begin(self) -> None:
        """Check every minute."""
        self._loop.call_later(CHECK_SECONDS, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        beyond = {job_id: self._since.get(job_id, now) for job_id in self._beyond()}
        pods = (pod for pod in self._cluster.all(PODS) if pod.status.phase not in FINISHED) if beyond else ()
        at_work = {pod.metadata.labels.get(labels.JOB_ID) for pod in pods}
        self._since = {job_id: since for job_id, since in beyond.items() if job_id in at_work}
        for job_id, since in self._since.items():
            seconds = now - max(since, self._calm_since())
            if seconds > ENDED_SECONDS_MAX:
                spent, limit = self._tables.spent[job_id], self._tables.jobs[job_id].spec.budget_limit_micro_usd
                self._report(
                    SPEND_LIMITED, f"job {job_id} has spent {spent} of {limit}, but still runs {seconds:.0f} s later"
                )
                return
        self._loop.call_later(CHECK_SECONDS, self._look)

    def _beyond(self) -> list[JobId]:
        rows = ((job_id, self._tables.jobs.get(job_id), spent) for job_id, spent in self._tables.spent.items())
        return [job_id for job_id, row, spent in rows if row and 0 < (row.spec.budget_limit_micro_usd or 0) < spent]
