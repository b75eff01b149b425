"""Invariants of quotas: placed jobs stay within them, and a preemption takes what its reason allows it to take.

Independent of the counts of the schedule and of the plan check, which are thereby tested. A job counts from its
placement until it ends; a job that was preempted for another one counts until its pods are gone.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from gpu_autoscaler.core.policy.quota_settings import QuotasPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.kube.protocol import JOBS, PODS, QUOTAS
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.preempt import MovedToSpot, PriorityPreempted, QuotaReclaimed
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants import PREEMPTION_JUST, QUOTAS_KEPT, RESOURCE_QUOTAS_KEPT
from gpu_autoscaler.store.protocol import JobRow

REPLACED = timedelta(minutes=1)  # a controller creates a pod again within that time


class QuotasInvariant:
    """Counts the GPUs of placed jobs by project and user."""

    def __init__(
        self, workloads: Workloads, policies: Policies, jobs: Mapping[JobId, JobRow], report: Callable[[str, str], None]
    ) -> None:
        self._workloads, self._policies, self._jobs, self._report = workloads, policies, jobs, report
        self._placed: set[JobId] = set()
        self._leaving: set[JobId] = set()  # preempted for another job
        self._seen: set[tuple[type[Fact], JobId, int]] = set()  # with the attempt

    def on_fact(self, fact: Fact) -> None:
        """A fact was stored. What is published again after the streams were lost, happened before."""
        quotas = self._policies.now.quotas
        if isinstance(fact, JobPlaced | JobPreempted):
            known = (type(fact), fact.job_id, fact.attempt)
            if known in self._seen:
                return
            self._seen.add(known)
        match fact:
            case JobPlaced():
                self._leaving.discard(fact.job_id)
                self._placed.add(fact.job_id)
                if quotas.is_set:
                    self._check(self._jobs[fact.job_id].spec, quotas)
            case JobPreempted() if fact.preemption is not None:
                self._check_preemption(fact, quotas)
                self._placed.discard(fact.job_id)
                self._leaving.add(fact.job_id)
            case JobFinished():
                self._placed.discard(fact.job_id)
                self._leaving.discard(fact.job_id)
            case _:
                pass

    def _used(self) -> list[JobSpec]:
        with_pods = {
            pod.metadata.labels.get(labels.JOB_ID)
            for pod in self._workloads.cluster.all(PODS)
            if pod.status.phase not in ("Succeeded", "Failed") and pod.spec.node_name is not None
        }
        counted = self._placed | {job_id for job_id in self._leaving if job_id in with_pods}
        return [self._jobs[job_id].spec for job_id in sorted(counted)]

    def _check(self, spec: JobSpec, quotas: QuotasPolicy) -> None:
        """Compare what the owners of a placed job use with their quotas."""
        used = self._used()
        of_project = _gpus(other for other in used if other.project_id == spec.project_id)
        of_user = _gpus(other for other in used if other.submitted_by == spec.submitted_by)
        project_max, user_max = quotas.project_default.gpu_count_max, quotas.user_default.gpu_count_max
        for quota in quotas.projects:
            if quota.name == spec.project_id and quota.gpu_count_max is not None:
                project_max = quota.gpu_count_max
        for user in quotas.users:
            if user.name == spec.submitted_by and user.gpu_count_max is not None:
                user_max = user.gpu_count_max
        for owner, count, most in (
            (f"project {spec.project_id}", of_project, project_max),
            (f"user {spec.submitted_by}", of_user, user_max),
        ):
            if most is not None and count > most:
                self._report(QUOTAS_KEPT, f"{owner} has {count} GPUs, its quota is {most}")
        self._check_cohort(spec.project_id, used, quotas)

    def _check_cohort(self, project: str, used: Iterable[JobSpec], quotas: QuotasPolicy) -> None:
        counts = {
            quota.name: _gpus(spec for spec in used if spec.project_id == quota.name) for quota in quotas.projects
        }
        mine = next((quota for quota in quotas.projects if quota.name == project), None)
        if mine is None or mine.nominal_gpu_count is None:
            return
        nominal = mine.nominal_gpu_count
        borrowed, most = counts[project] - nominal, mine.borrowing_gpu_count_max
        if quotas.strategy == "static" or not mine.cohort:
            most = 0
        if most is not None and borrowed > most:
            self._report(QUOTAS_KEPT, f"project {project} borrows {borrowed} GPUs, it may borrow {most}")
        lent = free = 0
        for quota in quotas.projects:
            if quota.nominal_gpu_count is not None and quota.cohort == mine.cohort:
                beyond = counts[quota.name] - quota.nominal_gpu_count
                lent += max(0, beyond)
                reserved = int(quota.nominal_gpu_count * quotas.reserved_ratio) if quotas.strategy == "hybrid" else 0
                most_lent = quota.nominal_gpu_count - reserved
                if quota.lending_gpu_count_max is not None:
                    most_lent = min(most_lent, quota.lending_gpu_count_max)
                free += min(max(0, -beyond), most_lent)
        if lent > free and borrowed > 0:
            self._report(QUOTAS_KEPT, f"{lent} GPUs are borrowed in cohort {mine.cohort}, which lends {free}")

    def _check_preemption(self, fact: JobPreempted, quotas: QuotasPolicy) -> None:
        reason, victim = fact.preemption, self._jobs[fact.job_id].spec
        if reason is None:
            return
        if isinstance(reason, MovedToSpot):
            self._check_move(fact)
            return
        beneficiary = self._jobs[reason.for_job].spec
        nominal = {quota.name: quota.nominal_gpu_count or 0 for quota in quotas.projects}
        used = [self._jobs[job_id].spec for job_id in self._placed]  # without those that end for others
        if not victim.is_preemptible:
            self._report(PREEMPTION_JUST, f"{fact.job_id} is not preemptible, and was preempted for {reason.for_job}")
        if isinstance(reason, QuotaReclaimed):
            borrowed = _gpus(spec for spec in used if spec.project_id == victim.project_id) - nominal[victim.project_id]
            needed = _gpus([*(spec for spec in used if spec.project_id == beneficiary.project_id), beneficiary])
            if borrowed <= 0 or needed > nominal[beneficiary.project_id]:
                what = f"{borrowed} GPUs were borrowed, {needed} are needed"
                self._report(PREEMPTION_JUST, f"{fact.job_id} was preempted for the quota of {reason.for_job}: {what}")
        if isinstance(reason, PriorityPreempted) and victim.priority >= beneficiary.priority:
            self._report(PREEMPTION_JUST, f"{fact.job_id} was preempted for {reason.for_job}, which matters no more")

    def _check_move(self, fact: JobPreempted) -> None:
        """The job may be moved. Whether it fits elsewhere is up to the plan check: nodes may have left meanwhile."""
        spec, marks = self._jobs[fact.job_id].spec, (labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT)
        own = [pod.metadata.annotations for pod in self._workloads.cluster.all(PODS) if _is_of(pod, fact.job_id)]
        if not spec.is_preemptible or any(pod.get(mark) == "true" for pod in own for mark in marks):
            self._report(PREEMPTION_JUST, f"{fact.job_id} moves to spot, and must not be interrupted")
        if not all(labels.CHECKPOINTED_AT in pod for pod in own):
            self._report(PREEMPTION_JUST, f"{fact.job_id} moves to spot, and does not save on request")


def _is_of(pod: core.Pod, job_id: JobId) -> bool:
    return pod.metadata.labels.get(labels.JOB_ID) == job_id and pod.status.phase not in ("Succeeded", "Failed")


class ResourceQuotasInvariant:
    """Neither are pods released that a ResourceQuota refuses, nor are nodes bought for them. For use while no fault
    delays what is known; only GPUs are counted."""

    def __init__(self, cluster: Kubernetes, jobs: Mapping[JobId, JobRow], report: Callable[[str, str], None]) -> None:
        self._cluster, self._jobs, self._report = cluster, jobs, report

    def on_refused(self, pod: core.Pod, quota: core.ResourceQuota) -> None:
        """A quota refused a pod of a released Job. All pods of an elastic Job are created once it is released, and take
        quota that its gang was not granted: where one runs, a refusal is no mistake. Neither is that of a pod which
        replaces one that has just been deleted: both count until the quota is counted again."""
        others = (each for each in self._cluster.all(PODS) if each.metadata.namespace == pod.metadata.namespace)
        rows = [self._jobs.get(JobId(each.metadata.labels.get(labels.JOB_ID, ""))) for each in (pod, *others)]
        if any(row is not None and row.spec.gang_count < row.spec.member_count for row in rows):
            return
        job_id, recent = pod.metadata.labels.get(labels.JOB_ID), self._cluster.now() - REPLACED
        ended = (entry.object.metadata for entry in self._cluster.history[PODS.plural])
        if any(
            each.labels.get(labels.JOB_ID) == job_id and (each.deletion_timestamp or recent) > recent for each in ended
        ):
            return
        used = ", ".join(f"{quota.status.used.get(key, '0')} of {hard} {key}" for key, hard in quota.spec.hard.items())
        self._report(RESOURCE_QUOTAS_KEPT, f"{pod.metadata.name} was released, but {used} are used")

    def on_plan(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published."""
        if not is_calm or not self._cluster.has(QUOTAS):
            return
        keys = {
            key
            for decision in plan.purchases
            for key in getattr(decision.reason, "demand", ())
            if key.startswith("job/")
        }
        bought = [row.spec for key in sorted(keys) if (row := self._jobs.get(JobId(key.removeprefix("job/"))))]
        for quota in self._cluster.all(QUOTAS) if bought else ():
            specs = [spec for spec in bought if spec.namespace == quota.metadata.namespace]
            hard = quota.spec.hard.get(f"requests.{GPU_RESOURCE}")
            if hard is None or not specs:
                continue
            used = sum(
                pod_requests(pod).gpu_count
                for pod in self._cluster.all(PODS)
                if pod.metadata.namespace == quota.metadata.namespace
                and pod.status.phase not in ("Succeeded", "Failed")
                and pod.metadata.labels.get(labels.JOB_ID) not in {spec.job_id for spec in specs}
            )
            needed = sum(self._missing_count(spec) * spec.member_resources.gpu_count for spec in specs)
            if used + needed > int(hard):
                names = ", ".join(spec.job_id for spec in specs)
                self._report(RESOURCE_QUOTAS_KEPT, f"bought for {names}: {needed} GPUs, but {used} of {hard} are used")

    def _missing_count(self, spec: JobSpec) -> int:
        """Return the members of the gang that have not completed; an elastic job may go on with one more."""
        job = self._cluster.find(JOBS, spec.namespace, spec.job_id)
        return max(1, spec.gang_count - (0 if job is None else job.status.succeeded or 0))


def _gpus(specs: Iterable[JobSpec]) -> int:
    """Return the GPUs that the jobs count with; a share of a GPU counts as one."""
    resources = ((spec.member_count, spec.member_resources) for spec in specs)
    return sum(count * (each.gpu_count + sum(shares for _, shares in each.slices)) for count, each in resources)
