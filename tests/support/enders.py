"""Enders as processes of their own, started and ended by a test as a supervisor would."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from gpu_autoscaler_services.local.child import free_port


class EnderProcess:
    """One process and its output."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: int) -> None:
        self.process = process
        self.log = log
        self.port = port

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text()

    async def ended(self, seconds_max: float = 60.0) -> int:
        """Wait for its end; returns the exit code."""
        return await asyncio.wait_for(self.process.wait(), seconds_max)

    async def stop(self) -> int:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()


class Enders:
    """Starts them on one broker; `close` ends those that are left."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self.started: list[EnderProcess] = []

    async def start(self, **environment: str) -> EnderProcess:
        """Start one more."""
        log, port = self._folder / f"ender-{len(self.started)}.log", free_port()
        settings = {"GPU_AUTOSCALER_NATS_URL": self._url, "GPU_AUTOSCALER_HTTP_PORT": str(port)}
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.support.ender", env={**os.environ, **settings, **environment},
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        self.started.append(EnderProcess(process, log, port))
        return self.started[-1]

    async def close(self) -> None:
        """End what still runs."""
        for each in self.started:
            if each.process.returncode is None:
                each.process.kill()
                await each.process.wait()
