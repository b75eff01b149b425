"""Address and credentials of the gateway, found without code, and the limits of retries.

The address: the argument, else `GPU_AUTOSCALER_GATEWAY`, else `http://gpu-manager:8000`, the Service of the chart.
The token: the argument, else `GPU_AUTOSCALER_TOKEN`, else a file: the argument, else `GPU_AUTOSCALER_TOKEN_FILE`, else
the first of `TOKEN_FILES` that exists. Files are read again for every request, because Kubernetes rotates them.
"""

import os
import random
import ssl
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from gpu_manager_sdk.errors import ConnectionFailed, GPUManagerError

DEFAULT_URL = "http://gpu-manager:8000"
URL_VARIABLE = "GPU_AUTOSCALER_GATEWAY"
TOKEN_VARIABLE = "GPU_AUTOSCALER_TOKEN"  # noqa: S105 - a variable's name
TOKEN_FILE_VARIABLE = "GPU_AUTOSCALER_TOKEN_FILE"  # noqa: S105 - a variable's name
CA_FILE_VARIABLE = "GPU_AUTOSCALER_CA_FILE"
# A token projected for the gateway's own audience, then the one that every pod has
# (Kubernetes, "Configure Service Accounts for Pods", read 2026-11-23).
TOKEN_FILES = ("/var/run/secrets/gpu-autoscaler.io/token", "/var/run/secrets/kubernetes.io/serviceaccount/token")


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long a call is repeated. A call that is not repeatable is repeated only if it was not sent."""

    attempts_count_max: int = 6
    delay_seconds_min: float = 0.25  # doubled after each attempt
    delay_seconds_max: float = 8.0
    seconds_max: float = 60.0  # of one call with all its attempts; a longer Retry-After ends them

    def delay_seconds(
        self, error: GPUManagerError, *, attempt: int, elapsed_seconds: float, is_repeatable: bool
    ) -> float | None:
        """Return how long to wait after attempt number `attempt` (from 1) failed; None: do not repeat it."""
        may_have_acted = not isinstance(error, ConnectionFailed) or error.was_sent
        if not error.is_temporary or (may_have_acted and not is_repeatable) or attempt >= self.attempts_count_max:
            return None
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - so that clients do not return all at once
        delay = min(self.delay_seconds_max, self.delay_seconds_min * 2 ** (attempt - 1)) * spread
        if error.retry_after_seconds is not None:
            delay += error.retry_after_seconds
        return delay if elapsed_seconds + delay <= self.seconds_max else None


DEFAULT_RETRIES = Retries()


class Endpoint:
    """Where the gateway is, and who calls."""

    def __init__(
        self,
        api_url: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.url = (api_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{self.url!r} is not an address of the gateway; example: {DEFAULT_URL}")
        self.parts: SplitResult = parts
        self._token = token or (None if token_file else os.environ.get(TOKEN_VARIABLE))
        files = [token_file or os.environ.get(TOKEN_FILE_VARIABLE)]
        self._token_files = tuple(map(Path, filter(None, files))) or tuple(map(Path, TOKEN_FILES))
        self._is_file_required = bool(files[0])
        ca_file = ca_file or os.environ.get(CA_FILE_VARIABLE) or None
        self.tls = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None

    def token(self) -> str | None:
        """Return the caller's token as it is now; None: there is none. Raises GPUManagerError if it cannot be read."""
        if self._token:
            return self._token
        for path in self._token_files:
            try:
                return path.read_text(encoding="utf-8").strip() or None
            except FileNotFoundError:
                if not self._is_file_required:
                    continue
                detail = f"token file {path} does not exist; correct the path"
                raise ConnectionFailed(detail, was_sent=False, is_temporary=False) from None
            except OSError as error:
                detail = f"token file {path} cannot be read: {error}; make it readable"
                raise ConnectionFailed(detail, was_sent=False, is_temporary=False) from error
        return None

    def url_of(self, target: str) -> str:
        """Return the full address of a path and query of the API."""
        return f"{self.url}/api/v1/{target}"
