"""Follows the policy file while a service runs.

A changed file is read again within seconds. One that cannot be followed is refused whole: the last good policy stays
in force, which `/readyz?verbose` and the metrics say until the file is right.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.runtime.retry import pause

LOOK_SECONDS = 2.0  # wall time between two looks at the file; a look is one `stat`
DIFFERENCES_COUNT_MAX = 50
_ABSENT = "not set"

log = structlog.get_logger()

Use = Callable[[ScalingPolicy], None]


def differences(before: ScalingPolicy, after: ScalingPolicy) -> tuple[str, ...]:
    """Return a line for each value that changed: `removal.unhealthy_ratio_max: 0.2 -> 0.3`; of very many the first."""
    old, new = dict(_values(msgspec.to_builtins(before), "")), dict(_values(msgspec.to_builtins(after), ""))
    changed = [path for path in [*old, *(path for path in new if path not in old)] if old.get(path) != new.get(path)]
    return tuple(
        f"{path}: {old.get(path, _ABSENT)} -> {new.get(path, _ABSENT)}" for path in changed[:DIFFERENCES_COUNT_MAX]
    )


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - whatever a policy is made of
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _values(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, each in enumerate(value):
            yield from _values(each, f"{path}[{index}]")
    else:
        yield path, value


class PolicyFile:
    """The policy that is in force in this process: the file's last good word."""

    def __init__(self, path: Path | None) -> None:
        """Without a path: the defaults, for good. Raises ConfigError where the file is wrong to begin with."""
        self.path = path
        self._seen = self._mark()
        self.now = load_policy(path)
        self.mistakes: tuple[str, ...] = ()  # of the file as it is now; while there are any, `now` is older than it

    def look(self) -> bool:
        """Read the file again if it was touched; return whether another policy is in force since."""
        mark = self._mark()
        if mark == self._seen:
            return False
        self._seen = mark
        try:
            policy = load_policy(self.path)
        except ConfigError as error:
            self.mistakes = tuple(error.mistakes)
            return False
        self.mistakes = ()
        is_other = policy != self.now
        self.now = policy
        return is_other

    def _mark(self) -> tuple[int, int, int] | None:
        """What changes when the file is written, replaced, or, as mounted ConfigMaps are, swapped behind a link."""
        if self.path is None:
            return None
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.asynccontextmanager
async def following(
    file: PolicyFile, use: Use, readiness: Readiness, metrics: Metrics, *, condition: str = "policy"
) -> AsyncIterator[None]:
    """Give every policy that the file comes to hold to `use`, within seconds, until the block ends."""
    stop = asyncio.Event()
    _say(file, readiness, condition)

    async def follow() -> None:
        while not await pause(stop, LOOK_SECONDS):
            before = file.mistakes
            if await asyncio.to_thread(file.look):
                use(file.now)
                metrics.policy_changes.inc()
                log.info("policy changed", path=str(file.path), policy_digest=policy_digest(file.now))
            if file.mistakes and file.mistakes != before:
                log.warning(
                    "policy file refused, the last good one stays in force; see `gpu-autoscaler policy check`",
                    path=str(file.path),
                    mistakes=file.mistakes,
                )
            metrics.policy_file_errors.inc(len(file.mistakes) - len(before))
            _say(file, readiness, condition)

    task = asyncio.create_task(follow(), name=f"{condition} file")
    try:
        yield
    finally:
        stop.set()
        await task


def _say(file: PolicyFile, readiness: Readiness, condition: str) -> None:
    digest = policy_digest(file.now)[:8]
    if file.mistakes:
        wrong = "; ".join(file.mistakes)
        readiness.note(condition, f"{file.path} is refused, {digest} of before stays in force: {wrong}")
    else:
        readiness.note(condition, f"{digest} of {file.path}" if file.path else f"{digest}, the defaults")
