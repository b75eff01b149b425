"""Who leads, as clusters like to see it: a Lease of coordination.k8s.io beside the lease that decides.

It decides nothing: whoever holds the lease on the bus writes it, and nobody reads it here. Source: Kubernetes API
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

# As leaders of Kubernetes' own controllers do it: good for 15 s, told anew well before (client-go, "leaderelection").
DURATION_SECONDS = 15
RENEWAL_SECONDS = 5.0  # wall time

log = structlog.get_logger()


class Held(Protocol):
    """The lease that decides."""

    holder: str

    @property
    def is_held(self) -> bool:
        """True while it is ours."""
        ...


class ShownLease:
    """One Lease object, written by its holder alone."""

    def __init__(self, kube: KubeClient, namespace: str, name: str) -> None:
        self._kube = kube
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name

    async def show(self, holder: str, now: datetime) -> None:
        """Say that the holder leads. Raises TransientError, PermanentError; Conflict where another was first."""
        at = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        said = {"holderIdentity": holder, "renewTime": at, "leaseDurationSeconds": DURATION_SECONDS}
        try:
            known = await self._kube.read(f"{self._all}/{self._name}")
        except NotFound:
            new = {**said, "acquireTime": at, "leaseTransitions": 0}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            await self._kube.create(self._all, {**body, "spec": new})
            return
        before: dict[str, Any] = known.get("spec") or {}
        if before.get("holderIdentity") != holder:
            said |= {"acquireTime": at, "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1}
        version = known["metadata"]["resourceVersion"]
        await self._kube.patch(f"{self._all}/{self._name}", {"metadata": {"resourceVersion": version}, "spec": said})


@contextlib.asynccontextmanager
async def showing(shown: ShownLease, lease: Held, now: Now) -> AsyncIterator[None]:
    """Show the lease while it is held and the context is open. What cannot be written is told, and stops nothing."""
    task = asyncio.create_task(_show(shown, lease, now))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _show(shown: ShownLease, lease: Held, now: Now) -> None:
    while True:
        if lease.is_held:
            try:
                await shown.show(lease.holder, now())
            except (TransientError, PermanentError) as exc:
                say = log.debug if isinstance(exc, Conflict) else log.warning
                say("cannot show who leads; the lease on the bus stands, and this is tried again", error=str(exc))
        await asyncio.sleep(RENEWAL_SECONDS)
