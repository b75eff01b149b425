"""The exception tree. Adapters raise only these and keep the cause (`raise ... from exc`).

    AutoscalerError
    ├── TransientError      later: the message is delivered again after `retry_after_seconds`
    ├── PermanentError      never: the message becomes a dead letter with this reason
    │   └── InvalidFact     a message that is no valid fact: names field and reason
    │       └── UnknownType a well-formed event of a type that this version does not know
    ├── ConfigError         refuse to start; lists every mistake at once
    └── StalePlan           the plan's parent is no longer the last plan: plan again

Anything else that escapes a door is our bug: retried up to the limit, then a dead letter.
"""

from collections.abc import Sequence


class AutoscalerError(Exception):
    """Root of everything this project raises on purpose."""


class TransientError(AutoscalerError):
    """Something outside did not work now and may work later.

    `retry_after_seconds` is wall time; None leaves the wait to the caller's back-off.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class PermanentError(AutoscalerError):
    """Trying again cannot help; set the work aside and tell someone."""


class InvalidFact(PermanentError):
    """A message that is not a valid fact. The message names field and reason."""


class UnknownType(InvalidFact):
    """A well-formed event whose type this version does not know; set aside, not lost."""


class StalePlan(AutoscalerError):
    """Another plan was accepted since this one's parent. Fold it and plan again."""


class ConfigError(AutoscalerError):
    """Settings or policy that cannot be run with. Lists all mistakes, one a line."""

    def __init__(self, source: str, mistakes: Sequence[str]) -> None:
        self.source = source
        self.mistakes = tuple(mistakes)
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        super().__init__(f"{source}: {len(self.mistakes)} mistake(s), nothing was started\n{lines}")
