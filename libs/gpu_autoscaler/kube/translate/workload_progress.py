"""The progress of a workload, whichever kind carries it. Sources: `wire_workloads.py`; Kubernetes, "Job"."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

import msgspec

from gpu_autoscaler.kube.protocol import JOBS, JOBSETS, PYTORCHJOBS, RAYJOBS, VOLCANO_JOBS, Kind
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.wire import core, workloads
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import Runtime

KINDS: dict[Runtime, Kind[Any]] = {
    Runtime.JOB: JOBS,
    Runtime.JOBSET: JOBSETS,
    Runtime.PYTORCHJOB: PYTORCHJOBS,
    Runtime.RAYJOB: RAYJOBS,
    Runtime.VOLCANO: VOLCANO_JOBS,
}
RUNTIMES = {kind.path(): runtime for runtime, kind in KINDS.items()}

Ending = Literal["completed", "failed", "cancelled"]
# Conditions of a Job before it is Complete or Failed, while its pods still terminate.
_ENDING_CONDITIONS = ("SuccessCriteriaMet", "FailureTarget")


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a workload."""

    outcome: Ending
    at: datetime | None  # None: unknown
    message: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a workload."""

    is_suspended: bool  # by its spec
    is_fully_suspended: bool  # suspended, and without pods
    is_running: bool  # every required member runs or is done, and at least one runs
    end: End | None = None
    is_ending: bool = False  # ended, or about to end


def progress(workload: core.Object) -> Progress:
    """Return the progress of an object of KINDS."""
    match workload:
        case core.Job():
            return _job(workload)
        case workloads.JobSet():
            return _jobset(workload)
        case workloads.PyTorchJob():
            return _pytorchjob(workload)
        case workloads.RayJob():
            return _rayjob(workload)
        case workloads.VolcanoJob():
            return _volcano(workload)
        case other:
            raise AssertionError(f"{type(other).__name__} cannot carry members")


def display_name(workload: core.Object) -> str:
    """Return kind and name for messages: `Kubernetes Job default/train`."""
    kind = "Kubernetes Job" if isinstance(workload, core.Job) else type(workload).__name__
    return f"{kind} {workload.metadata.namespace}/{workload.metadata.name}"


def _job(job: core.Job) -> Progress:
    status = job.status
    end = _by_condition(status.conditions, {"Complete": "completed", "Failed": "failed"}, status.completion_time)
    has_no_pods = not status.active and not status.terminating
    minimum = job.metadata.annotations.get(labels.MIN_MEMBERS, "")  # written by the scheduler
    needed_count = min(int(minimum), job.spec.parallelism) if minimum.isdigit() else job.spec.parallelism
    return Progress(
        is_suspended=job.spec.suspend,
        is_fully_suspended=job.spec.suspend and has_no_pods and _holds(status.conditions, "Suspended"),
        is_running=status.ready > 0 and status.ready + status.succeeded >= needed_count,
        end=end,
        is_ending=end is not None or any(_holds(status.conditions, name) for name in _ENDING_CONDITIONS),
    )


def _jobset(jobset: workloads.JobSet) -> Progress:
    """Counts Jobs, not pods: a Job is ready when all of its pods are ready or done."""
    parts = jobset.status.replicated_jobs_status
    ready_count, done_count = sum(part.ready for part in parts), sum(part.succeeded for part in parts)
    wanted_count = sum(part.replicas for part in jobset.spec.replicated_jobs)
    end = _by_condition(jobset.status.conditions, {"Completed": "completed", "Failed": "failed"}, None)
    return Progress(
        is_suspended=jobset.spec.suspend,
        # Set when its Jobs are suspended; terminating pods keep their index until they are gone.
        is_fully_suspended=jobset.spec.suspend
        and _holds(jobset.status.conditions, "Suspended")
        and not any(part.active for part in parts),
        is_running=ready_count > 0 and ready_count + done_count >= wanted_count,
        end=end,
        is_ending=end is not None,
    )


def _pytorchjob(job: workloads.PyTorchJob) -> Progress:
    roles = (job.status.replica_statuses or {}).values()
    active_count, done_count = sum(role.active for role in roles), sum(role.succeeded for role in roles)
    wanted_count = sum(role.replicas for role in job.spec.pytorch_replica_specs.values())
    end = _by_condition(
        job.status.conditions or (), {"Succeeded": "completed", "Failed": "failed"}, job.status.completion_time
    )
    return Progress(
        is_suspended=job.spec.run_policy.suspend,
        # Set once its pods are deleted; a terminating pod keeps its name until then, so no rank exists twice.
        is_fully_suspended=job.spec.run_policy.suspend and _holds(job.status.conditions or (), "Suspended"),
        is_running=active_count > 0 and active_count + done_count >= wanted_count,
        end=end,
        is_ending=end is not None,
    )


def _rayjob(job: workloads.RayJob) -> Progress:
    """The work is submitted once the head and all workers are ready, so running work means a running gang."""
    status = job.status
    end: End | None = None
    if status.job_deployment_status in ("Complete", "Failed"):
        outcomes: dict[str, Ending] = {"SUCCEEDED": "completed", "STOPPED": "cancelled"}
        outcome = outcomes.get(status.job_status, "failed") if status.job_deployment_status == "Complete" else "failed"
        reason = ": ".join(part for part in (status.reason or status.job_status, status.message) if part)
        end = End(outcome=outcome, at=status.end_time, message="" if outcome == "completed" else reason)
    return Progress(
        is_suspended=job.spec.suspend,
        is_fully_suspended=job.spec.suspend and status.job_deployment_status == "Suspended",
        is_running=status.job_status == "RUNNING" and status.job_deployment_status == "Running",
        end=end,
        is_ending=end is not None or status.job_status in ("SUCCEEDED", "STOPPED"),
    )


def _volcano(job: workloads.VolcanoJob) -> Progress:
    """Aborted counts as cancelled: a command removed its pods, and a resumption is uncertain."""
    state, wanted_count = job.status.state, sum(task.replicas for task in job.spec.tasks)
    outcomes: dict[str, Ending] = {
        "Completed": "completed",
        "Failed": "failed",
        "Terminated": "failed",
        "Aborted": "cancelled",
    }
    outcome = outcomes.get(state.phase)
    reason = ": ".join(part for part in (state.reason or state.phase, state.message) if part)
    message = "" if outcome == "completed" else reason
    running_count = job.status.running
    return Progress(
        is_suspended=False,
        is_fully_suspended=False,
        is_running=running_count > 0 and running_count + job.status.succeeded >= wanted_count,
        end=None if outcome is None else End(outcome=outcome, at=state.last_transition_time, message=message),
        is_ending=outcome is not None or state.phase in ("Completing", "Terminating", "Aborting"),
    )


def _by_condition(
    conditions: Iterable[core.Condition], outcomes: dict[str, Ending], completed_at: datetime | None
) -> End | None:
    """Return the end by the first true condition; a workload ends only once."""
    known = tuple(conditions)
    for condition_type, outcome in outcomes.items():
        current = condition(known, condition_type)
        if current is not None and current.status == "True":
            message = "" if outcome == "completed" else f"{current.reason}: {current.message}"
            return End(outcome=outcome, at=completed_at or current.last_transition_time, message=message)
    return None


def _holds(conditions: tuple[core.Condition, ...], condition_type: str) -> bool:
    current = condition(conditions, condition_type)
    return current is not None and current.status == "True"
