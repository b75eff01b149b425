"""The server's refusals as errors of ours.

Source: Kubernetes API conventions, "Response Status Kind" (read 2026-11-21), and recorded answers.
"""

from collections.abc import Mapping

import msgspec

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError

_decoder = msgspec.json.Decoder(wire.Status)


class HistoryLost(TransientError):
    """The version or page is too old (410): only a new list helps."""


def read_status(code: int, body: bytes) -> wire.Status:
    """Return the Status in an answer; one made up from the code where a proxy answered something else."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return wire.Status(code=code, message=body[:200].decode(errors="replace"))


def retry_after_seconds(status: wire.Status, headers: Mapping[str, str]) -> float | None:
    """Return how long the server wants to be left alone; None where it did not say (seconds only, no dates)."""
    header = headers.get("Retry-After", "")
    if header.isdigit():
        return float(header)
    return None if status.details.retry_after_seconds is None else float(status.details.retry_after_seconds)


def refusal(code: int, status: wire.Status, headers: Mapping[str, str], what: str) -> AutoscalerError:
    """Return the error that stands for this answer; `what` names verb and object.

    401 is worth another try: service account tokens change under way. 403 is not: rights do not come by waiting.
    """
    words = f"{what}: {code} {status.reason}: {status.message}".replace(" :", ":")
    if code == 404:
        return NotFound(words)
    if code == 409:
        return Conflict(words)
    if code == 410:
        return HistoryLost(words)
    if code in (401, 408, 429) or code >= 500:
        return TransientError(words, retry_after_seconds=retry_after_seconds(status, headers))
    if code == 403:
        return PermanentError(f"{words}; grant it to the service account")
    return PermanentError(words)
