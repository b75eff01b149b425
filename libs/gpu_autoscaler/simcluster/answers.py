"""What the API says when it refuses: Status bodies in the shapes that a real server sends.

Source: recorded answers of kube-apiserver 1.36.3, and apimachinery's `pkg/api/errors/errors.go` (read 2026-11-21).
"""

from collections.abc import Sequence

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.simcluster.kinds import Kind
from gpu_autoscaler.simcluster.objects import Json

Cause = tuple[str, str, str]  # field, reason, message

CONTINUE_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list "
    "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
    "results. Continuing with the provided token results in an inconsistent list - objects that were created, "
    "modified, or deleted between the time the first chunk was returned and now may show up in the list."
)
STALE_VERSION = "the object has been modified; please apply your changes to the latest version and try again"


class ApiRefusal(AutoscalerError):
    """A request that the API server answers with a failure Status."""

    def __init__(self, status: Json, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(status.get("message", ""))
        self.status = status
        self.code = int(status["code"])
        self.retry_after_seconds = retry_after_seconds


def success(code: int, details: Json | None = None) -> Json:
    """Return the Status of something done that has no object to show."""
    status: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details is not None:
        return {**status, "details": details}
    return {**status, "code": code}


def failure(
    code: int, reason: str, message: str, details: Json | None = None, *, retry_after_seconds: int | None = None
) -> ApiRefusal:
    """Return the refusal with that HTTP code; an empty reason is left out, as the real server does."""
    status: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    if reason:
        status["reason"] = reason
    if details is not None:
        status["details"] = details
    return ApiRefusal({**status, "code": code}, retry_after_seconds=retry_after_seconds)


def details_of(kind: Kind, name: str, *, as_kind: bool = False) -> Json:
    """Return the details that name an object: by resource, or by kind where the real server does so."""
    group = {"group": kind.group} if kind.group else {}
    named = {"name": name} if name else {}
    return {**named, **group, "kind": kind.kind if as_kind else kind.plural}


def not_found(kind: Kind, name: str) -> ApiRefusal:
    """404: no object of that name."""
    return failure(404, "NotFound", f'{kind.resource} "{name}" not found', details_of(kind, name))


def already_exists(kind: Kind, name: str) -> ApiRefusal:
    """409: the name is taken."""
    return failure(409, "AlreadyExists", f'{kind.resource} "{name}" already exists', details_of(kind, name))


def conflict(kind: Kind, name: str, why: str = STALE_VERSION) -> ApiRefusal:
    """409: the object is not what the request believed."""
    message = f'Operation cannot be fulfilled on {kind.resource} "{name}": {why}'
    return failure(409, "Conflict", message, details_of(kind, name))


def other_uid(kind: Kind, name: str, wanted: str, recorded: str) -> ApiRefusal:
    """409: a precondition names the uid of another object."""
    why = (
        f"the UID in the precondition ({wanted}) does not match the UID in record ({recorded}). "
        "The object might have been deleted and then recreated"
    )
    message = f'Operation cannot be fulfilled on {kind.qualified} "{name}": {why}'
    return failure(409, "Conflict", message, details_of(kind, name, as_kind=True))


def invalid(kind: Kind, name: str, causes: Sequence[Cause]) -> ApiRefusal:
    """422: the object breaks rules; every broken rule is named."""
    texts = [f"{field}: {message}" for field, _, message in causes]
    listed = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details = details_of(kind, name, as_kind=True)
    details["causes"] = [{"reason": reason, "message": message, "field": field} for field, reason, message in causes]
    return failure(422, "Invalid", f'{kind.qualified} "{name}" is invalid: {listed}', details)


def forbidden(kind: Kind, name: str, why: str) -> ApiRefusal:
    """403: understood, and not allowed."""
    subject = f'{kind.resource} "{name}"' if name else kind.resource
    return failure(403, "Forbidden", f"{subject} is forbidden: {why}", details_of(kind, name))


def unauthorized() -> ApiRefusal:
    """401: a token that nobody issued."""
    return failure(401, "Unauthorized", "Unauthorized")


def bad_request(message: str) -> ApiRefusal:
    """400: the request cannot be read."""
    return failure(400, "BadRequest", message)


def unsupported_media_type() -> ApiRefusal:
    """415: a patch in a format that the resource does not take."""
    return failure(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})


def method_not_allowed() -> ApiRefusal:
    """405: the path is known, the verb is not."""
    return failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {})


def list_expired() -> ApiRefusal:
    """410: a list at an exact version that history no longer holds."""
    return failure(410, "Expired", "The resourceVersion for the provided list is too old.")


def continue_expired(fresh_token: str) -> ApiRefusal:
    """410: a continue token whose version history no longer holds; carries one for an inconsistent rest."""
    refusal = failure(410, "Expired", CONTINUE_TOO_OLD)
    refusal.status["metadata"] = {"continue": fresh_token}
    return refusal


def watch_too_old(version: int, oldest: int) -> ApiRefusal:
    """410, sent inside a watch: it asks for changes that history no longer holds."""
    return failure(410, "Expired", f"too old resource version: {version} ({oldest})")


def version_of_the_future(version: int, current: int) -> ApiRefusal:
    """504: a list not older than a version that is not yet reached."""
    details = {"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}
    message = f"Timeout: Too large resource version: {version}, current: {current}"
    return failure(504, "Timeout", message, {**details, "retryAfterSeconds": 1}, retry_after_seconds=1)
