"""The server's refusals as errors of ours.

Source: Kubernetes API conventions, "Response Status Kind" (read 2026-11-21), and recorded answers.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError

_decoder = msgspec.json.Decoder(core.Status)


class HistoryLost(TransientError):
    """The version or page is too old (410): only a new list helps."""


def read_status(code: int, body: bytes) -> core.Status:
    """Return the Status in an answer; one made up from the code where a proxy answered something else."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return core.Status(code=code, message=body[:200].decode(errors="replace"))


def retry_after_seconds(status: core.Status, headers: Mapping[str, str]) -> float | None:
    """Return how long the server wants to be left alone; None where it did not say (seconds only, no dates)."""
    header = headers.get("Retry-After", "")
    if header.isdigit():
        return float(header)
    return None if status.details.retry_after_seconds is None else float(status.details.retry_after_seconds)


def refusal(code: int, status: core.Status, headers: Mapping[str, str], what: str) -> AutoscalerError:
    """Return the error that stands for this answer; `what` names verb and object.

    403 is not worth another try: rights do not come by waiting.
    """
    words = f"{what}: {code} {status.reason}: {status.message}".replace(" :", ":")
    if code == 404:
        return NotFound(words)
    # A patch that names another UID is 422 and not 409 (recorded): the UID is a field that may not change.
    if code == 409 or (code == 422 and any(cause.field == "metadata.uid" for cause in status.details.causes)):
        return Conflict(words)
    if code == 410:
        return HistoryLost(words)
    if code in (401, 408, 429) or code >= 500:
        return TransientError(words, retry_after_seconds=retry_after_seconds(status, headers))
    if code == 403 and (command := grant(status.message)):
        return PermanentError(f"{words}; grant it: {command}")
    return PermanentError(words)


# As the server says it. Source: k8s.io/apiserver, pkg/endpoints/handlers/responsewriters/errors.go (v0.36), and
# recorded answers.
_RIGHT = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)"| at the cluster scope)'
)


def grant(message: str) -> str | None:
    """Return the command that gives the right that a 403 is about; None where it is about something else."""
    found = _RIGHT.search(message)
    if found is None:
        return None
    return granting(found["user"], (found["verb"],), found["resource"], found["group"])


def granting(user: str, verbs: Sequence[str], resource: str, group: str) -> str:
    """Return the command that lets the user do this to a resource, with its subresource as in `pods/eviction`.

    It grants for all namespaces: what we read and write is not in one alone.
    """
    main, _, sub = resource.partition("/")
    told = main + (f".{group}" if group else "") + (f"/{sub}" if sub else "")
    account = user.removeprefix("system:serviceaccount:")
    name = f"gpu-autoscaler-{'-'.join(verbs)}-{resource}-{account}".lower()
    name = re.sub(r"[^a-z0-9.-]+", "-", name)  # for each its own
    whom = f"--user={user}" if account == user else f"--serviceaccount={account}"
    return (
        f"kubectl create clusterrole {name} --verb={','.join(verbs)} --resource={told} && "
        f"kubectl create clusterrolebinding {name} --clusterrole={name} {shlex.quote(whom)}"
    )
