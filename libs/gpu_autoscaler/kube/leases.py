"""Mirrors the leader as a Lease of coordination.k8s.io, where operators expect it.

It decides nothing: the holder of the lease on the bus writes it, and nothing reads it here. Source: Kubernetes API
reference v1.36, "Lease"; Kubernetes, "Leases" (read 2026-11-21).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Protocol

import structlog

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Conflict, NotFound, Now
from gpu_autoscaler.model.errors import PermanentError, TransientError

# As leaders of Kubernetes' own controllers: valid for 15 s, renewed well before (client-go, "leaderelection").
DURATION_SECONDS = 15
RENEWAL_SECONDS = 5.0  # wall time

log = structlog.get_logger()


class HeldLease(Protocol):
    """The authoritative lease."""

    holder: str

    @property
    def is_held(self) -> bool:
        """True while this process holds it."""


class LeaseMirror:
    """One Lease object, written only by its holder."""

    def __init__(self, kube: KubeClient, namespace: str, name: str) -> None:
        self._kube = kube
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name

    async def write(self, holder: str, now: datetime) -> None:
        """Write the holder. Raises TransientError, PermanentError; Conflict when another process wrote first."""
        at = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": holder, "renewTime": at, "leaseDurationSeconds": DURATION_SECONDS}
        try:
            known = await self._kube.read(f"{self._path}/{self._name}")
        except NotFound:
            new = {**spec, "acquireTime": at, "leaseTransitions": 0}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            await self._kube.create(self._path, {**body, "spec": new})
            return
        before: dict[str, Any] = known.get("spec") or {}
        if before.get("holderIdentity") != holder:
            spec |= {"acquireTime": at, "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1}
        version = known["metadata"]["resourceVersion"]
        await self._kube.patch(f"{self._path}/{self._name}", {"metadata": {"resourceVersion": version}, "spec": spec})


@contextlib.asynccontextmanager
async def mirroring(mirror: LeaseMirror, lease: HeldLease, now: Now) -> AsyncIterator[None]:
    """Mirror the lease while it is held and the context is open. A failed write is logged and retried."""
    task = asyncio.create_task(_mirror(mirror, lease, now))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _mirror(mirror: LeaseMirror, lease: HeldLease, now: Now) -> None:
    while True:
        if lease.is_held:
            try:
                await mirror.write(lease.holder, now())
            except (TransientError, PermanentError) as exc:
                write = log.debug if isinstance(exc, Conflict) else log.warning
                write("lease mirror not updated, retry scheduled", error=str(exc))
        await asyncio.sleep(RENEWAL_SECONDS)
