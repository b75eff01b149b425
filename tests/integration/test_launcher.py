"""The launcher leaves nothing behind, however it ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler_services.local import child
from gpu_autoscaler_services.local.child import PORTS, free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GONE_SECONDS_MAX = 60.0

LAUNCHER = """
import asyncio, signal, sys
from pathlib import Path
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.local.system import LocalSystem

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have told them to ignore it


async def main():
    system = LocalSystem(Path(sys.argv[1]), clock=Clock(), policy=None, gateway_port=0)
    await system.start(lambda _: None)
    print(system.nats.process_group, system.nats.pid, *(child.pid for child in system.children.values()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    """Return whether the process runs; an ended, unreaped one does not."""
    if Path("/proc/self/stat").exists():  # a slim Linux has no `ps`
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
    else:
        asked = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        state = asked.stdout.strip()
    return bool(state) and state[0] not in "ZX"


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Process ids to end whatever becomes of the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP])
async def test_a_launcher_that_is_killed_takes_its_children_along(
    how: signal.Signals, tmp_path: Path, started: list[int]
) -> None:
    """Broker, simulated cluster, services and reaper end soon after a launcher that was killed."""
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert launcher.stdout is not None
    started.append(launcher.pid)
    children = [int(word) for word in (await asyncio.wait_for(launcher.stdout.readline(), 90)).split()]
    started += children
    assert len(children) == 11
    assert all(is_alive(pid) for pid in children)
    launcher.send_signal(how)
    await launcher.wait()
    async with asyncio.timeout(GONE_SECONDS_MAX):
        while any(is_alive(pid) for pid in children):
            await asyncio.sleep(0.1)


def test_reaper_refuses_a_foreign_process_group() -> None:
    """Started by hand, in the group of a shell, it exits."""
    command = [sys.executable, "-m", "gpu_autoscaler_services.local.reaper"]
    refused = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert refused.returncode == 1
    assert "started by the launcher" in refused.stderr


def test_no_port_is_given_twice() -> None:
    """Two children on one port would be taken for each other: the one that has it answers for the one that has not."""
    ports = [free_port() for _ in range(2000)]
    assert len(set(ports)) == len(ports)
    assert set(ports) <= set(PORTS), "no outgoing connection of anybody takes one of these"


def test_no_port_is_given_by_two_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the other listens on its port; the port is free again after the other exits."""
    given = "from gpu_autoscaler_services.local.child import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        monkeypatch.setattr(child, "PORTS", range(theirs, theirs + 1))
        with pytest.raises(TransientError, match=r"no free port of 127\.0\.0\.1"):
            free_port()
        other.kill()
        other.wait()
    assert free_port() == theirs
