"""Many exporters are read at once; one that hangs, fails or babbles harms nobody else."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from tests.support.small_servers import serving

from gpu_autoscaler.dcgm.exporter_pages import PAGE_BYTES_MAX, Scraper

PAGE = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1"} 50\n'


class Exporters:
    """Exporters of every kind, by path; counts how many are asked at once."""

    def __init__(self) -> None:
        self.at_once = 0
        self.at_once_max = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Good, failing, hanging or endless."""
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            if request.path == "/hangs":
                await asyncio.sleep(30)
            if request.path == "/slow":
                await asyncio.sleep(0.02)
            if request.path == "/fails":
                return web.Response(status=500)
            if request.path == "/endless":
                return web.Response(text="x" * (PAGE_BYTES_MAX + 1))
            return web.Response(text=PAGE)
        finally:
            self.at_once -= 1


@pytest.fixture
async def url_and_exporters() -> AsyncIterator[tuple[str, Exporters]]:
    """A server with all of them."""
    exporters = Exporters()
    async with serving(exporters.answer) as url:
        yield url, exporters


async def test_an_exporter_without_answer_gives_none_and_does_not_affect_others(
    url_and_exporters: tuple[str, Exporters],
) -> None:
    """Each name is in the answer: a page for the one that works, None for every other."""
    url, _ = url_and_exporters
    scraper = Scraper(scrape_seconds_max=0.3)
    urls = {path: f"{url}/{path}" for path in ("good", "fails", "hangs", "endless")} | {
        "nobody": "http://127.0.0.1:1/metrics",
        "nonsense": "no address",
    }
    pages = await scraper.scrape(urls)
    await scraper.close()

    assert pages.keys() == urls.keys()
    assert [name for name, page in pages.items() if page is not None] == ["good"]
    good = pages["good"]
    assert good is not None
    assert good.gpus[0].utilization_ratio == 0.5


async def test_only_so_many_are_asked_at_once(url_and_exporters: tuple[str, Exporters]) -> None:
    """A large cluster is read in turns."""
    url, exporters = url_and_exporters
    scraper = Scraper(concurrent_scrapes_max=3)
    pages = await scraper.scrape({str(index): f"{url}/slow" for index in range(12)})
    await scraper.close()
    assert all(page is not None for page in pages.values())
    assert exporters.at_once_max == 3
