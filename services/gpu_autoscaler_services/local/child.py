"""A supervised process: started, polled until ready, restarted when it exits, stopped by its process id."""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.runtime.process import EXIT_MISCONFIGURED

READY_SECONDS_MAX = 120.0  # a cold start of eight processes on two slow cores takes about ten, on busy ones a minute
STOP_SECONDS_MAX = 15.0  # after this SIGTERM becomes SIGKILL
RESTART_SECONDS_MIN, RESTART_SECONDS_MAX = 0.2, 5.0
RESTARTS_COUNT_MAX = 20
STARTS_BEFORE_READY_MAX = 3  # a process that exits this often before it was ready is not restarted
_LINES_SHOWN = 15
# Below the range of outgoing connections (Linux: from 32768 on, ip(7)), one of which could take a child's port while
# it restarts.
PORTS = range(12_000, 32_000)


_ports_given: set[int] = set()


def free_port() -> int:
    """Return a free loopback port that no launcher of this user used before: two children with one port could be
    mistaken for each other. Raises TransientError if none is left."""
    first = secrets.randbelow(len(PORTS))
    for step in range(len(PORTS)):
        port = PORTS[(first + step) % len(PORTS)]
        if port not in _ports_given and _lock_port(port) and _is_free(port):
            _ports_given.add(port)
            return port
    raise TransientError(f"no free port of 127.0.0.1 from {PORTS.start} to {PORTS.stop}; stop other local systems")


@functools.cache
def _ports_file() -> int | None:
    """Open the file whose byte N is locked by the launcher that uses port N; None if it cannot be opened. A probe
    cannot find a child that is down. Locks end with their process (fcntl(2), "Advisory record locking")."""
    path = Path(tempfile.gettempdir()) / f"gpu-autoscaler-ports-{os.getuid()}"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _lock_port(port: int) -> bool:
    file = _ports_file()
    if file is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Child:
    """A supervised process. `ready_url` answers 200 once it is ready."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        ready_url: str,
        process_group: int,
    ) -> None:
        self.name = name
        self.log = log
        self.ready_url = ready_url
        self.starts_count = 0
        self._command = tuple(command)
        self._process_group = process_group
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._last_exit: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it, and restart it whenever it exits, until `stop`."""
        self._is_wanted = True
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def _spawn(self) -> None:
        self.starts_count += 1
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=self._process_group,
            )

    async def _supervise(self) -> None:
        wait_seconds = RESTART_SECONDS_MIN
        while self._process is not None and self.starts_count <= RESTARTS_COUNT_MAX:
            self._last_exit = await self._process.wait()
            if not self._is_wanted:
                return
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 2, RESTART_SECONDS_MAX)
            await self._spawn()

    async def wait_ready(self, seconds_max: float = READY_SECONDS_MAX) -> None:
        """Return when it is ready. Raises ConfigError with its own message if it refuses to start, TransientError with
        the end of its log if it is not ready in time."""
        deadline = asyncio.get_running_loop().time() + seconds_max
        last = "no answer yet"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while asyncio.get_running_loop().time() < deadline and self.starts_count <= STARTS_BEFORE_READY_MAX:
                try:
                    async with session.get(self.ready_url) as response:
                        if response.status == 200:
                            return
                        last = (await response.text())[:300]
                except (aiohttp.ClientError, TimeoutError) as exc:
                    last = repr(exc)
                await asyncio.sleep(0.1)
        if self._last_exit == EXIT_MISCONFIGURED:
            raise ConfigError(self.name, self._config_errors())
        raise TransientError(
            f"{self.name} is not ready after {self.starts_count} start(s) within {seconds_max:g} s ({last}); "
            f"end of {self.log}:\n{self.log_end()}"
        )

    def log_end(self) -> str:
        if not self.log.exists():
            return "(empty)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])

    def _config_errors(self) -> list[str]:
        """Return the configuration errors in its log, as `ConfigError` lists them."""
        text = self.log_end()
        for line in text.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # plain text before logs are configured
                text = str(json.loads(line)["error"])
        errors = (line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - "))
        return list(dict.fromkeys(errors)) or [text]

    def kill(self) -> None:
        """Kill it (SIGKILL); it is restarted."""
        self._signal(signal.SIGKILL)

    async def stop(self) -> int | None:
        """Stop it for good: SIGTERM, then SIGKILL. Return its exit code; None if it never ran."""
        self._is_wanted = False
        if self._process is None:
            return None
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS_MAX)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        return self._process.returncode

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
