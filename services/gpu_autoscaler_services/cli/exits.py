"""Exit codes of commands, for scripts to distinguish outcomes."""

import enum

from gpu_autoscaler.model.errors import AutoscalerError


class Exit(enum.IntEnum):
    """Exit codes of the CLI; `recompute` and `replay` add their own from 5 on (`replay/recompute.py`)."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    TIME_OUT = 4
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Stop(AutoscalerError):
    """The command cannot continue: the message for stderr and the exit code."""

    def __init__(self, message: str, code: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.code = code
