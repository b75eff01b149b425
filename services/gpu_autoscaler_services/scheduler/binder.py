"""Makes, releases and takes back Kubernetes Jobs. Chooses nothing; every call bears repeating."""

from collections.abc import Sequence
from datetime import datetime

import structlog

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import JOBS, Conflict, KubeApi, NotFound
from gpu_autoscaler.kube.translate.job import is_ending, is_held, is_over, job_id_of
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler_services.scheduler.manifest import job_manifest, release_patch

log = structlog.get_logger()


class Binder:
    """The scheduler's hand in Kubernetes. Its Jobs live in one namespace."""

    def __init__(self, kube: KubeApi, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace

    async def create(self, spec: JobSpec, state: ClusterState) -> wire.Job:
        """Make the suspended Job, or return the one that is there. Raises PermanentError where that is another's."""
        try:
            return await self._kube.create_job(self._namespace, job_manifest(spec, state))
        except Conflict:
            return await self._own(spec.job_id)

    async def release(self, spec: JobSpec, placed: JobPlaced, state: ClusterState) -> None:
        """Let the Job go. One that runs already (it lost a member and is whole again) is left as it is."""
        try:
            job = await self._own(spec.job_id)
        except NotFound:
            job = await self.create(spec, state)
        if job.spec.suspend and not is_over(job):
            await self._kube.patch_job(
                self._namespace, job.metadata.name, release_patch(spec, placed.node_names, state)
            )

    async def hold(self, job_id: JobId) -> bool:
        """Suspend the Job, which takes its pods away; True once they are gone, also where there is no Job any more.

        None of them counts as failed. What the Job was let go with may be changed then. Raises TransientError.
        """
        try:
            job = await self._own(job_id)
        except NotFound:
            return True
        if not job.spec.suspend and not is_ending(job):
            job = await self._kube.patch_job(self._namespace, job.metadata.name, {"spec": {"suspend": True}})
        return is_held(job)

    async def has(self, job_id: JobId) -> bool:
        """True while there is a Kubernetes Job of the job's name, also where it is another's."""
        try:
            await self._kube.get(JOBS, self._namespace, job_id)
        except NotFound:
            return False
        return True

    async def is_ending(self, job_id: JobId) -> bool:
        """True where the Job is gone, over or about to be: it ends its pods itself, and its own end is said for it."""
        try:
            return is_ending(await self._kube.get(JOBS, self._namespace, job_id))
        except NotFound:
            return True

    async def withdraw(self, job_id: JobId) -> None:
        """Delete the Job with its pods, unless it ended by itself: then it is kept to be looked at for a while."""
        try:
            job = await self._own(job_id)
        except NotFound:
            return
        if not is_over(job):
            await self._kube.delete_job(job)

    async def ask_to_save(self, job_id: JobId, node_names: Sequence[str], deadline_at: datetime) -> None:
        """Tell the job's pods on these nodes to save their work by then. Raises TransientError."""
        for node_name in node_names:
            for pod in await self._kube.pods_on(node_name):
                if pod.metadata.labels.get(labels.JOB_ID) == job_id:
                    await self._kube.annotate_pod(pod, {labels.CHECKPOINT_REQUESTED: deadline_at.isoformat()})

    async def _own(self, job_id: JobId) -> wire.Job:
        job = await self._kube.get(JOBS, self._namespace, job_id)
        if job_id_of(job) != job_id:
            raise PermanentError(
                f"Kubernetes Job {self._namespace}/{job.metadata.name} is not that of job {job_id}; delete or rename it"
            )
        return job
