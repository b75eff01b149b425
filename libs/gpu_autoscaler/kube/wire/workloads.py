"""Kinds that others bring to run a gang in, on the wire: as much of them as tells how far they are.

Source: the CustomResourceDefinitions and Go types of JobSet 0.8 (jobset.x-k8s.io/v1alpha2), of Kubeflow's Training
Operator 1.8 (kubeflow.org/v1), of KubeRay 1.3 (ray.io/v1) and of Volcano 1.10 (batch.volcano.sh/v1alpha1), read
2026-11-21. The tests apply these very definitions to a real API server.
"""

from datetime import datetime

import msgspec

from gpu_autoscaler.kube.wire.core import Condition, Object


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base, as in `wire.py`."""


# ---- whether a kind is there


class ServedResource(_Wire, frozen=True, kw_only=True):
    """One kind that the server has."""

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
    """What a JobSet wants."""

    suspend: bool = False
    replicated_jobs: tuple[ReplicatedJob, ...] = ()


class ReplicatedJobStatus(_Wire, frozen=True, kw_only=True):
    """How many Jobs of one template are how far. `ready`: all pods of the Job are ready or done."""

    name: str
    active: int = 0  # with a pod that is not ended, or about to be
    ready: int = 0
    succeeded: int = 0


class JobSetStatus(_Wire, frozen=True, kw_only=True):
    """How a JobSet is."""

    conditions: tuple[Condition, ...] = ()
    replicated_jobs_status: tuple[ReplicatedJobStatus, ...] = ()


class JobSet(Object, frozen=True, kw_only=True):
    """A JobSet."""

    spec: JobSetSpec = JobSetSpec()
    status: JobSetStatus = JobSetStatus()


# ---- PyTorchJob


class RunPolicy(_Wire, frozen=True, kw_only=True):
    """How the job is run."""

    suspend: bool = False


class ReplicaSpec(_Wire, frozen=True, kw_only=True):
    """Pods of one role."""

    replicas: int = 1


class PyTorchJobSpec(_Wire, frozen=True, kw_only=True):
    """What a PyTorchJob wants."""

    run_policy: RunPolicy = RunPolicy()
    pytorch_replica_specs: dict[str, ReplicaSpec] = {}


class ReplicaStatus(_Wire, frozen=True, kw_only=True):
    """How many pods of one role are how far. `active`: they run."""

    active: int = 0
    succeeded: int = 0


class PyTorchJobStatus(_Wire, frozen=True, kw_only=True):
    """How a PyTorchJob is."""

    conditions: tuple[Condition, ...] | None = None
    replica_statuses: dict[str, ReplicaStatus] | None = None
    completion_time: datetime | None = None


class PyTorchJob(Object, frozen=True, kw_only=True):
    """A PyTorchJob."""

    spec: PyTorchJobSpec = PyTorchJobSpec()
    status: PyTorchJobStatus = PyTorchJobStatus()


# ---- RayJob


class RayJobSpec(_Wire, frozen=True, kw_only=True):
    """What a RayJob wants."""

    suspend: bool = False


class RayJobStatus(_Wire, frozen=True, kw_only=True):
    """How a RayJob is: the work (`job_status`, as Ray says it), and what the operator does about it."""

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
    """Pods of one template."""

    replicas: int = 1


class VolcanoJobSpec(_Wire, frozen=True, kw_only=True):
    """What a Volcano Job wants. It cannot be made suspended."""

    tasks: tuple[VolcanoTask, ...] = ()


class VolcanoState(_Wire, frozen=True, kw_only=True):
    """Where the Job is in its life."""

    phase: str = ""  # Pending, Running, Restarting, Completed, Aborted, Terminated, Failed ...
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class VolcanoJobStatus(_Wire, frozen=True, kw_only=True):
    """How a Volcano Job is."""

    state: VolcanoState = VolcanoState()
    running: int = 0
    succeeded: int = 0


class VolcanoJob(Object, frozen=True, kw_only=True):
    """A Job of Volcano."""

    spec: VolcanoJobSpec = VolcanoJobSpec()
    status: VolcanoJobStatus = VolcanoJobStatus()
