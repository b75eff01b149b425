"""Reloads the policy file while a service runs.

A changed file is reloaded within seconds. An invalid one is refused as a whole: the last valid policy stays active, and
`/readyz?verbose` and the metrics report the errors until the file is corrected.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.runtime.retry import pause

POLL_SECONDS = 2.0  # wall time between two checks of the file; a check is one `stat`
DIFFERENCES_COUNT_MAX = 50
_ABSENT = "not set"

log = structlog.get_logger()

Use = Callable[[ScalingPolicy], None]


def differences(before: ScalingPolicy, after: ScalingPolicy) -> tuple[str, ...]:
    """Return a line per changed value, at most DIFFERENCES_COUNT_MAX: `removal.unhealthy_ratio_max: 0.2 -> 0.3`."""
    old, new = dict(_values(msgspec.to_builtins(before), "")), dict(_values(msgspec.to_builtins(after), ""))
    changed = [path for path in [*old, *(path for path in new if path not in old)] if old.get(path) != new.get(path)]
    return tuple(
        f"{path}: {old.get(path, _ABSENT)} -> {new.get(path, _ABSENT)}" for path in changed[:DIFFERENCES_COUNT_MAX]
    )


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - any value of a policy
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _values(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _values(item, f"{path}[{index}]")
    else:
        yield path, value


class PolicyFile:
    """The active policy of this process: the last valid content of the file."""

    def __init__(self, path: Path | None) -> None:
        """Without a path: the default policy, which never changes. Raises ConfigError for an invalid file."""
        self.path = path
        self._loaded_stamp = self._stamp()
        self.now = load_policy(path)
        self.errors: tuple[str, ...] = ()  # of the current file; with any, `now` is an older content

    def reload(self) -> bool:
        """Reload the file if it was touched; return whether the active policy changed."""
        stamp = self._stamp()
        if stamp == self._loaded_stamp:
            return False
        self._loaded_stamp = stamp
        try:
            policy = load_policy(self.path)
        except ConfigError as error:
            self.errors = tuple(error.violations)
            return False
        self.errors = ()
        is_changed = policy != self.now
        self.now = policy
        return is_changed

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes when the file is written or replaced, or its link is swapped, as for mounted ConfigMaps."""
        if self.path is None:
            return None
        try:
            status = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return status.st_ino, status.st_mtime_ns, status.st_size


@contextlib.asynccontextmanager
async def following_policy_file(
    file: PolicyFile, use: Use, readiness: Readiness, metrics: Metrics, *, condition: str = "policy"
) -> AsyncIterator[None]:
    """Pass every new policy of the file to `use`, within seconds, until the block ends."""
    stop = asyncio.Event()
    _update_condition(file, readiness, condition)

    async def follow() -> None:
        while not await pause(stop, POLL_SECONDS):
            before = file.errors
            if await asyncio.to_thread(file.reload):
                use(file.now)
                metrics.policy_changes.inc()
                log.info("policy changed", path=str(file.path), policy_digest=policy_digest(file.now))
            if file.errors and file.errors != before:
                log.warning(
                    "policy file refused, last valid policy stays active; see `gpu-autoscaler policy check`",
                    path=str(file.path),
                    errors=file.errors,
                )
            metrics.policy_file_errors.inc(len(file.errors) - len(before))
            _update_condition(file, readiness, condition)

    task = asyncio.create_task(follow(), name=f"{condition} file")
    try:
        yield
    finally:
        stop.set()
        await task


def _update_condition(file: PolicyFile, readiness: Readiness, condition: str) -> None:
    digest = policy_digest(file.now)[:8]
    if file.errors:
        errors = "; ".join(file.errors)
        readiness.note(condition, f"{file.path} refused, policy {digest} stays active: {errors}")
    else:
        readiness.note(condition, f"{digest} of {file.path}" if file.path else f"{digest}, the default policy")
