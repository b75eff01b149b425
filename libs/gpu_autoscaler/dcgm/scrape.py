"""Scrapes many exporters concurrently over HTTP, each with a time limit."""

import asyncio
from collections.abc import Mapping

import aiohttp

from gpu_autoscaler.dcgm.parse import Page, parse_page

SCRAPE_SECONDS_MAX = 2.0  # wall time of one exporter, so that a hanging one delays the scrape by at most this
CONCURRENT_SCRAPES_MAX = 64
PAGE_BYTES_MAX = 4 * 2**20  # far more than 8 GPUs with all counters


class Scraper:
    """Scrapes exporters. None means no answer, so that its GPUs are unknown."""

    def __init__(
        self,
        *,
        scrape_seconds_max: float = SCRAPE_SECONDS_MAX,
        concurrent_scrapes_max: int = CONCURRENT_SCRAPES_MAX,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=scrape_seconds_max)
        self._slots = asyncio.Semaphore(concurrent_scrapes_max)
        self._session: aiohttp.ClientSession | None = None

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return a page for each name's URL, None without an answer. Never raises for an exporter."""
        pages = await asyncio.gather(*(self._page(url) for url in urls.values()))
        return dict(zip(urls, pages, strict=True))

    async def _page(self, url: str) -> Page | None:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(timeout=self._timeout, auto_decompress=True)
        async with self._slots:
            try:
                async with self._session.get(url) as response:
                    if response.status != 200:
                        return None
                    content = bytearray()
                    async for chunk in response.content.iter_any():
                        content += chunk
                        if len(content) > PAGE_BYTES_MAX:
                            return None
            except (aiohttp.ClientError, TimeoutError, ValueError):  # ValueError: an invalid URL
                return None
        return parse_page(content.decode("utf-8", errors="replace"))

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
