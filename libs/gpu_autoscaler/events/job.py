"""Facts about jobs. `requested` and `cancel_requested` come from anybody; the scheduler says what became of them;
`started`, `listed` and `finished` are what the pod watcher saw in the cluster."""

from typing import Literal

import msgspec

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.estimates import Basis, Estimate
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, JobSpec, Violation, ResourceRequest, Runtime
from gpu_autoscaler.model.observed import Instant


class JobRequested(Fact, frozen=True, kw_only=True):
    """Somebody wants a job to run: the public door (S32). Nothing is promised until `job.queued` follows."""

    job_name: str
    project_id: str
    gpu_requirements: GpuRequirements
    container: ContainerRequest
    priority: str | int = "medium"  # low, medium, high, or 0..1000; higher goes first
    resources: ResourceRequest = ResourceRequest()
    budget_limit_usd: float | None = None
    max_duration_hours: float | None = None  # None: the policy's default
    preemptible: bool = True
    members: int = 1  # pods, each with these requirements; they start together or not at all
    min_members: int | None = None  # so many start together, the others where and when there is room; None: all of them
    start_by_at: Instant | None = None  # of equal priority the earliest goes first; None: no hurry
    within: str | None = (
        None  # label of nodes whose value all members share: topology.kubernetes.io/zone, nvidia.com/gpu.clique
    )
    workload_type: str | None = None  # training, inference, batch, development ...
    pod_labels: dict[str, str] = msgspec.field(default_factory=dict)  # besides our own
    # That the work can save (`gpu-autoscaler.io/checkpointed-at`, empty), the hook to tell it by, keys of others.
    pod_annotations: dict[str, str] = msgspec.field(default_factory=dict)
    runtime: str = "job"  # what makes its members: job, jobset, pytorchjob, rayjob, volcano
    job_id: JobId | None = None  # None: derived from the event's id
    run_seconds: float | None = None  # for simulated clusters: how long the work takes

    def condition(self) -> str | None:
        """One request a job id; a request without one is told from others by its event id alone."""
        return None if self.job_id is None else f"job_requested/{self.job_id}"

    def entity(self) -> str | None:
        """The job, where it has an id already."""
        return None if self.job_id is None else f"job/{self.job_id}"


class _AboutJob(Fact, frozen=True, kw_only=True):
    """Base of facts about one job."""

    job_id: JobId

    def entity(self) -> str | None:
        """The job."""
        return f"job/{self.job_id}"


class JobCancelRequested(_AboutJob, frozen=True, kw_only=True):
    """Somebody wants the job to end."""

    requested_by: str = ""
    note: str = ""


class JobQueued(_AboutJob, frozen=True, kw_only=True):
    """The job is accepted: its row is in the store, and it waits for room."""

    spec: JobSpec
    queued_at: Instant

    def condition(self) -> str | None:
        """A job is accepted once."""
        return f"job_queued/{self.job_id}"


class JobRejected(Fact, frozen=True, kw_only=True):
    """The request cannot be accepted; nothing was kept of it but this."""

    request_id: str  # id of the event that asked
    mistakes: tuple[Violation, ...]
    job_id: JobId | None = None
    job_name: str = ""

    def entity(self) -> str | None:
        """The job that would have been."""
        return None if self.job_id is None else f"job/{self.job_id}"


class JobPlaced(_AboutJob, frozen=True, kw_only=True):
    """There is room for all members: the Kubernetes Job is released with affinity to these nodes."""

    attempt: int  # 1 for the first placement
    node_uids: tuple[NodeUid, ...]  # one for each member, repeated where members share a node
    node_names: tuple[str, ...]
    placed_at: Instant

    def condition(self) -> str | None:
        """One placement an attempt."""
        return f"job_placed/{self.job_id}/{self.attempt}"


class JobPreempted(_AboutJob, frozen=True, kw_only=True):
    """A running job lost a node (or was made to yield) and is queued again."""

    attempt: int  # the attempt that ended
    cause: str  # e.g. "node gpu-7 was drained: spot_reclaim"
    preempted_at: Instant

    def condition(self) -> str | None:
        """An attempt is lost once."""
        return f"job_preempted/{self.job_id}/{self.attempt}"


class JobStarted(Versioned, frozen=True, kw_only=True):
    """All members of the job run."""

    job_id: JobId
    kube_job: str  # namespace/name of the Kubernetes Job
    started_at: Instant

    def condition(self) -> str | None:
        """Once for each version of the Kubernetes Job."""
        return f"job_started/{self.job_id}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        """The job."""
        return f"job/{self.job_id}"


class JobListed(Versioned, frozen=True, kw_only=True):
    """A whole list of our Kubernetes Jobs, or of another kind of ours, was read. A job of that kind that was queued
    before this was said and is not in it, and has not ended, has no Kubernetes Job, unless one was made since."""

    job_ids: tuple[JobId, ...]
    listed_at: Instant
    runtime: Runtime = Runtime.JOB  # of which kind the list was; one that is not installed has none


class JobEstimated(_AboutJob, frozen=True, kw_only=True):
    """What was expected of a job when it entered the queue: when it starts, and what it costs. Said once."""

    estimate: Estimate
    estimated_at: Instant

    def condition(self) -> str | None:
        """The first word is the one that is scored."""
        return f"job_estimated/{self.job_id}"


class JobEstimateScored(_AboutJob, frozen=True, kw_only=True):
    """The estimate of a job beside what came of it, when it started."""

    basis: Basis
    start_error_seconds: float | None  # started so much later than expected, below zero: sooner; None: nothing was
    was_within: bool | None  # of the range; None: there was none
    cost_error_micro_usd: int | None  # at the prices of its nodes so much more, for the same time; None: not known
    scored_at: Instant

    def condition(self) -> str | None:
        """A job is scored once."""
        return f"job_estimate_scored/{self.job_id}"


class JobFinished(_AboutJob, frozen=True, kw_only=True):
    """The job reached its final state."""

    outcome: Literal["completed", "failed", "cancelled"]
    finished_at: Instant
    message: str = ""  # why, where it did not complete

    def condition(self) -> str | None:
        """A job ends in exactly one final state."""
        return f"job_finished/{self.job_id}"
