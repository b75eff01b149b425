"""Makes, releases and takes back Kubernetes Jobs and their like. Chooses nothing; every call bears repeating."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import structlog

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.hooks import Hooks
from gpu_autoscaler.kube.protocol import SERVICES, Conflict, KubeApi, NotFound, Patch
from gpu_autoscaler.kube.translate.job import is_ending, is_held, is_over, job_id_of
from gpu_autoscaler.kube.translate.progress import KINDS, called, progress
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec, Runtime
from gpu_autoscaler_services.scheduler import others
from gpu_autoscaler_services.scheduler.manifest import gang_service, is_gang, job_manifest, release_patch

log = structlog.get_logger()

_HELD: dict[Runtime, Callable[[JobSpec, ClusterState], dict[str, Any]]] = {
    Runtime.JOB: job_manifest,
    Runtime.JOBSET: others.jobset,
    Runtime.PYTORCHJOB: others.pytorchjob,
    Runtime.RAYJOB: others.rayjob,
}
_RELEASES: dict[Runtime, Callable[[JobSpec, Sequence[str], ClusterState], Patch]] = {
    Runtime.JOB: release_patch,
    Runtime.JOBSET: others.release_jobset,
    Runtime.PYTORCHJOB: others.release_pytorchjob,
    Runtime.RAYJOB: others.release_rayjob,
}
_HOLDS: dict[Runtime, Patch] = {
    Runtime.JOB: {"spec": {"suspend": True}},
    Runtime.JOBSET: {"spec": {"suspend": True}},
    Runtime.PYTORCHJOB: {"spec": {"runPolicy": {"suspend": True}}},
    Runtime.RAYJOB: {"spec": {"suspend": True}},
}


class NotInstalled(PermanentError):
    """The kind that the job wants is not installed in this cluster (any more)."""


class Binder:
    """The scheduler's hand in Kubernetes. What it makes lives in one namespace."""

    def __init__(self, kube: KubeApi, namespace: str, hooks: Hooks | None = None) -> None:
        """Without hooks pods are told to save by their annotation alone."""
        self._kube = kube
        self._hooks = hooks
        self._namespace = namespace

    async def serves(self, runtime: Runtime) -> bool:
        """True where members can be made in this kind."""
        kind = KINDS[runtime]
        return not kind.is_optional or await self._kube.serves(kind)

    async def create(self, spec: JobSpec, state: ClusterState) -> None:
        """Make the suspended Job, unless it is there. Raises PermanentError where that is another's, NotInstalled.

        A kind that cannot be suspended is made when it is released: nothing may run before.
        """
        if spec.runtime in _HELD:
            await self._make(spec, _HELD[spec.runtime](spec, state))

    async def release(self, spec: JobSpec, placed: JobPlaced, state: ClusterState) -> None:
        """Let the Job go. One that runs already (it lost a member and is whole again) is left as it is."""
        try:
            job = await self._own(spec.job_id, spec.runtime)
        except NotFound:
            if spec.runtime is Runtime.VOLCANO:
                await self._make(spec, others.volcano_job(spec, state, placed.node_names))
                return
            job = await self._make(spec, _HELD[spec.runtime](spec, state))
        if progress(job).is_suspended and not is_over(job):
            kind = KINDS[spec.runtime]
            if spec.runtime is Runtime.JOBSET and placed.attempt > 1:
                patch = others.release_jobset_anew(spec, placed.node_names, state)
            else:
                patch = _RELEASES[spec.runtime](spec, placed.node_names, state)
            try:
                await self._kube.change(kind, self._namespace, job.metadata.name, patch)
            except PermanentError as exc:
                if placed.attempt == 1 or spec.runtime is not Runtime.JOB:
                    raise
                # Servers that keep the start time of a held Job let its template be as it was: better there than never.
                log.warning("a held job goes on as it was let go first, maybe on spot", job=called(job), error=str(exc))
                await self._kube.change(kind, self._namespace, job.metadata.name, {"spec": {"suspend": False}})

    async def hold(self, job_id: JobId, runtime: Runtime) -> bool:
        """Suspend the Job, which takes its pods away; True once they are gone, also where there is no Job any more.

        None of them counts as failed. What the Job was let go with may be changed then. A kind that cannot be suspended
        is taken away, marked so that this is not taken for its end, and made anew with its place.

        Raises TransientError.
        """
        try:
            job = await self._own(job_id, runtime)
        except NotFound:
            return True
        if runtime not in _HOLDS:
            if job.metadata.deletion_timestamp is None and not is_over(job):
                mark: Patch = {"metadata": {"annotations": {labels.TAKEN_AWAY: "true"}}}
                await self._kube.change(KINDS[runtime], self._namespace, job.metadata.name, mark)
                await self._kube.remove(KINDS[runtime], job, is_last=True)
            return False
        if not progress(job).is_suspended and not is_ending(job):
            job = await self._kube.change(KINDS[runtime], self._namespace, job.metadata.name, _HOLDS[runtime])
        return is_held(job)

    async def has(self, job_id: JobId, runtime: Runtime) -> bool:
        """True while there is a Kubernetes Job of the job's name, also where it is another's."""
        try:
            await self._kube.get(KINDS[runtime], self._namespace, job_id)
        except NotFound:
            return False
        return True

    async def is_ending(self, job_id: JobId, runtime: Runtime) -> bool:
        """True where the Job is gone, over or about to be: it ends its pods itself, and its own end is said for it."""
        try:
            return is_ending(await self._kube.get(KINDS[runtime], self._namespace, job_id))
        except NotFound:
            return True

    async def withdraw(self, job_id: JobId, runtime: Runtime) -> None:
        """Delete the Job with its pods, unless it ended by itself: then it is kept to be looked at for a while."""
        try:
            job = await self._own(job_id, runtime)
        except NotFound:
            return
        if not is_over(job):
            await self._kube.remove(KINDS[runtime], job)

    async def ask_to_save(self, job_id: JobId, node_names: Sequence[str], deadline_at: datetime) -> None:
        """Tell the job's pods on these nodes to save their work by then. Raises TransientError."""
        for node_name in node_names:
            on_node = await self._kube.pods_on(node_name)
            pods = [pod for pod in on_node if pod.metadata.labels.get(labels.JOB_ID) == job_id]
            for pod in pods:
                await self._kube.annotate_pod(pod, {labels.CHECKPOINT_REQUESTED: deadline_at.isoformat()})
            if self._hooks is not None:
                await self._hooks.tell(pods, deadline_at)

    async def _make(self, spec: JobSpec, manifest: dict[str, Any]) -> wire.Object:
        kind = KINDS[spec.runtime]
        try:
            job: wire.Object = await self._kube.make(kind, self._namespace, manifest)
        except Conflict:
            job = await self._own(spec.job_id, spec.runtime)
        except NotFound as exc:
            if await self.serves(spec.runtime):
                raise
            raise NotInstalled(not_installed(spec.runtime)) from exc
        if isinstance(job, wire.Job) and is_gang(spec):
            # Asked for again where a crash came between the two: who has one has the other.
            with contextlib.suppress(Conflict):
                await self._kube.make(SERVICES, self._namespace, gang_service(spec, job))
        return job

    async def _own(self, job_id: JobId, runtime: Runtime) -> wire.Object:
        job: wire.Object = await self._kube.get(KINDS[runtime], self._namespace, job_id)
        if job_id_of(job) != job_id:
            raise PermanentError(f"{called(job)} is not that of job {job_id}; delete or rename it")
        return job


def not_installed(runtime: Runtime) -> str:
    """Return what to do about a kind that is missing."""
    kind = KINDS[runtime]
    return (
        f"this cluster has no CustomResourceDefinition {kind.crd} ({kind.api.removeprefix('/apis/')}), which a "
        f"{runtime} needs; install what brings it, or ask with runtime job"
    )
