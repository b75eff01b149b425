"""The exception tree. Adapters raise only these and keep the cause (`raise ... from exc`).

Any other exception is our bug: the message is retried up to the limit, then becomes a dead letter.
"""

from collections.abc import Sequence

MIGRATE_COMMAND = "gpu-autoscaler migrate --apply"  # the next step where broker or store are those of another release


class AutoscalerError(Exception):
    """Root of everything this project raises on purpose."""


class TransientError(AutoscalerError):
    """An outside system failed; a retry may succeed, after `retry_after_seconds` of wall time; None: by the caller's
    back-off."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class PermanentError(AutoscalerError):
    """A retry cannot succeed; the message becomes a dead letter."""


class RequestRefused(PermanentError):
    """A client's request cannot be met as it is; its author corrects it, no operator."""


class MessageTooLarge(PermanentError):
    """The broker stores no message of this size."""


class InvalidFact(PermanentError):
    """A message that is not a valid fact. The message names field and reason."""


class UnknownType(InvalidFact):
    """A well-formed event whose type this version does not know; kept as a dead letter."""


class StalePlan(AutoscalerError):
    """Another plan was accepted after this one's parent. Fold it and plan again.

    `last_sequence`: the last sequence of the subject when the stream refused; 0: the subject is empty; None: unknown.
    """

    def __init__(self, message: str, *, last_sequence: int | None = None) -> None:
        super().__init__(message)
        self.last_sequence = last_sequence


class ConfigError(AutoscalerError):
    """Invalid settings or policy. Lists all violations, one a line."""

    def __init__(self, source: str, violations: Sequence[str]) -> None:
        self.source = source
        self.violations = tuple(violations)
        lines = "\n".join(f"  - {violation}" for violation in self.violations)
        super().__init__(f"{source}: {len(self.violations)} error(s)\n{lines}")
