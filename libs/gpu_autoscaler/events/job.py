"""Facts about jobs. Any program publishes `requested` and `cancel_requested`; the scheduler publishes the outcome;
`started`, `listed` and `finished` are observations of the pod watcher."""

from typing import Any, ClassVar, Literal, Self

import msgspec

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.estimates import Basis, Estimate, RunSource
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PodUid
from gpu_autoscaler.model.jobs import (
    ContainerRequest,
    GpuRequirements,
    JobSpec,
    ResourceRequest,
    Runtime,
    Violation,
    template_digest,
)
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.preempt import PreemptReason


class JobRequested(Fact, frozen=True, kw_only=True):
    """A request to run a job, the public input. Accepted only once `job.queued` follows."""

    IS_PUBLIC: ClassVar[bool] = True

    job_name: str
    project_id: str
    gpu_requirements: GpuRequirements
    container: ContainerRequest = ContainerRequest(image="")  # the short form; left out with a pod template
    priority: str | int = "medium"  # low, medium, high, or 0..1000; higher goes first
    resources: ResourceRequest = ResourceRequest()
    budget_limit_usd: float | None = None
    max_duration_hours: float | None = None  # None: the policy's default
    preemptible: bool = True
    members: int = 1  # pods, each with these requirements; they start together or not at all
    min_members: int | None = None  # minimum that starts together, the others follow as capacity allows; None: all
    start_by_at: Instant | None = None  # refused if the estimate is later; the earliest goes first; None: no deadline
    finish_by_at: Instant | None = None  # likewise of its end, by its run time or its time limit; None: no deadline
    within: str | None = (
        None  # label of nodes whose value all members share: topology.kubernetes.io/zone, nvidia.com/gpu.clique
    )
    workload_type: str | None = None  # training, inference, batch, development ...; None: not named
    pod_labels: dict[str, str] = msgspec.field(default_factory=dict)  # besides our own
    # Checkpoint support (`gpu-autoscaler.io/checkpointed-at`, empty), its hook, keys of other projects.
    pod_annotations: dict[str, str] = msgspec.field(default_factory=dict)
    # Since its last checkpoint. Auto: by the measured time of a save and the interruptions of its nodes.
    checkpoint_interval_minutes: float | Literal["auto"] | None = None  # between saves; 0: never; None: of the policy
    runtime: str = "job"  # the kind that creates its members: job, jobset, pytorchjob, rayjob, volcano
    job_id: JobId | None = None  # None: derived from the event's id
    expected_duration_seconds: float | None = None  # for estimates, within the time limit; None: by similar jobs
    run_seconds: float | None = None  # for simulated clusters: how long the work takes; None: not named
    submitted_by: str = ""  # the gateway writes its caller's name; empty: unknown
    # Kubernetes' PodTemplateSpec of each member; None: the short form. Its GPUs are `gpu_requirements`.
    pod_template: dict[str, Any] | None = None
    # Whether the template may have fields that reach beyond its pod (hostPath, privileged ...). Set by the gateway for
    # callers with that right, and by trusted publishers.
    dangerous_fields_allowed: bool = False
    pod_template_digest: str | None = None  # in records of open jobs, which leave out the template; None: it has none

    def without_template(self) -> Self:
        """Return the request with its template's digest instead of the template, as the state keeps it."""
        if self.pod_template is None:
            return self
        return msgspec.structs.replace(self, pod_template=None, pod_template_digest=template_digest(self.pod_template))

    def condition(self) -> str | None:
        """One request per job id; a request without one is identified by its event id."""
        return None if self.job_id is None else f"job_requested/{self.job_id}"

    def entity(self) -> str | None:
        """The job, if the request names its id."""
        return None if self.job_id is None else f"job/{self.job_id}"


class _AboutJob(Fact, frozen=True, kw_only=True):
    """Base of facts about one job."""

    job_id: JobId

    def entity(self) -> str | None:
        return f"job/{self.job_id}"


class JobCancelRequested(_AboutJob, frozen=True, kw_only=True):
    """A request to end the job."""

    IS_PUBLIC: ClassVar[bool] = True

    requested_by: str = ""  # user or program; empty: unknown
    note: str = ""
    action_id: ActionId | None = None  # of the plan's decision; None: a user or a program requests it

    def condition(self) -> str | None:
        """One fact per decision of a plan; users may repeat theirs."""
        return None if self.action_id is None else f"job_cancel_requested/{self.job_id}/{self.action_id}"


class JobQueued(_AboutJob, frozen=True, kw_only=True):
    """The job is accepted: it is in the store and waits for capacity."""

    spec: JobSpec  # the job with all defaults filled in
    queued_at: Instant  # when it was accepted

    def condition(self) -> str | None:
        """One fact per job."""
        return f"job_queued/{self.job_id}"


class JobRejected(Fact, frozen=True, kw_only=True):
    """The request is rejected; nothing but this fact is kept of it."""

    request_id: str  # id of the requesting event
    violations: tuple[Violation, ...]  # each invalid field and broken rule
    job_id: JobId | None = None  # None: the request names none
    job_name: str = ""

    def entity(self) -> str | None:
        """The job of the request, if it names an id."""
        return None if self.job_id is None else f"job/{self.job_id}"


class JobPlaced(_AboutJob, frozen=True, kw_only=True):
    """All members have capacity: the Kubernetes Job is released with affinity to these nodes."""

    attempt: int  # 1 for the first placement
    node_uids: tuple[NodeUid, ...]  # one for each member, repeated where members share a node
    node_names: tuple[str, ...]
    placed_at: Instant  # when its members were released
    retries_used_count: int | None = None  # by losses of earlier attempts; None: of 0.2, where each loss used one
    gpu_use_ratios: tuple[float | None, ...] = ()  # measured use of each node, if that chose it; null in it: unknown

    @property
    def retries_used(self) -> int:
        """Retries that losses of earlier attempts used up."""
        return self.attempt - 1 if self.retries_used_count is None else self.retries_used_count

    def condition(self) -> str | None:
        """One placement per attempt."""
        return f"job_placed/{self.job_id}/{self.attempt}"


class JobPreempted(_AboutJob, frozen=True, kw_only=True):
    """A running job lost a node or was preempted, and is queued again."""

    attempt: int  # the attempt that ended
    cause: str  # e.g. "node gpu-7 was drained: spot_reclaim"
    preempted_at: Instant  # when the attempt ended
    is_own_choice: bool = False  # lost by our own choice (consolidation, drift ...), which uses up no retry
    retries_used_count: int | None = None  # by this and earlier losses; None: of 0.2, where each loss used one
    pod_uid: PodUid | None = None  # the lost member; None: of 0.2
    preemption: PreemptReason | None = None  # why the attempt was ended as a whole; None: it lost a member

    @property
    def retries_used(self) -> int:
        """Retries that this and earlier losses used up."""
        return self.attempt if self.retries_used_count is None else self.retries_used_count

    def condition(self) -> str | None:
        """One fact per attempt."""
        return f"job_preempted/{self.job_id}/{self.attempt}"


class JobStarted(Versioned, frozen=True, kw_only=True):
    """All members of the job run."""

    job_id: JobId
    kube_job: str  # namespace/name of the Kubernetes Job
    started_at: Instant
    is_found_running: bool = False  # by a watcher that has just started: the members run since then or earlier

    def condition(self) -> str | None:
        """One fact per version of the Kubernetes Job."""
        return f"job_started/{self.job_id}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        return f"job/{self.job_id}"


class JobListed(Versioned, frozen=True, kw_only=True):
    """A complete list of our Kubernetes Jobs, or of another kind, was read. A job of that kind that was queued before,
    has not ended and is not in the list has no Kubernetes Job, unless one was created since."""

    job_ids: tuple[JobId, ...]  # all that were in the list
    listed_at: Instant
    runtime: Runtime = Runtime.JOB  # the listed kind; empty list for a kind that is not installed


class JobEstimated(_AboutJob, frozen=True, kw_only=True):
    """The estimate of start and cost when the job entered the queue. Published once."""

    estimate: Estimate  # start and cost, as expected then
    estimated_at: Instant  # when the estimate was made

    def condition(self) -> str | None:
        """One fact per job: the first estimate is scored."""
        return f"job_estimated/{self.job_id}"


class RunScore(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the predicted run time of a job."""

    source: RunSource
    predicted_seconds: float  # the median of the estimate at the time of the request
    run_seconds: float  # from its start to its end
    was_within: bool  # between the low and the high quantile


class JobEstimateScored(_AboutJob, frozen=True, kw_only=True):
    """The error of the estimate of a job: of its start, when the job started; of its run time, when it completed.

    A fact type of its own for the second would be a dead letter for release 0.2.
    """

    basis: Basis
    start_error_seconds: float | None  # positive: later than expected; None: no expectation
    was_within: bool | None  # whether it started in the estimated range; None: no range
    cost_error_micro_usd: (
        int | None
    )  # positive: more expensive, at the prices of its nodes for the same time; None if unknown
    scored_at: Instant  # when the estimate was compared with what happened
    run: RunScore | None = None  # the job has completed: the errors above are None

    def condition(self) -> str | None:
        """One fact for the start of a job, and one for its end."""
        return f"job_estimate_scored/{self.job_id}" + ("" if self.run is None else "/run")


class JobFinished(_AboutJob, frozen=True, kw_only=True):
    """The job reached its final state."""

    outcome: Literal["completed", "failed", "cancelled"]
    finished_at: Instant
    message: str = ""  # why, if it did not complete

    def condition(self) -> str | None:
        """One final state per job."""
        return f"job_finished/{self.job_id}"


class JobResynced(_AboutJob, frozen=True, kw_only=True):
    """A job that has not ended: its facts so far, before the stream discards the first. No service acts on it."""

    requested: JobRequested | None = None  # its request; None: unknown
    requested_at: Instant | None = None  # time of the request; None: unknown
    queued: JobQueued | None = None  # its acceptance; None: not accepted yet
    cancel_requested: JobCancelRequested | None = None  # the request to end it; None: none
    placed: JobPlaced | None = None  # its latest placement; None: not placed yet
    preempted: JobPreempted | None = None  # its latest loss or preemption; None: none
    started: JobStarted | None = None  # its latest start; None: not started yet
    estimated: JobEstimated | None = None  # its estimate; None: none yet
    scored: JobEstimateScored | None = None  # the score of its estimate; None: none yet
    completed_pods: tuple[PodUid, ...] = ()  # members that completed and whose pods are gone
