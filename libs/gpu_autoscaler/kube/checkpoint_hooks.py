"""Notifies pods by HTTP to save a checkpoint, in addition to the annotation that every pod gets.

The hook is `gpu-autoscaler.io/checkpoint-hook: ":8080/checkpoint"`: a port and a path of the pod itself, never of
another host. The answer has no effect: the annotation `checkpointed-at` confirms a saved checkpoint.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime

import aiohttp
import structlog

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels

# Wall time of all hooks together: a notice leaves two minutes, which an unresponsive pod must not use up.
SECONDS_MAX = 1.0

log = structlog.get_logger()


def hook_of(pod: core.Pod) -> str | None:
    """Return the URL of the pod's hook; None without a hook or a pod address."""
    hook, address = pod.metadata.annotations.get(labels.CHECKPOINT_HOOK), pod.status.pod_ip
    match = labels.CHECKPOINT_HOOK_FORM.fullmatch(hook or "")
    if hook and match is None:
        log.warning(
            "invalid checkpoint hook ignored; set a port and a path, such as :8080/checkpoint",
            pod=f"{pod.metadata.namespace}/{pod.metadata.name}",
            hook=hook[:80],
        )
    if match is None or not address or not 0 < int(match[1]) < 65536:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{int(match[1])}{match[2] or '/'}"


class CheckpointHooks:
    """Sends HTTP notifications to pods. `close` at the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def notify(self, pods: Sequence[core.Pod], deadline_at: datetime) -> None:
        """Notify each pod with a hook of its deadline; returns within SECONDS_MAX, whatever the answers."""
        targets = [(pod, url) for pod in pods if (url := hook_of(pod)) is not None]
        await asyncio.gather(*(self._notify(pod, url, deadline_at) for pod, url in targets))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _notify(self, pod: core.Pod, url: str, deadline_at: datetime) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS_MAX))
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        body = {"pod": name, "deadline_at": deadline_at.isoformat()}
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                if answer.status >= 300:
                    log.warning("checkpoint hook refused, annotation still set", pod=name, status=answer.status)
        except (aiohttp.ClientError, TimeoutError) as exc:
            log.warning("checkpoint hook unreachable, annotation still set", pod=name, error=repr(exc))
