"""A job as it was asked for, as it was accepted, and the states it passes through."""

import enum

import msgspec

from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources


class JobState(enum.StrEnum):
    """The eight names of S34. `preempted` passes: the job is queued again until its retries end."""

    PENDING = "pending"  # accepted, waiting for room in the queue
    QUEUED = "queued"  # admitted to the run queue
    PROVISIONING = "provisioning"  # nodes are being made for it
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    PREEMPTED = "preempted"  # lost its node
    CANCELLED = "cancelled"  # by the user


FINAL_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})

# Higher goes first, 0..1000 (CHECKLIST, Decisions, "priority").
PRIORITY_NAMES = {"low": 100, "medium": 500, "high": 1000}
PRIORITY_DEFAULT = PRIORITY_NAMES["medium"]


class Runtime(enum.StrEnum):
    """What the members are made by in Kubernetes. All but the first are kinds that others bring, each with a CRD."""

    JOB = "job"  # batch/v1 Job: part of Kubernetes
    JOBSET = "jobset"  # jobset.x-k8s.io/v1alpha2 JobSet
    PYTORCHJOB = "pytorchjob"  # kubeflow.org/v1 PyTorchJob
    RAYJOB = "rayjob"  # ray.io/v1 RayJob
    VOLCANO = "volcano"  # batch.volcano.sh/v1alpha1 Job


class GpuRequirements(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What each member of the job needs of GPUs (S32)."""

    gpu_count: int
    # A GPU model by name, or several of which any will do, the best first; None: any. Of equal cost the best is taken.
    gpu_type: str | tuple[str, ...] | None = None
    gpu_memory_gb: float | None = None  # of one GPU, or of the part of one, in GiB; None: any
    gpu_fraction: float | None = None  # a part of one GPU with this share of its memory will do; None: whole GPUs
    is_shared: bool = False  # a part of one GPU with `gpu_memory_gb` of memory will do

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The models that are asked for, the best first; empty: any."""
        if isinstance(self.gpu_type, tuple):
            return self.gpu_type
        return () if self.gpu_type is None else (self.gpu_type,)


class ContainerRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What to run (S32)."""

    image: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}


class ResourceRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """CPU, memory and disk of each member, as Kubernetes quantities (S32): `8`, `64Gi`."""

    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"


class Violation(msgspec.Struct, frozen=True, gc=False):
    """One thing wrong with a request: the field by its path, and the reason in a sentence."""

    field: str
    reason: str


class JobSpec(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An accepted job: checked, in our units, with every default filled in."""

    job_id: JobId
    job_name: str
    project_id: str
    priority: int  # 0..1000, higher goes first
    member_count: int  # pods of the gang: all of them run or none, unless fewer are enough
    member_resources: Resources  # of each
    gpu_model: str | None  # the only one that will do; None: any, or one of several
    gpu_memory_bytes_min: int | None  # of one GPU
    image: str
    command: tuple[str, ...]
    env: dict[str, str]
    workload_type: str | None
    is_preemptible: bool  # False: never on spot
    budget_limit_micro_usd: int | None
    duration_seconds_max: float
    requested_at: Instant
    run_seconds: float | None = None  # how long the work takes where that is known (traces, demo); None in real life
    start_by_at: Instant | None = None  # of equal priority the earliest goes first; None: no hurry
    within: str | None = None  # label of nodes whose value all members share; None: they may be apart
    gpu_models: tuple[str, ...] = ()  # any of these will do, the best first; empty: see gpu_model
    runtime: Runtime = Runtime.JOB
    member_count_min: int | None = None  # so many are enough to start and to go on; None: all
    pod_labels: dict[str, str] = {}  # besides our own
    pod_annotations: dict[str, str] = {}

    @property
    def gang_count(self) -> int:
        """Members that start together or not at all; those beyond come and go as there is room."""
        return self.member_count if self.member_count_min is None else self.member_count_min

    @property
    def models(self) -> tuple[str, ...]:
        """The GPU models that will do, the best first; empty: any."""
        return self.gpu_models or (() if self.gpu_model is None else (self.gpu_model,))
