"""A real PostgreSQL for tests: the one named in the environment, or the binary of this machine.

If none is available, tests that need one are skipped with the package to install.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from gpu_autoscaler_services.local.child import free_port

URL_ENVIRONMENT = "TEST_POSTGRES_URL"  # of a role that may make databases
_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)  # where Debian keeps them
_SECONDS_MAX = 60.0


class PostgresServer:
    """A server with its files in a folder, on a free port of loopback, which a test may kill."""

    def __init__(self, programs: Path) -> None:
        self._programs, self.port = programs, free_port()
        # The server refuses to be root, and may not look into folders of root's.
        self._user = "nobody" if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-autoscaler-postgres-"))
        if self._user is not None:
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        self._process: subprocess.Popen[bytes] | None = None
        self.process_group: int | None = None  # None: that of the test
        self._run("initdb", "-D", "files", "-U", "tests", "-A", "scram-sha-256", "--pwfile", self._password(), "-N")

    def url(self, database: str = "postgres", password: str = "secret-of-tests") -> str:  # noqa: S107 - a test's own
        """Return the address of a database."""
        return f"postgresql://tests:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it and wait until it answers. Raises TimeoutError."""
        options = ("-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={self.folder}", "-c", "fsync=on")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", "files", "-p", str(self.port), *options],
                cwd=self.folder,
                user=self._user,
                stdout=subprocess.DEVNULL,
                stderr=log,
                process_group=self.process_group,
            )
        until = time.monotonic() + _SECONDS_MAX
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            if time.monotonic() > until or self._process.poll() is not None:
                raise TimeoutError((self.folder / "log").read_text())
            time.sleep(0.05)

    def kill(self) -> None:
        """Cut every client off at once and write nothing more: the next start recovers as after a power cut."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """End it in order and remove its files; again: nothing."""
        self._end(signal.SIGINT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(_SECONDS_MAX)

    def _password(self) -> str:
        (self.folder / "password").write_text("secret-of-tests\n")
        return "password"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], cwd=self.folder, user=self._user, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()


def programs() -> Path:
    """Return the folder of this machine's newest PostgreSQL server. Skips the test where there is none."""
    for place in _PLACES:
        if (place / "initdb").is_file():
            return place
    on_path = shutil.which("initdb")
    if on_path is None:
        pytest.skip("no PostgreSQL: install it (Debian: apt-get install postgresql) or set TEST_POSTGRES_URL")
    return Path(on_path).resolve().parent


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """Address of a server that tests share: each makes a database of its own."""
    given = os.environ.get(URL_ENVIRONMENT)
    if given:
        yield given
        return
    server = PostgresServer(programs())
    server.start()
    yield server.url()
    server.stop()


@pytest.fixture
async def postgres_url(postgres_server_url: str) -> AsyncIterator[str]:
    """Address of an empty database."""
    name = f"test_{uuid.uuid4().hex}"
    connection = await asyncpg.connect(postgres_server_url)
    await connection.execute(f"CREATE DATABASE {name}")
    yield urlsplit(postgres_server_url)._replace(path=f"/{name}").geturl()
    await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await connection.close()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A server of the test's own, which it may kill."""
    server = PostgresServer(programs())
    server.start()
    yield server
    server.stop()
