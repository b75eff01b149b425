"""Converts error answers of the API server to our errors.

Source: Kubernetes API conventions, "Response Status Kind" (read 2026-11-21), and recorded answers.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from gpu_autoscaler.kube.protocol import Conflict, NotFound, Rejected
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError

_decoder = msgspec.json.Decoder(core.Status)


class HistoryLost(TransientError):
    """The version or page is too old (410): only a new list helps."""


def read_status(code: int, body: bytes) -> core.Status:
    """Return the Status of an answer; one derived from the code for another answer, for example of a proxy."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return core.Status(code=code, message=body[:200].decode(errors="replace"))


def retry_after_seconds(status: core.Status, headers: Mapping[str, str]) -> float | None:
    """Return the server's Retry-After in seconds; None without one (dates are not supported)."""
    header = headers.get("Retry-After", "")
    if header.isdigit():
        return float(header)
    return None if status.details.retry_after_seconds is None else float(status.details.retry_after_seconds)


def error_from_status(code: int, status: core.Status, headers: Mapping[str, str], what: str) -> AutoscalerError:
    """Return the error for this answer; `what` names verb and object. 403 is permanent: permissions must be granted."""
    text = f"{what}: {code} {status.reason}: {status.message}".replace(" :", ":")
    if code == 404:
        return NotFound(text)
    # A patch that names another UID is 422 and not 409 (recorded): the UID is a field that may not change.
    if code == 409 or (code == 422 and any(cause.field == "metadata.uid" for cause in status.details.causes)):
        return Conflict(text)
    if code == 410:
        return HistoryLost(text)
    if code in (401, 408, 429) or code >= 500:
        return TransientError(text, retry_after_seconds=retry_after_seconds(status, headers))
    if code == 403 and _EXCEEDED_QUOTA in status.message:  # until other work ends
        return TransientError(text)
    if code == 403 and (command := grant(status.message)):
        return PermanentError(f"{text}; grant it: {command}")
    return Rejected(text) if code in (400, 422) else PermanentError(text)


# Of the admission plugin ResourceQuota (recorded).
_EXCEEDED_QUOTA = "exceeded quota"

# The server's message. Source: k8s.io/apiserver, pkg/endpoints/handlers/responsewriters/errors.go (v0.36), and
# recorded answers.
_PERMISSION = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)"| at the cluster scope)'
)


def grant(message: str) -> str | None:
    """Return the command that grants the permission missing in a 403; None for another message."""
    match = _PERMISSION.search(message)
    if match is None:
        return None
    return granting(match["user"], (match["verb"],), match["resource"], match["group"])


def granting(user: str, verbs: Sequence[str], resource: str, group: str) -> str:
    """Return the command that grants verbs on a resource (with subresource as in `pods/eviction`) in all namespaces."""
    main, _, sub = resource.partition("/")
    qualified = main + (f".{group}" if group else "") + (f"/{sub}" if sub else "")
    account = user.removeprefix("system:serviceaccount:")
    name = f"gpu-autoscaler-{'-'.join(verbs)}-{resource}-{account}".lower()
    name = re.sub(r"[^a-z0-9.-]+", "-", name)  # unique per permission and user
    subject = f"--user={user}" if account == user else f"--serviceaccount={account}"
    return (
        f"kubectl create clusterrole {name} --verb={','.join(verbs)} --resource={qualified} && "
        f"kubectl create clusterrolebinding {name} --clusterrole={name} {shlex.quote(subject)}"
    )
