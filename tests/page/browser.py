"""A page in a real Chromium, driven through Playwright by a process of Node.js (`driver.mjs`)."""

import asyncio
import contextlib
import fcntl
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
INSTALL_SECONDS_MAX = 240.0
CLOSE_SECONDS_MAX = 30.0
LINE_BYTES_MAX = 1 << 24


def installed_chromium() -> str:
    """Install the driver's packages once and return the path of Chromium; skips the test where either is missing."""
    chromium = next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("live page: Chromium is not installed")
    if shutil.which("npm") is None:
        pytest.skip("live page: Node.js with npm is not installed")
    stamp, lock = FOLDER / "node_modules" / ".package-lock.json", FOLDER / "package-lock.json"
    with (FOLDER / "package.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.stat().st_mtime < lock.stat().st_mtime:
            command = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
            installed = subprocess.run(
                command, cwd=FOLDER, check=False, capture_output=True, timeout=INSTALL_SECONDS_MAX
            )
            if installed.returncode != 0:
                pytest.skip(f"live page: `npm ci` failed: {installed.stderr.decode()[-300:]}")
            stamp.touch()
    return chromium


class Browser:
    """One page at a time. Every call waits until the page is ready for it, at most a minute."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, method: str, *args: Any, at: str = "") -> Any:  # noqa: ANN401 - JSON
        """Call a method of the page, or of the elements that the selector `at` matches; return what it returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"method": method, "selector": at, "args": args}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, f"the driver ended at {request}"
        reply = json.loads(line)
        assert "error" not in reply, f"{request}: {reply.get('error')}"
        return reply["result"]

    async def open(self, url: str, **options: Any) -> None:  # noqa: ANN401 - options of a context of Playwright
        """Open the page in a new context: no stored token, no cache."""
        await self.do("open", {"url": url, **options})

    async def sees(self, selector: str) -> None:
        """Wait until an element that matches is visible."""
        await self.do("waitFor", at=f"{selector} >> nth=0")

    async def loses(self, selector: str) -> None:
        """Wait until no element that matches is visible."""
        await self.do("waitFor", {"state": "hidden"}, at=f"{selector} >> nth=0")

    async def text(self, selector: str) -> str:
        """Return the visible text of the only element that matches."""
        return str(await self.do("innerText", at=selector))


@contextlib.asynccontextmanager
async def opened_browser() -> AsyncIterator[Browser]:
    """Start Chromium; it ends with the context."""
    chromium = await asyncio.to_thread(installed_chromium)
    process = await asyncio.create_subprocess_exec(
        "node",
        "driver.mjs",
        chromium,
        cwd=FOLDER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    try:
        yield Browser(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the driver then closes Chromium and ends
        try:
            await asyncio.wait_for(process.wait(), CLOSE_SECONDS_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()
