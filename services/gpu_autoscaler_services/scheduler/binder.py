"""Creates, releases and withdraws Kubernetes Jobs of every kind. Decides nothing; every call is idempotent."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.core.disruption.protection import request_annotations
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.pod_templates.resources import Template, pod_of
from gpu_autoscaler.kube.protocol import (
    CLAIMS,
    CLASSES,
    SERVICES,
    VOLUMES,
    Conflict,
    KubeApi,
    NotFound,
    Patch,
    Rejected,
)
from gpu_autoscaler.kube.translate.devices import Claims
from gpu_autoscaler.kube.translate.job import is_ending, is_fully_suspended, is_over, job_id_of
from gpu_autoscaler.kube.translate.related_objects import NO_PROVISIONER, Key, RelatedObjects, Storage, related_objects
from gpu_autoscaler.kube.translate.workload_progress import KINDS, display_name, progress
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec, Runtime
from gpu_autoscaler_services.scheduler import job_kinds
from gpu_autoscaler_services.scheduler.manifest import gang_service, is_gang, job_manifest, release_patch

log = structlog.get_logger()

_SUSPENDED: dict[Runtime, Callable[[JobSpec, ClusterState, Template | None], dict[str, Any]]] = {
    Runtime.JOB: job_manifest,
    Runtime.JOBSET: job_kinds.jobset,
    Runtime.PYTORCHJOB: job_kinds.pytorchjob,
    Runtime.RAYJOB: job_kinds.rayjob,
}
_RELEASE_PATCHES: dict[Runtime, Callable[[JobSpec, Sequence[str], ClusterState, Template | None], Patch]] = {
    Runtime.JOB: release_patch,
    Runtime.JOBSET: job_kinds.release_jobset,
    Runtime.PYTORCHJOB: job_kinds.release_pytorchjob,
    Runtime.RAYJOB: job_kinds.release_rayjob,
}
_SUSPEND_PATCHES: dict[Runtime, Patch] = {
    Runtime.JOB: {"spec": {"suspend": True}},
    Runtime.JOBSET: {"spec": {"suspend": True}},
    Runtime.PYTORCHJOB: {"spec": {"runPolicy": {"suspend": True}}},
    Runtime.RAYJOB: {"spec": {"suspend": True}},
}


class NotInstalled(PermanentError):
    """The CustomResourceDefinition of the job's runtime is not installed in this cluster."""


class InvalidJob(PermanentError):
    """The API server rejects the Job as requested, for example because of its image's name."""


class Binder:
    """Creates and changes Jobs, each in the namespace of its spec. `namespace`: of those whose spec has none."""

    def __init__(self, kube: KubeApi, namespace: str, hooks: CheckpointHooks | None = None) -> None:
        """Without `hooks` pods are asked to save a checkpoint by annotation only."""
        self.kube = kube
        self._hooks = hooks
        self.namespace = namespace

    async def serves(self, runtime: Runtime) -> bool:
        """Return True if the kind of this runtime is installed."""
        kind = KINDS[runtime]
        return not kind.is_optional or await self.kube.serves(kind)

    async def volumes(self, template: Template, namespace: str = "") -> RelatedObjects:
        """Return which nodes reach the claims of the template's volumes, or which claim no node can have.

        A claim whose volume is not known yet allows every node. Raises TransientError.
        """
        pod = pod_of(template, namespace or self.namespace)
        storage, volumes = Storage(), list[core.Volume]()
        for volume in pod.spec.volumes:
            source = volume.persistent_volume_claim
            if source is not None and await self._read_claim((pod.metadata.namespace, source.claim_name), storage):
                volumes.append(volume)
        decided = msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, volumes=tuple(volumes)))
        return related_objects(decided, storage, Claims(), version=0, group_count_min=None)

    async def _read_claim(self, key: Key, storage: Storage) -> bool:
        """Add the claim with its volume or class; return whether they decide which nodes reach it."""
        try:
            claim = storage.claims[key] = await self.kube.get(CLAIMS, *key)
        except NotFound:
            return True
        if claim.status.phase == "Lost":
            return True
        if volume_name := claim.spec.volume_name:
            with contextlib.suppress(NotFound):
                storage.volumes[volume_name] = await self.kube.get(VOLUMES, "", volume_name)
            return True
        if not (class_name := claim.spec.storage_class_name):
            return False
        try:
            storage_class = storage.classes[class_name] = await self.kube.get(CLASSES, "", class_name)
        except NotFound:
            return True
        return storage_class.volume_binding_mode != "Immediate" and storage_class.provisioner != NO_PROVISIONER

    async def create(self, spec: JobSpec, state: ClusterState, template: Template | None = None) -> None:
        """Create the suspended Job if it does not exist. `template`: of its members; None: they have the short form.

        Raises PermanentError if its name is taken, NotInstalled, InvalidJob. A kind that cannot be
        suspended is created when it is released: nothing may run before.
        """
        if spec.runtime in _SUSPENDED:
            await self._make(spec, _SUSPENDED[spec.runtime](spec, state, template))

    async def release(
        self, spec: JobSpec, placed: JobPlaced, state: ClusterState, template: Template | None = None
    ) -> None:
        """Resume the Job with its affinity. A Job that runs already (a lost member was replaced) is left unchanged."""
        try:
            job = await self._own(spec.job_id, spec.runtime, spec.namespace)
        except NotFound:
            if spec.runtime is Runtime.VOLCANO:
                await self._make(spec, job_kinds.volcano_job(spec, state, placed.node_names, template))
                return
            job = await self._make(spec, _SUSPENDED[spec.runtime](spec, state, template))
        if progress(job).is_suspended and not is_over(job):
            kind = KINDS[spec.runtime]
            if spec.runtime is Runtime.JOBSET and placed.attempt > 1:
                patch = job_kinds.resume_jobset(spec, placed.node_names, state, template)
            else:
                patch = _RELEASE_PATCHES[spec.runtime](spec, placed.node_names, state, template)
            try:
                await self.kube.change(kind, job.metadata.namespace, job.metadata.name, patch)
            except PermanentError as exc:
                if placed.attempt == 1 or spec.runtime is not Runtime.JOB:
                    raise
                # API servers that keep the start time of a suspended Job make its template immutable: resume it as is.
                log.warning("affinity change refused, job resumed unchanged", job=display_name(job), error=str(exc))
                await self.kube.change(kind, job.metadata.namespace, job.metadata.name, {"spec": {"suspend": False}})

    async def suspend(self, job_id: JobId, runtime: Runtime, namespace: str = "") -> bool:
        """Suspend the Job, which deletes its pods; return True once they, or the Job itself, are gone.

        None of the pods counts as failed. After that the Job's affinity may be changed. A kind that cannot be suspended
        is deleted, marked so that the deletion is not taken for its end, and created again with its placement.

        Raises TransientError.
        """
        try:
            job = await self._own(job_id, runtime, namespace)
        except NotFound:
            return True
        if runtime not in _SUSPEND_PATCHES:
            if job.metadata.deletion_timestamp is None and not is_over(job):
                mark: Patch = {"metadata": {"annotations": {labels.TAKEN_AWAY: "true"}}}
                await self.kube.change(KINDS[runtime], job.metadata.namespace, job.metadata.name, mark)
                await self.kube.remove(KINDS[runtime], job, is_last=True)
            return False
        if not progress(job).is_suspended and not is_ending(job):
            job = await self.kube.change(
                KINDS[runtime], job.metadata.namespace, job.metadata.name, _SUSPEND_PATCHES[runtime]
            )
        return is_fully_suspended(job)

    async def has(self, job_id: JobId, runtime: Runtime, namespace: str = "") -> bool:
        """Return True if a Kubernetes Job of the job's name exists, whoever created it."""
        try:
            await self.kube.get(KINDS[runtime], namespace or self.namespace, job_id)
        except NotFound:
            return False
        return True

    async def is_ending(self, job_id: JobId, runtime: Runtime, namespace: str = "") -> bool:
        """Return True if the Job is gone, finished or about to finish: then it ends its pods itself."""
        try:
            return is_ending(await self.kube.get(KINDS[runtime], namespace or self.namespace, job_id))
        except NotFound:
            return True

    async def withdraw(self, job_id: JobId, runtime: Runtime, namespace: str = "") -> None:
        """Delete the Job with its pods, unless it finished by itself: then it is kept for inspection."""
        try:
            job = await self._own(job_id, runtime, namespace)
        except NotFound:
            return
        if not is_over(job):
            await self.kube.remove(KINDS[runtime], job)

    async def request_checkpoints(
        self, job_id: JobId, node_names: Sequence[str], now: datetime, deadline_at: datetime
    ) -> None:
        """Ask the job's pods on these nodes to save a checkpoint by the deadline. Raises TransientError."""
        for node_name in node_names:
            on_node = await self.kube.pods_on(node_name)
            pods = [pod for pod in on_node if pod.metadata.labels.get(labels.JOB_ID) == job_id]
            for pod in pods:
                await self.kube.annotate_pod(pod, request_annotations(now, deadline_at))
            if self._hooks is not None:
                self._hooks.notify(pods, deadline_at)

    async def _make(self, spec: JobSpec, manifest: dict[str, Any]) -> core.Object:
        kind, namespace = KINDS[spec.runtime], spec.namespace or self.namespace
        try:
            job: core.Object = await self.kube.make(kind, namespace, manifest)
        except Conflict:
            job = await self._own(spec.job_id, spec.runtime, spec.namespace)
        except Rejected as exc:
            raise InvalidJob(f"Kubernetes rejects the job; correct it and submit it again: {exc}") from exc
        except NotFound as exc:
            if await self.serves(spec.runtime):
                if namespace == self.namespace:
                    raise
                raise InvalidJob(
                    f"namespace {namespace} of project {spec.project_id} does not exist; create it, or map the project "
                    "to another one in tenancy.projects of the policy, then submit the job again"
                ) from exc
            raise NotInstalled(not_installed(spec.runtime)) from exc
        if isinstance(job, core.Job) and is_gang(spec):
            # Repeated after a crash between the two creations.
            with contextlib.suppress(Conflict):
                await self.kube.make(SERVICES, namespace, gang_service(spec, job))
        return job

    async def _own(self, job_id: JobId, runtime: Runtime, namespace: str) -> core.Object:
        job: core.Object = await self.kube.get(KINDS[runtime], namespace or self.namespace, job_id)
        if job_id_of(job) != job_id:
            raise PermanentError(f"{display_name(job)} is not managed by job {job_id}; delete or rename it")
        return job


def not_installed(runtime: Runtime) -> str:
    """Return what is missing for this runtime, and the next step."""
    kind = KINDS[runtime]
    return (
        f"{runtime} needs CustomResourceDefinition {kind.crd} ({kind.api.removeprefix('/apis/')}), which is not "
        "installed; install its operator, or use runtime job"
    )
