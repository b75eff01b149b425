"""A job as requested, as accepted, and its states."""

import enum
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NO_DEMANDS, NodeDemands


class JobState(enum.StrEnum):
    """The states of a job. `preempted` is transient: the job is queued again until its retries are used up.

    Source: docs/decisions.md#job-states.
    """

    PENDING = "pending"  # accepted, waiting for capacity in the queue
    QUEUED = "queued"  # admitted to the run queue
    PROVISIONING = "provisioning"  # nodes are being launched for it
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    PREEMPTED = "preempted"  # lost its node
    CANCELLED = "cancelled"  # by the user


FINAL_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})

# Higher goes first, 0..1000. Source: docs/decisions.md#priority.
PRIORITY_NAMES = {"low": 100, "medium": 500, "high": 1000}
PRIORITY_DEFAULT = PRIORITY_NAMES["medium"]


class Runtime(enum.StrEnum):
    """The Kubernetes object that creates the members. All but the first are custom resources of other projects."""

    JOB = "job"  # batch/v1 Job: part of Kubernetes
    JOBSET = "jobset"  # jobset.x-k8s.io/v1alpha2 JobSet
    PYTORCHJOB = "pytorchjob"  # kubeflow.org/v1 PyTorchJob
    RAYJOB = "rayjob"  # ray.io/v1 RayJob
    VOLCANO = "volcano"  # batch.volcano.sh/v1alpha1 Job


# Kinds that own pods which run to completion: such a pod starts over when it is moved, unless it saves its work. A
# JobSet's and a Volcano Job's pods are owned by a Job; a RayJob's by its RayCluster, which does not survive its head.
# Sources: Kubeflow Training Operator v1.8.1, `pkg/apis/kubeflow.org/v1`; KubeRay v1.2.2, `controllers/ray` (read
# 2026-11-24).
OWNERS_TO_COMPLETION = frozenset(
    {"Job", "PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "MXJob", "RayCluster"}
)


class GpuRequirements(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The GPUs that each member of the job needs. Source: docs/decisions.md#job-fields."""

    gpu_count: int
    # A GPU model by name, or several, preferred first; None: any. At equal cost the preferred one is used.
    gpu_type: str | tuple[str, ...] | None = None
    gpu_memory_gb: float | None = None  # of one GPU, or of the part of one, in GiB; None: any
    gpu_fraction: float | None = None  # a part of one GPU with this share of its memory suffices; None: whole GPUs
    is_shared: bool = False  # a part of one GPU with `gpu_memory_gb` of memory suffices

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The requested models, preferred first; empty: any."""
        if isinstance(self.gpu_type, tuple):
            return self.gpu_type
        return () if self.gpu_type is None else (self.gpu_type,)


class ContainerRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The container to run."""

    image: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}


class ResourceRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """CPU, memory and disk of each member, as Kubernetes quantities: `8`, `64Gi`."""

    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"


class Violation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One invalid field of a request: its path, and the reason in a sentence."""

    field: str
    reason: str
    kind: Literal["invalid", "quota"] = "invalid"  # quota: the field is valid, but exceeds a quota of the policy


def template_digest(template: Mapping[str, Any]) -> str:
    """Return 32 hex digits over the pod template, whatever the order of its keys."""
    return hashlib.blake2b(msgspec.json.encode(template, order="sorted"), digest_size=16).hexdigest()


class JobSpec(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An accepted job: validated, in our units, with all defaults filled in."""

    job_id: JobId
    job_name: str
    project_id: str
    priority: int  # 0..1000, higher goes first
    member_count: int  # pods of the gang: all run or none, unless `member_count_min` is lower
    member_resources: Resources  # of each
    gpu_model: str | None  # the only acceptable one; None: any, or one of several
    gpu_memory_bytes_min: int | None  # of one GPU; None: no minimum
    image: str
    command: tuple[str, ...]
    env: dict[str, str]
    workload_type: str | None  # training, inference, batch, development ...; None: not named
    is_preemptible: bool  # False: never on spot
    budget_limit_micro_usd: int | None  # of all attempts together, in millionths of a USD; None: no limit
    duration_seconds_max: float  # time limit of an attempt, in seconds
    requested_at: Instant
    run_seconds: float | None = None  # of jobs that earlier releases queued; None: in `pod_annotations`, or not named
    start_by_at: Instant | None = None  # at equal priority the earliest goes first; None: no deadline
    finish_by_at: Instant | None = None  # from which `start_by_at` follows; None: no deadline
    within: str | None = None  # label of nodes whose value all members must share; None: no constraint
    gpu_models: tuple[str, ...] = ()  # acceptable models, preferred first; empty: see gpu_model
    runtime: Runtime = Runtime.JOB  # the kind that creates its members
    member_count_min: int | None = None  # minimum number of members to start and to keep running; None: all
    pod_labels: dict[str, str] = {}  # besides our own
    pod_annotations: dict[str, str] = {}
    template_digest: str | None = None  # of the pod template in the store; None: made from image, command and env
    demands: NodeDemands = NO_DEMANDS  # of the pod template and its volumes on a node
    submitted_by: str = ""  # empty: unknown
    namespace: str = ""  # of its Kubernetes objects; empty: the namespace of all jobs
    tenant: str = ""  # label gpu-tenant, where its project has a namespace of its own
    cost_center: str = ""  # label gpu-cost-center
    priority_class: str = ""  # of its pods; empty: none of ours
    # Auto: as for `JobRequested.checkpoint_interval_minutes`.
    checkpoint_interval_seconds: float | Literal["auto"] | None = None  # between saves; 0: never; None: of the policy
    expected_duration_seconds: float | None = None  # by its request; None: not named
    service_account: str = ""  # of its pods, unless its template names one; empty: the default of the namespace

    @property
    def gang_count(self) -> int:
        """Members that start together or not at all; the elastic members beyond follow as capacity allows."""
        return self.member_count if self.member_count_min is None else self.member_count_min

    @property
    def models(self) -> tuple[str, ...]:
        """The acceptable GPU models, preferred first; empty: any."""
        return self.gpu_models or (() if self.gpu_model is None else (self.gpu_model,))
