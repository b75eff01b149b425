"""Requests to a training process to save its work, and its answers, by annotations of its own pod.

requests = SaveRequests()  # in a pod whose account may get and patch pods
for step in range(steps):
    train(step)
    if requests.is_due():
        manager.save(job_id, state())
        requests.saved()

gpu-autoscaler writes `checkpoint-requested` with a deadline before it evicts the pod, and waits for `checkpointed-at`.
"""

import http.client
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_manager_sdk.errors import CheckpointError

REQUESTED = "gpu-autoscaler.io/checkpoint-requested"
CHECKPOINTED_AT = "gpu-autoscaler.io/checkpointed-at"
POLL_SECONDS = 5.0
CALL_SECONDS_MAX = 10.0
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class SaveRequests:
    """Reads the requests to one pod, at most once in `poll_seconds`, and reports its saves. Threads may share it."""

    def __init__(
        self,
        *,
        pod_name: str | None = None,
        namespace: str | None = None,
        api_url: str | None = None,
        account: Path = ACCOUNT,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pod_name`: POD_NAME, else HOSTNAME. The namespace, the token and the CA are those of `account`, the
        mounted service account; `api_url` is in the environment of every pod."""
        name = pod_name or os.environ.get("POD_NAME") or os.environ.get("HOSTNAME")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not name or (api_url is None and not host):
            raise CheckpointError("this process runs in no pod; start it in one, or pass pod_name and api_url")
        url = api_url or f"https://{f'[{host}]' if ':' in str(host) else host}:{port}"
        self._account = account
        self._pod = f"{namespace or self._read('namespace') or 'default'}/{name}"
        space, _, name = self._pod.partition("/")
        self._url = f"{url}/api/v1/namespaces/{space}/pods/{name}"
        ca_file = account / "ca.crt"
        self._tls = ssl.create_default_context(cafile=str(ca_file) if ca_file.exists() else None)
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._read_at: float | None = None
        self._requested: str | None = None
        self._answered: str | None = None
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Return whether a request is unanswered. A Kubernetes API that does not answer changes nothing: the last
        known request counts. Raises CheckpointError if the account may not read its pod."""
        with self._lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= self._poll_seconds:
                self._read_at = now
                self._poll()
            return bool(self._requested) and self._requested != self._answered

    @property
    def deadline(self) -> datetime | None:
        """Until when the last request that was read wants a save; None: there is none, or it is no instant."""
        try:
            return datetime.fromisoformat(self._requested or "")
        except ValueError:
            return None

    def saved(self, at: datetime | None = None) -> None:
        """Report a save, requested or not, that holds the progress of now, or of `at`. Raises CheckpointError; report
        again then."""
        at = at or datetime.now(UTC)
        with self._lock:
            requested = self._requested
            self._call("PATCH", {"metadata": {"annotations": {CHECKPOINTED_AT: at.isoformat()}}})
            self._answered = requested

    def _poll(self) -> None:
        try:
            pod = self._call("GET")
        except CheckpointError as error:
            if not error.is_temporary:
                raise
            return
        annotations = pod.get("metadata", {}).get("annotations") or {}
        self._requested = annotations.get(REQUESTED)

    def _call(self, method: str, patch: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - a pod
        token = self._read("token")
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        if patch is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        request = urllib.request.Request(  # noqa: S310 - of the environment or the caller
            self._url, json.dumps(patch).encode() if patch is not None else None, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS_MAX, context=self._tls) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            exc.close()
            step = "grant its service account get and patch of pods" if exc.code in (401, 403) else "check POD_NAME"
            raise _failed(
                f"pod {self._pod}: {method} failed with HTTP {exc.code}; {step}",
                is_temporary=exc.code == http.client.TOO_MANY_REQUESTS or exc.code >= http.client.INTERNAL_SERVER_ERROR,
            ) from exc
        except (OSError, http.client.HTTPException, ValueError) as exc:
            detail = f"pod {self._pod}: {method} failed: {exc}; check the route to the Kubernetes API"
            raise _failed(detail, is_temporary=True) from exc

    def _read(self, name: str) -> str | None:
        """Return a file of the service account, which Kubernetes renews; None if it is not mounted."""
        try:
            return (self._account / name).read_text(encoding="utf-8").strip()
        except OSError:
            return None


def _failed(detail: str, *, is_temporary: bool) -> CheckpointError:
    error = CheckpointError(detail)
    error.is_temporary = is_temporary
    return error
