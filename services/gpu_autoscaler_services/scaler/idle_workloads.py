"""Announces idle jobs and workloads on their pods, and ends workloads through their owner, as a plan decided.

| pods of | end |
| --- | --- |
| no owner | the pod is deleted with its own grace period |
| a Job | the Job is deleted with its pods; of a JobSet, the JobSet |
| a ReplicaSet | it is scaled to zero; of a Deployment, the Deployment |
| a StatefulSet | it is scaled to zero |
"""

from typing import Any

from gpu_autoscaler.kube.protocol import (
    DEPLOYMENTS,
    JOBS,
    JOBSETS,
    PODS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Kind,
    KubeApi,
    NotFound,
)
from gpu_autoscaler.kube.wire import core, workloads
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AnnounceIdleJob, AnnounceIdleWorkload, EndIdleWorkload
from gpu_autoscaler.model.errors import PermanentError


class IdleWorkloads:
    """Writes announcements and ends workloads. A pod or an owner that was replaced meanwhile is left alone."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube

    async def announce(self, decision: AnnounceIdleJob | AnnounceIdleWorkload) -> None:
        """Annotate each pod with the time of the announcement. Raises TransientError, PermanentError."""
        announcement = {
            labels.IDLE_ANNOUNCED_AT: decision.announced_at.isoformat(),
            labels.IDLE_ENDS_AT: decision.ends_at.isoformat(),
        }
        for pod in await self._pods(decision):
            await self._kube.annotate_pod(pod, announcement)

    async def end(self, decision: EndIdleWorkload) -> None:
        """End the workload. Raises NotFound, Conflict, TransientError, PermanentError."""
        pods = await self._pods(decision)
        if len(pods) < len(decision.pods):
            return  # changed meanwhile: a later plan sees it
        if decision.owner_kind is None:
            for pod in pods:
                await self._kube.delete_pod(pod, grace_seconds=int(pod.spec.termination_grace_period_seconds))
            return
        owner = _controller(pods[0].metadata)
        if owner is None or owner.uid != decision.owner_uid:
            return
        namespace = decision.namespace
        match decision.owner_kind:
            case "Job":
                job = await self._kube.get(JOBS, namespace, owner.name)
                above = _controller(job.metadata)
                if above is not None and above.kind == "JobSet":
                    await self._remove(JOBSETS, namespace, above)
                else:
                    await self._remove(JOBS, namespace, owner)
            case "ReplicaSet":
                replicas = await self._kube.get(REPLICA_SETS, namespace, owner.name)
                above = _controller(replicas.metadata)
                if above is not None and above.kind == "Deployment":
                    await self._scale_down(DEPLOYMENTS, namespace, above, len(pods))
                else:
                    await self._scale_down(REPLICA_SETS, namespace, owner, len(pods))
            case "StatefulSet":
                await self._scale_down(STATEFUL_SETS, namespace, owner, len(pods))

    async def _pods(self, decision: AnnounceIdleJob | AnnounceIdleWorkload | EndIdleWorkload) -> list[core.Pod]:
        """Return the pods of the decision that are still the same."""
        found: list[core.Pod] = []
        for known in decision.pods:
            try:
                pod = await self._kube.get(PODS, decision.namespace, known.name)
            except NotFound:
                continue
            if pod.metadata.uid == known.pod_uid and pod.metadata.deletion_timestamp is None:
                found.append(pod)
        return found

    async def _remove(self, kind: Kind[Any], namespace: str, owner: core.OwnerReference) -> None:
        thing: core.Object = await self._kube.get(kind, namespace, owner.name)
        if thing.metadata.uid == owner.uid and thing.metadata.deletion_timestamp is None:
            await self._kube.remove(kind, thing)

    async def _scale_down(
        self, kind: Kind[workloads.Scalable], namespace: str, owner: core.OwnerReference, idle_count: int
    ) -> None:
        thing = await self._kube.get(kind, namespace, owner.name)
        if thing.metadata.uid != owner.uid:
            return
        if thing.status.replicas > idle_count:
            raise PermanentError(
                f"{owner.kind} {namespace}/{owner.name} has {thing.status.replicas} pods, of which {idle_count} are"
                " known to be idle; scale it down by hand"
            )
        await self._kube.change(kind, namespace, owner.name, {"spec": {"replicas": 0}})


def _controller(metadata: core.Metadata) -> core.OwnerReference | None:
    return next((owner for owner in metadata.owner_references if owner.controller), None)
