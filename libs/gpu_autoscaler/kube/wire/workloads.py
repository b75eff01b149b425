"""Third-party kinds that run a gang: the fields that show their progress.

Source: the CustomResourceDefinitions and Go types of JobSet 0.8 (jobset.x-k8s.io/v1alpha2), of Kubeflow's Training
Operator 1.8 (kubeflow.org/v1), of KubeRay 1.3 (ray.io/v1) and of Volcano 1.10 (batch.volcano.sh/v1alpha1), read
2026-11-21. The tests apply these very definitions to a real API server.
"""

from datetime import datetime

import msgspec

from gpu_autoscaler.kube.wire.core import Condition, Object


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of these structs; see `wire/core.py`."""


# ---- API discovery


class ServedResource(_Wire, frozen=True, kw_only=True):
    """One kind that the server serves."""

    name: str


class Served(_Wire, frozen=True, kw_only=True):
    """The kinds of one group and version."""

    resources: tuple[ServedResource, ...] = ()


# ---- JobSet


class ReplicatedJob(_Wire, frozen=True, kw_only=True):
    """Jobs of one template."""

    name: str
    replicas: int = 1


class JobSetSpec(_Wire, frozen=True, kw_only=True):
    """The spec of a JobSet."""

    suspend: bool = False
    replicated_jobs: tuple[ReplicatedJob, ...] = ()


class ReplicatedJobStatus(_Wire, frozen=True, kw_only=True):
    """Counts of a template's Jobs by progress. `ready`: all pods of the Job are ready or done."""

    name: str
    active: int = 0  # with a pod that has not ended
    ready: int = 0
    succeeded: int = 0


class JobSetStatus(_Wire, frozen=True, kw_only=True):
    """The status of a JobSet."""

    conditions: tuple[Condition, ...] = ()
    replicated_jobs_status: tuple[ReplicatedJobStatus, ...] = ()


class JobSet(Object, frozen=True, kw_only=True):
    """A JobSet."""

    spec: JobSetSpec = JobSetSpec()
    status: JobSetStatus = JobSetStatus()


# ---- PyTorchJob


class RunPolicy(_Wire, frozen=True, kw_only=True):
    """The run policy of a job."""

    suspend: bool = False


class ReplicaSpec(_Wire, frozen=True, kw_only=True):
    """The pods of one role."""

    replicas: int = 1


class PyTorchJobSpec(_Wire, frozen=True, kw_only=True):
    """The spec of a PyTorchJob."""

    run_policy: RunPolicy = RunPolicy()
    pytorch_replica_specs: dict[str, ReplicaSpec] = {}


class ReplicaStatus(_Wire, frozen=True, kw_only=True):
    """Counts of a role's pods by progress. `active`: running."""

    active: int = 0
    succeeded: int = 0


class PyTorchJobStatus(_Wire, frozen=True, kw_only=True):
    """The status of a PyTorchJob."""

    conditions: tuple[Condition, ...] | None = None
    replica_statuses: dict[str, ReplicaStatus] | None = None
    completion_time: datetime | None = None


class PyTorchJob(Object, frozen=True, kw_only=True):
    """A PyTorchJob."""

    spec: PyTorchJobSpec = PyTorchJobSpec()
    status: PyTorchJobStatus = PyTorchJobStatus()


# ---- RayJob


class RayJobSpec(_Wire, frozen=True, kw_only=True):
    """The spec of a RayJob."""

    suspend: bool = False


class RayJobStatus(_Wire, frozen=True, kw_only=True):
    """The status of a RayJob: of the work (`job_status`, by Ray), and of its deployment by the operator."""

    job_status: str = ""  # PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED
    job_deployment_status: str = ""  # Initializing, Running, Retrying, Suspended, Complete, Failed ...
    reason: str = ""
    message: str = ""
    end_time: datetime | None = None


class RayJob(Object, frozen=True, kw_only=True):
    """A RayJob."""

    spec: RayJobSpec = RayJobSpec()
    status: RayJobStatus = RayJobStatus()


# ---- Volcano


class VolcanoTask(_Wire, frozen=True, kw_only=True):
    """The pods of one template."""

    replicas: int = 1


class VolcanoJobSpec(_Wire, frozen=True, kw_only=True):
    """The spec of a Volcano Job. It cannot be created suspended."""

    tasks: tuple[VolcanoTask, ...] = ()


class VolcanoState(_Wire, frozen=True, kw_only=True):
    """The phase of a Volcano Job."""

    phase: str = ""  # Pending, Running, Restarting, Completed, Aborted, Terminated, Failed ...
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class VolcanoJobStatus(_Wire, frozen=True, kw_only=True):
    """The status of a Volcano Job."""

    state: VolcanoState = VolcanoState()
    running: int = 0
    succeeded: int = 0


class VolcanoJob(Object, frozen=True, kw_only=True):
    """A Volcano Job."""

    spec: VolcanoJobSpec = VolcanoJobSpec()
    status: VolcanoJobStatus = VolcanoJobStatus()
