"""The exporter on nodes without DCGM: one read serves many scrapes; no GPU and a hanging driver are no page."""

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from tests.support.fake_nvml import FakeNvml, h100

from gpu_autoscaler.dcgm.exporter_pages import Scraper
from gpu_autoscaler.dcgm.nvml import NvmlReader
from gpu_autoscaler_services.nvml_exporter import Exporter, main


class Reads:
    """Counts reads; each returns a page, None, or waits."""

    def __init__(self, *pages: str | None) -> None:
        self.pages = list(pages)
        self.count = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self) -> str | None:
        self.count += 1
        assert self.may_go_on.wait(10)
        return self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]


@asynccontextmanager
async def serving(read: Callable[[], str | None], clock: list[float]) -> AsyncIterator[str]:
    """The URL of an exporter whose time is `clock[0]`; its reads may take 0.2 s."""
    exporter = Exporter(read, now=lambda: clock[0], read_seconds_max=0.2)
    app = web.Application()
    app.add_routes([web.get("/metrics", exporter.metrics), web.get("/healthz", exporter.healthz)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def answer(url: str) -> tuple[int, str]:
    """Status and text."""
    async with ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_a_page_serves_a_second() -> None:
    """However many ask, at once or one after the other; then a new one is read."""
    clock, reads = [100.0], Reads("a\n", "b\n")
    async with serving(reads, clock) as url:
        at_once = await asyncio.gather(*(answer(f"{url}/metrics") for _ in range(20)))
        assert (set(at_once), reads.count) == ({(200, "a\n")}, 1)
        clock[0] = 100.9
        assert (await answer(f"{url}/metrics"), reads.count) == ((200, "a\n"), 1)
        clock[0] = 101.0
        assert (await answer(f"{url}/metrics"), reads.count) == ((200, "b\n"), 2)


async def test_without_an_answer_of_a_gpu_there_is_no_page() -> None:
    """Not an old one, and no empty one: the scrape counts as unanswered, and the probe fails."""
    clock, reads = [100.0], Reads("a\n", None)
    async with serving(reads, clock) as url:
        assert await answer(f"{url}/healthz") == (200, "ok\n")
        await answer(f"{url}/metrics")
        clock[0] = 110.0
        assert (await answer(f"{url}/metrics"))[0] == 503
        assert (await answer(f"{url}/healthz"))[0] == 503


async def test_a_hanging_driver_ends_in_a_restart() -> None:
    """Scrapes do not pile up behind it; the probe fails until the read returns."""
    clock, reads = [100.0], Reads("a\n")
    reads.may_go_on.clear()
    async with serving(reads, clock) as url:
        assert await asyncio.gather(*(answer(f"{url}/metrics") for _ in range(3))) == [(503, "no GPU answers\n")] * 3
        clock[0] = 101.0
        assert await answer(f"{url}/healthz") == (503, "the driver hangs\n")
        assert reads.count == 1
        reads.may_go_on.set()
        assert (await answer(f"{url}/metrics"))[0] == 200
        assert (await answer(f"{url}/healthz"))[0] == 200


async def test_a_scraper_reads_it_like_dcgm() -> None:
    """From NVML's answers over HTTP to the samples of the ingest."""
    reader = NvmlReader("n1", FakeNvml(h100(0, busy=40), h100(1)))
    scraper = Scraper()
    async with serving(lambda: reader.page({}), [100.0]) as url:
        pages = await scraper.scrape({"n1": f"{url}/metrics"})
    await scraper.close()

    page = pages["n1"]
    assert page is not None
    assert [(gpu.gpu, gpu.gpu_model, gpu.utilization_ratio) for gpu in page.gpus] == [
        ("0", "H100", 0.4),
        ("1", "H100", 0),
    ]


def test_without_a_driver_it_names_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of serving pages without GPUs."""
    monkeypatch.setattr("pynvml.nvmlLib", None)
    with pytest.raises(SystemExit, match=r"NVML: .*; give it an NVIDIA driver and its devices"):
        main(["--port", "0"])


PROGRAM = """
import sys
import tests.support.fake_nvml as fake
from gpu_autoscaler_services import nvml_exporter
reader = nvml_exporter.NvmlReader
nvml_exporter.NvmlReader = lambda hostname: reader(hostname, fake.FakeNvml(fake.h100()))
nvml_exporter.main(sys.argv[1:])
"""


async def test_it_serves_until_it_is_ended(tmp_path: object) -> None:
    """As a process, also while the kubelet's socket is missing, which it reports once."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "--port", "0", "--hostname", "n7", "--pod-resources", f"{tmp_path}/none.sock",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    status, text = await answer(url)
    await asyncio.sleep(1.1)
    await answer(url)
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()

    assert (status, 'Hostname="n7"' in text, "namespace=" in text) == (200, True, False)
    assert (process.returncode, errors.decode().count("pods unknown")) == (0, 1)
