"""Errors of the SDK.

GPUManagerError
├── ConnectionFailed      no answer, or no answer of this API
├── WaitTimedOut          the job has not reached the state in time
├── AmbiguousName         several jobs have this name
├── CheckpointError       a checkpoint cannot be saved or restored
│   ├── CheckpointStorageFailed  the directory or bucket cannot be used; `is_temporary`
│   └── CheckpointCorrupted      no undamaged version is left
└── ProblemError          the gateway refused the request
    ├── InvalidRequest    400, 413, 415, 422: `violations` names each field
    ├── NotAuthenticated  401: no token, or an unknown one
    ├── NotAllowed        403: the caller lacks the right
    ├── NotFound          404
    ├── Conflict          409: the key or id belongs to another request, or the job has ended
    ├── TooManyRequests   429: a queue or the caller's limit is full
    └── Unavailable       502, 503, 504: the gateway cannot answer now
"""

from http import HTTPStatus

import msgspec

from gpu_manager_sdk.models import Job, ProblemDocument, Violation


class GPUManagerError(Exception):
    """Any failure of the SDK. `detail` names cause and next step; `type` and `title` name the class of the problem."""

    status: int = 0  # of HTTP; 0: no answer
    type: str = "about:blank"
    title: str = ""
    violations: tuple[Violation, ...] = ()
    retry_after_seconds: float | None = None
    is_temporary: bool = False  # the same call may succeed later

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    @property
    def is_quota(self) -> bool:
        """True if a quota of the project or user is exceeded: for good (422), or until a job has started (429)."""
        return self.type.endswith("/quota-exceeded")

    @property
    def remedy(self) -> str:
        """Return the next step: the part of the detail after its first semicolon; empty if it names none."""
        return self.detail.partition("; ")[2]

    def __str__(self) -> str:
        lines = (f"  - {violation.field}: {violation.reason}" for violation in self.violations)
        return "\n".join((self.detail, *lines))


class ConnectionFailed(GPUManagerError):
    """The gateway did not answer, or something else did. `was_sent`: the request may have arrived."""

    is_temporary = True

    def __init__(self, detail: str, *, was_sent: bool, is_time_out: bool = False, is_temporary: bool = True) -> None:
        super().__init__(detail)
        self.was_sent = was_sent
        self.is_time_out = is_time_out
        self.is_temporary = is_temporary


class WaitTimedOut(GPUManagerError):
    """The job has not reached the awaited state in time. `job` is its last known state."""

    def __init__(self, job: Job, seconds: float) -> None:
        super().__init__(
            f"job {job.job_id} is still {job.status} after {seconds:g} s; see: gpu-autoscaler why job {job.job_id}"
        )
        self.job = job


class AmbiguousName(GPUManagerError):
    """Several jobs have this name, and not exactly one of them is active. `candidates` are the newest first."""

    def __init__(self, name: str, candidates: tuple[Job, ...]) -> None:
        listed = "".join(
            f"\n  {job.job_id}  {job.status}, project {job.project_id}, created {job.created_at:%Y-%m-%d %H:%M:%S} UTC"
            for job in candidates
        )
        super().__init__(f"several jobs are named {name!r}; use the id of one of them:{listed}")
        self.candidates = candidates


class CheckpointError(GPUManagerError):
    """A checkpoint cannot be saved or restored: the job's id names no file, or a class below."""


class CheckpointStorageFailed(CheckpointError):
    """The directory or bucket of the checkpoints cannot be used."""

    is_temporary = True


class CheckpointCorrupted(CheckpointError):
    """No kept version of the checkpoint has the size and checksum with which it was saved."""


class ProblemError(GPUManagerError):
    """The gateway answered with an error (RFC 9457)."""

    def __init__(self, document: ProblemDocument, retry_after_seconds: float | None = None) -> None:
        super().__init__(document.detail)
        self.status = document.status
        self.type = document.type
        self.title = document.title
        self.violations = document.violations
        self.document = document
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(ProblemError):
    """The request is invalid."""


class NotAuthenticated(ProblemError):
    """The token is missing, unknown or expired."""


class NotAllowed(ProblemError):
    """The caller lacks the right."""


class NotFound(ProblemError):
    """The object does not exist."""


class Conflict(ProblemError):
    """The request contradicts an earlier one, or the object's state."""


class TooManyRequests(ProblemError):
    """A limit of the gateway or of the policy is reached."""

    is_temporary = True


class Unavailable(ProblemError):
    """The gateway, its broker or its store cannot answer now."""

    is_temporary = True


_CLASSES: dict[int, type[ProblemError]] = {
    HTTPStatus.BAD_REQUEST: InvalidRequest,
    HTTPStatus.UNAUTHORIZED: NotAuthenticated,
    HTTPStatus.FORBIDDEN: NotAllowed,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.CONFLICT: Conflict,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: InvalidRequest,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: InvalidRequest,
    HTTPStatus.UNPROCESSABLE_ENTITY: InvalidRequest,
    HTTPStatus.TOO_MANY_REQUESTS: TooManyRequests,
    HTTPStatus.BAD_GATEWAY: Unavailable,
    HTTPStatus.SERVICE_UNAVAILABLE: Unavailable,
    HTTPStatus.GATEWAY_TIMEOUT: Unavailable,
}


def read_problem(status: int, body: bytes, retry_after: str | None) -> ProblemError:
    """Return the error of an answer with status 400 or above; also for one that no gateway wrote, such as a proxy's."""
    try:
        document = msgspec.json.decode(body, type=ProblemDocument)
    except msgspec.MsgspecError:
        detail = f"the gateway answered HTTP {status} without a reason; check that the address names the gateway"
        document = ProblemDocument(title=_phrase(status), status=status, detail=detail)
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return _CLASSES.get(status, ProblemError)(document, seconds)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
