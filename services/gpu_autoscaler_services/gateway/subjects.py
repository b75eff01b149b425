"""Subject filters with NATS wildcards: `*` matches one token, a final `>` one or more.

Source: NATS documentation, "Subject-Based Messaging", wildcards (read 2026-11-21).
"""

from collections.abc import Sequence

from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler_services.gateway.problems import rule_violated

PATTERNS_COUNT_MAX = 16
PATTERN_LENGTH_MAX = 255


class SubjectFilter:
    """One or more patterns, any of which may match. Raises a 422 for an invalid pattern."""

    def __init__(self, patterns: Sequence[str]) -> None:
        violations = [
            Violation("subject", f"{pattern!r}: {error}") for pattern in patterns if (error := _error(pattern))
        ]
        if len(patterns) > PATTERNS_COUNT_MAX:
            violations.append(Violation("subject", f"{len(patterns)} patterns; at most {PATTERNS_COUNT_MAX}"))
        if violations:
            raise rule_violated("invalid subject filter; examples: scaling.>, job.finished, gpu.*.*", *violations)
        self._patterns = tuple(tuple(pattern.split(".")) for pattern in patterns or (">",))

    def matches(self, subject: str) -> bool:
        tokens = subject.split(".")
        return any(_matches(pattern, tokens) for pattern in self._patterns)

    def streams(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return the known streams that can hold a matching subject; a stream is named by the first token."""
        return tuple(
            stream for stream in known if any(pattern[0] in {"*", ">", stream.lower()} for pattern in self._patterns)
        )


def _error(pattern: str) -> str:
    tokens = pattern.split(".")
    if len(pattern) > PATTERN_LENGTH_MAX:
        return f"longer than {PATTERN_LENGTH_MAX} characters"
    if any(not token or any(character.isspace() for character in token) for token in tokens):
        return "has an empty token or a space"
    if ">" in tokens[:-1]:
        return "`>` matches the rest, so it must be the last token"
    if any(len(token) > 1 and ("*" in token or ">" in token) for token in tokens):
        return "a wildcard must be a whole token"
    return ""


def _matches(pattern: Sequence[str], tokens: Sequence[str]) -> bool:
    for index, part in enumerate(pattern):
        if part == ">":
            return len(tokens) > index
        if index >= len(tokens) or part not in {"*", tokens[index]}:
            return False
    return len(pattern) == len(tokens)
