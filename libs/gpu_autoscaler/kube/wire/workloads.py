"""Third-party kinds that run a gang: the fields that show their progress.

Source: the CustomResourceDefinitions and Go types of JobSet 0.8 (jobset.x-k8s.io/v1alpha2), of Kubeflow's Training
Operator 1.8 (kubeflow.org/v1), of KubeRay 1.3 (ray.io/v1) and of Volcano 1.10 (batch.volcano.sh/v1alpha1), read
2026-11-21. The tests apply these very definitions to a real API server.
"""

from datetime import datetime

import msgspec

from gpu_autoscaler.kube.wire.core import Condition, Object, Wire

# ---- API discovery


class ServedResource(Wire, frozen=True, kw_only=True):
    """One kind that the server serves."""

    name: str


class Served(Wire, frozen=True, kw_only=True):
    """The kinds of one group and version."""

    resources: tuple[ServedResource, ...] = ()


class Suspension(Wire, frozen=True, kw_only=True):
    """The field of a spec, or of a run policy, that suspends a workload."""

    suspend: bool = False


class Replicas(Wire, frozen=True, kw_only=True):
    """The number of pods of one role or template."""

    replicas: int = 1


# ---- JobSet


class ReplicatedJob(Wire, frozen=True, kw_only=True):
    """Jobs of one template."""

    name: str
    replicas: int = 1


class JobSetSpec(Wire, frozen=True, kw_only=True):
    """The spec of a JobSet."""

    suspend: bool = False
    replicated_jobs: tuple[ReplicatedJob, ...] = ()


class ReplicatedJobStatus(Wire, frozen=True, kw_only=True):
    """Counts of a template's Jobs by progress. `ready`: all pods of the Job are ready or done."""

    name: str
    active: int = 0  # with a pod that has not ended
    ready: int = 0
    succeeded: int = 0


class JobSetStatus(Wire, frozen=True, kw_only=True):
    """The status of a JobSet."""

    conditions: tuple[Condition, ...] = ()
    replicated_jobs_status: tuple[ReplicatedJobStatus, ...] = ()


class JobSet(Object, frozen=True, kw_only=True):
    """A JobSet."""

    spec: JobSetSpec = JobSetSpec()
    status: JobSetStatus = JobSetStatus()


# ---- PyTorchJob


class PyTorchJobSpec(Wire, frozen=True, kw_only=True):
    """The spec of a PyTorchJob."""

    run_policy: Suspension = Suspension()
    pytorch_replica_specs: dict[str, Replicas] = msgspec.field(default_factory=dict)


class ReplicaStatus(Wire, frozen=True, kw_only=True):
    """Counts of a role's pods by progress. `active`: running."""

    active: int = 0
    succeeded: int = 0


class PyTorchJobStatus(Wire, frozen=True, kw_only=True):
    """The status of a PyTorchJob."""

    conditions: tuple[Condition, ...] | None = None
    replica_statuses: dict[str, ReplicaStatus] | None = None
    completion_time: datetime | None = None


class PyTorchJob(Object, frozen=True, kw_only=True):
    """A PyTorchJob."""

    spec: PyTorchJobSpec = PyTorchJobSpec()
    status: PyTorchJobStatus = PyTorchJobStatus()


# ---- RayJob


class RayJobStatus(Wire, frozen=True, kw_only=True):
    """The status of a RayJob: of the work (`job_status`, by Ray), and of its deployment by the operator."""

    job_status: str = ""  # PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED
    job_deployment_status: str = ""  # Initializing, Running, Retrying, Suspended, Complete, Failed ...
    reason: str = ""
    message: str = ""
    end_time: datetime | None = None


class RayJob(Object, frozen=True, kw_only=True):
    """A RayJob."""

    spec: Suspension = Suspension()
    status: RayJobStatus = RayJobStatus()


# ---- Volcano


class VolcanoJobSpec(Wire, frozen=True, kw_only=True):
    """The spec of a Volcano Job. It cannot be created suspended."""

    tasks: tuple[Replicas, ...] = ()


class VolcanoState(Wire, frozen=True, kw_only=True):
    """The phase of a Volcano Job."""

    phase: str = ""  # Pending, Running, Restarting, Completed, Aborted, Terminated, Failed ...
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class VolcanoJobStatus(Wire, frozen=True, kw_only=True):
    """The status of a Volcano Job."""

    state: VolcanoState = VolcanoState()
    running: int = 0
    succeeded: int = 0


class VolcanoJob(Object, frozen=True, kw_only=True):
    """A Volcano Job."""

    spec: VolcanoJobSpec = VolcanoJobSpec()
    status: VolcanoJobStatus = VolcanoJobStatus()


# ---- objects that are scaled (Kubernetes API reference v1.36, "Deployment", "ReplicaSet", "StatefulSet")


class ScalableStatus(Wire, frozen=True):
    """Pods that the object has created."""

    replicas: int = 0


class Scalable(Object, frozen=True, kw_only=True):
    """A Deployment, ReplicaSet or StatefulSet."""

    status: ScalableStatus = ScalableStatus()
