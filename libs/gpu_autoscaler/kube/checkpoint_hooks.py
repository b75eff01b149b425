"""Pods that want to be told by HTTP to save their work, besides by the annotation that all are told by.

The hook is `gpu-autoscaler.io/checkpoint-hook: ":8080/checkpoint"`: a port and a path of the pod itself, never of
another host. Whoever answers, and what, changes nothing: that the work is saved is said by `checkpointed-at`.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime

import aiohttp
import structlog

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels

# Wall time of all hooks together: a notice leaves two minutes, and a pod that does not listen must not take them.
SECONDS_MAX = 1.0

log = structlog.get_logger()


def hook_of(pod: core.Pod) -> str | None:
    """Return the address of the pod's hook; None where it has none, or no address yet."""
    asked, address = pod.metadata.annotations.get(labels.CHECKPOINT_HOOK), pod.status.pod_ip
    found = labels.CHECKPOINT_HOOK_FORM.fullmatch(asked or "")
    if asked and found is None:
        log.warning(
            "checkpoint hook not understood: it is a port and a path, as :8080/checkpoint; the pod is told by its "
            "annotation alone",
            pod=f"{pod.metadata.namespace}/{pod.metadata.name}",
            hook=asked[:80],
        )
    if found is None or not address or not 0 < int(found[1]) < 65536:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{int(found[1])}{found[2] or '/'}"


class Hooks:
    """Tells pods by HTTP. `close` it at the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def tell(self, pods: Sequence[core.Pod], deadline_at: datetime) -> None:
        """Tell each pod that has a hook by when to have saved; returns within a second, whoever answers."""
        told = [(pod, url) for pod in pods if (url := hook_of(pod)) is not None]
        await asyncio.gather(*(self._tell(pod, url, deadline_at) for pod, url in told))

    async def close(self) -> None:
        """Give back connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _tell(self, pod: core.Pod, url: str, deadline_at: datetime) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS_MAX))
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        body = {"pod": name, "deadline_at": deadline_at.isoformat()}
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                if answer.status >= 300:
                    log.warning("checkpoint hook refuses; the annotation stands", pod=name, status=answer.status)
        except (aiohttp.ClientError, TimeoutError) as exc:
            log.warning("checkpoint hook does not answer; the annotation stands", pod=name, error=repr(exc))
