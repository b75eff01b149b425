"""Reads the pages of many exporters at once over HTTP, each with a time limit, so many at a time and no more."""

import asyncio
from collections.abc import Mapping

import aiohttp

from gpu_autoscaler.dcgm.parse import Page, parse_page

SCRAPE_SECONDS_MAX = 2.0  # wall time of one exporter; one that hangs holds up the round for no longer
SCRAPES_AT_ONCE_MAX = 64
PAGE_BYTES_MAX = 4 * 2**20  # 8 GPUs with every counter there is stay far below


class Scraper:
    """Asks exporters; None stands for one that did not answer, which says nothing about its GPUs."""

    def __init__(
        self,
        *,
        scrape_seconds_max: float = SCRAPE_SECONDS_MAX,
        scrapes_at_once_max: int = SCRAPES_AT_ONCE_MAX,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=scrape_seconds_max)
        self._turns = asyncio.Semaphore(scrapes_at_once_max)
        self._session: aiohttp.ClientSession | None = None

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return the page of each name's URL; all names are in the answer. Never raises for an exporter."""
        pages = await asyncio.gather(*(self._page(url) for url in urls.values()))
        return dict(zip(urls, pages, strict=True))

    async def _page(self, url: str) -> Page | None:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(timeout=self._timeout, auto_decompress=True)
        async with self._turns:
            try:
                async with self._session.get(url) as answer:
                    if answer.status != 200:
                        return None
                    content = bytearray()
                    async for chunk in answer.content.iter_any():
                        content += chunk
                        if len(content) > PAGE_BYTES_MAX:
                            return None
            except (aiohttp.ClientError, TimeoutError, ValueError):  # ValueError: no URL at all
                return None
        return parse_page(content.decode("utf-8", errors="replace"))

    async def close(self) -> None:
        """Give back connections."""
        if self._session is not None:
            await self._session.close()
