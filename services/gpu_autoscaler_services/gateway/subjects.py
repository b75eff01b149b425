"""Subject filters with NATS' wildcards: `*` stands for one token, `>` at the end for one or more.

Source: NATS documentation, "Subject-Based Messaging", wildcards (read 2026-11-21).
"""

from collections.abc import Sequence
from http import HTTPStatus

from gpu_autoscaler.model.jobs import Mistake
from gpu_autoscaler_services.gateway.problems import Problem

PATTERNS_COUNT_MAX = 16
PATTERN_LENGTH_MAX = 255


class SubjectFilter:
    """One or more patterns; a subject that any of them matches is meant. Raises a 422 for what is no pattern."""

    def __init__(self, patterns: Sequence[str]) -> None:
        mistakes = [Mistake("subject", f"{pattern!r}: {wrong}") for pattern in patterns if (wrong := _wrong(pattern))]
        if len(patterns) > PATTERNS_COUNT_MAX:
            mistakes.append(Mistake("subject", f"{len(patterns)} patterns; at most {PATTERNS_COUNT_MAX}"))
        if mistakes:
            detail = "a subject filter cannot be read; examples: scaling.>, job.finished, gpu.*.*"
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, mistakes=tuple(mistakes))
        self._patterns = tuple(tuple(pattern.split(".")) for pattern in patterns or (">",))

    def matches(self, subject: str) -> bool:
        """True when a pattern matches the subject."""
        tokens = subject.split(".")
        return any(_matches(pattern, tokens) for pattern in self._patterns)

    def streams(self, known: Sequence[str]) -> tuple[str, ...]:
        """Those of the known streams that can hold a matching subject; a stream is its subjects' first token."""
        return tuple(
            stream for stream in known if any(pattern[0] in {"*", ">", stream.lower()} for pattern in self._patterns)
        )


def _wrong(pattern: str) -> str:
    tokens = pattern.split(".")
    if len(pattern) > PATTERN_LENGTH_MAX:
        return f"longer than {PATTERN_LENGTH_MAX} characters"
    if any(not token or any(character.isspace() for character in token) for token in tokens):
        return "has an empty token or a space"
    if ">" in tokens[:-1]:
        return "`>` stands for the rest, so it can only be the last token"
    if any(len(token) > 1 and ("*" in token or ">" in token) for token in tokens):
        return "a wildcard stands for a whole token"
    return ""


def _matches(pattern: Sequence[str], tokens: Sequence[str]) -> bool:
    for index, wanted in enumerate(pattern):
        if wanted == ">":
            return len(tokens) > index
        if index >= len(tokens) or wanted not in {"*", tokens[index]}:
            return False
    return len(pattern) == len(tokens)
