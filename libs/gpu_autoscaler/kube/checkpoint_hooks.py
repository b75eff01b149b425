"""Notifies pods by HTTP to save a checkpoint, in addition to the annotation that every pod gets.

The hook is `gpu-autoscaler.io/checkpoint-hook: ":8080/checkpoint"`: a port and a path of the pod itself, never of
another host. The answer has no effect: the annotation `checkpointed-at` confirms a saved checkpoint.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import datetime

import aiohttp
import structlog

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels

SECONDS_MAX = 1.0  # wall time of one notification
# Of all notifications of the process: those in flight at once, and all that have begun. A storm on a hundred nodes with
# eight silent pods each is through in four seconds. Source: our own.
CONCURRENT_MAX = 256
PENDING_MAX = 4096

log = structlog.get_logger()


def hook_of(pod: core.Pod) -> str | None:
    """Return the URL of the pod's hook; None without a hook or a pod address."""
    hook, address = pod.metadata.annotations.get(labels.CHECKPOINT_HOOK), pod.status.pod_ip
    match = labels.CHECKPOINT_HOOK_FORM.fullmatch(hook or "")
    if hook and match is None:
        log.warning(
            "invalid checkpoint hook ignored; set a port and a path, such as :8080/checkpoint",
            pod=_name_of(pod),
            hook=hook[:80],
        )
    if match is None or not address or not 0 < int(match[1]) < 65536:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{int(match[1])}{match[2] or '/'}"


class CheckpointHooks:
    """Sends HTTP notifications to pods, while the caller goes on. `close` at the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._free = asyncio.Semaphore(CONCURRENT_MAX)
        self._pending: set[asyncio.Task[None]] = set()

    def notify(self, pods: Sequence[core.Pod], deadline_at: datetime) -> None:
        """Begin to notify each pod with a hook of its deadline. Never waits: no pod delays the drain of another.

        Beyond PENDING_MAX notifications a pod is not notified; its annotation is set all the same.
        """
        for pod in pods:
            if (url := hook_of(pod)) is None:
                continue
            if len(self._pending) >= PENDING_MAX:
                log.warning("checkpoint hook skipped, too many pending; annotation still set", pod=_name_of(pod))
                continue
            sending = asyncio.create_task(self._notify(pod, url, deadline_at))
            self._pending.add(sending)
            sending.add_done_callback(self._pending.discard)

    async def flush(self) -> None:
        """Return when every notification begun before has its answer, or none in time."""
        await asyncio.gather(*self._pending)

    async def close(self) -> None:
        """Give pending notifications SECONDS_MAX, then close connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_MAX):
                await self.flush()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _notify(self, pod: core.Pod, url: str, deadline_at: datetime) -> None:
        async with self._free:
            await self._post(_name_of(pod), url, deadline_at)

    async def _post(self, name: str, url: str, deadline_at: datetime) -> None:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=CONCURRENT_MAX)
            timeout = aiohttp.ClientTimeout(total=SECONDS_MAX)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        body = {"pod": name, "deadline_at": deadline_at.isoformat()}
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                if answer.status >= 300:
                    log.warning("checkpoint hook refused, annotation still set", pod=name, status=answer.status)
        except (aiohttp.ClientError, TimeoutError) as exc:
            log.warning("checkpoint hook unreachable, annotation still set", pod=name, error=repr(exc))


def _name_of(pod: core.Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
