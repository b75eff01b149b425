"""Exit codes of commands, for scripts to distinguish outcomes."""

import enum
from http import HTTPStatus

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_manager_sdk.errors import AmbiguousName, ConnectionFailed, GPUManagerError, WaitTimedOut


class Exit(enum.IntEnum):
    """Exit codes of the CLI; `recompute` and `replay` add 5 to 7 (`replay/recompute.py`)."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    TIME_OUT = 4
    NOT_ALLOWED = 8
    QUOTA_EXCEEDED = 9
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Stop(AutoscalerError):
    """The command cannot continue: the message for stderr and the exit code."""

    def __init__(self, message: str, code: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.code = code


_CODES = {
    HTTPStatus.UNAUTHORIZED: Exit.NOT_ALLOWED,
    HTTPStatus.FORBIDDEN: Exit.NOT_ALLOWED,
    HTTPStatus.NOT_FOUND: Exit.NOT_FOUND,
    HTTPStatus.GATEWAY_TIMEOUT: Exit.TIME_OUT,
    HTTPStatus.UNPROCESSABLE_ENTITY: Exit.USAGE,
}


def exit_of(error: GPUManagerError) -> Exit:
    """Return the exit code of a failed call."""
    if isinstance(error, WaitTimedOut) or (isinstance(error, ConnectionFailed) and error.is_time_out):
        return Exit.TIME_OUT
    if error.is_quota:
        return Exit.QUOTA_EXCEEDED
    return Exit.USAGE if isinstance(error, AmbiguousName) else _CODES.get(HTTPStatus(error.status or 500), Exit.FAILURE)
