"""Invariants of the end of idle workloads: nothing ends that is used, was not announced, or did not opt in.

A plan knows of a change of use once telemetry shows it, at most its maximum age later.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from gpu_autoscaler.core.disruption.protection import annotated_instant
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import JOBS, PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AnnounceIdleWorkload, EndIdleWorkload
from gpu_autoscaler.sim.actors.notebooks import GRACE_SECONDS, IDLE_SECONDS, OPTED_IN, Notebooks
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes
from gpu_autoscaler.sim.invariants import UPKEEP_DECIDED, UPKEEP_JUSTIFIED
from gpu_autoscaler.sim.virtual_time import ORIGIN

WINDOW_SECONDS = 60.0  # of telemetry, whose first one is partly of another use


class IdleWorkloadsInvariant:
    """Compares the decisions about notebooks with their true use."""

    def __init__(
        self, cluster: Kubernetes, notebooks: Notebooks, policies: Policies, report: Callable[[str, str], None]
    ) -> None:
        self._cluster, self._notebooks, self._policies, self._report = cluster, notebooks, policies, report
        self._ended: set[str] = set()  # uids of the Jobs whose end was decided
        cluster.listen(self._on_change)

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if not isinstance(recorded.fact, ScalingPlanMade):
            return
        plan = recorded.fact.plan
        for decision in plan.upkeep_decisions:
            if isinstance(decision, AnnounceIdleWorkload | EndIdleWorkload):
                for known in decision.pods:
                    pod = self._cluster.find(PODS, decision.namespace, known.name)
                    if pod is not None and pod.metadata.uid == known.pod_uid:
                        self._check(decision, pod, plan.as_of)
            if isinstance(decision, EndIdleWorkload):
                self._ended.add(decision.owner_uid)

    def _check(self, decision: AnnounceIdleWorkload | EndIdleWorkload, pod: core.Pod, as_of: datetime) -> None:
        use, name = self._notebooks.gpu_use(pod), f"{pod.metadata.namespace}/{pod.metadata.name}"
        if pod.metadata.namespace != OPTED_IN or use is None:
            self._report(UPKEEP_JUSTIFIED, f"{name} is to end as idle, but its namespace did not opt in")
            return
        if labels.IDLE_ALLOWED in pod.metadata.annotations:
            self._report(UPKEEP_JUSTIFIED, f"{name} is to end as idle, but it may be idle")
        now = (as_of - ORIGIN).total_seconds()
        idle_seconds = now - use.idle_from + WINDOW_SECONDS
        age_seconds = self._policies.now.utilization.telemetry_age_seconds_max + WINDOW_SECONDS
        if idle_seconds < IDLE_SECONDS or use.idle_until < now - age_seconds:
            self._report(UPKEEP_JUSTIFIED, f"{name} is to end as idle, but it uses its GPUs, or did lately")
        if isinstance(decision, EndIdleWorkload):
            announced_at = annotated_instant(pod.metadata.annotations, labels.IDLE_ANNOUNCED_AT)
            if announced_at is None or as_of - announced_at < timedelta(seconds=GRACE_SECONDS):
                self._report(UPKEEP_JUSTIFIED, f"{name} is to end as idle, announced at {announced_at}")

    def _on_change(self, plural: str, entry: Entry) -> None:
        """A Job is removed that its user has not ended."""
        uid = entry.object.metadata.uid
        is_end = plural == JOBS.plural and entry.is_deleted and uid in self._notebooks.uses
        if is_end and uid not in self._ended:
            self._report(UPKEEP_DECIDED, f"{entry.object.metadata.name}: no plan has decided its end")
