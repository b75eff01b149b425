"""Scrapes the DCGM exporter of every GPU node. Decides nothing; an exporter without an answer is never idle."""

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import ClassVar, Protocol

from gpu_autoscaler.dcgm.exporter_pages import Page
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled, GpuNodeSummarized
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.runtime.addresses import NodeUrl
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.dcgm_ingest.windows import WINDOW_SECONDS, Window, window_start

REST_SECONDS_MIN = 0.01  # between ticks, so that an early timer does not make them follow each other


class Exporters(Protocol):
    """The source of exporter pages; in production `dcgm.scrape.Scraper`."""

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return the page of each name's URL; None if it did not answer."""


class DcgmIngest:
    """Publishes one fact per node and scrape, and one per node and minute. Keeps the current minute only."""

    name: ClassVar[str] = "dcgm_ingest"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact.domain() == "node")
    publishes: ClassVar[tuple[type[Fact], ...]] = (GpuNodeSampled, GpuNodeSummarized)
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = 1.0  # the shortest interval allowed; a tick returns when the next is due

    def __init__(
        self,
        view: StateView,
        exporters: Exporters,
        *,
        dcgm_url: str,
        scrape_seconds: float = 10.0,
        on_up: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`dcgm_url`: a template of `NodeUrl`. `scrape_seconds`: cluster time. Raises ConfigError.

        `on_up` gets 1 after a scrape that all exporters answered, else 0; NaN without exporters.
        """
        self._view = view
        self._exporters = exporters
        self._url = NodeUrl(dcgm_url)
        self._interval = timedelta(seconds=scrape_seconds)
        self._on_up = on_up
        self._due_at: datetime | None = None
        self._windows: dict[NodeUid, Window] = {}

    async def on_tick(self, now: datetime) -> Outcome:
        """Scrape when it is due; close the minutes that have passed."""
        # Summaries of the minutes that have passed, also of nodes that are gone.
        ended = [uid for uid, window in self._windows.items() if window.started_at < window_start(now)]
        facts: list[Fact] = [self._windows.pop(uid).summary() for uid in sorted(ended)]
        if self._due_at is None or now >= self._due_at:
            self._due_at = now + self._interval
            facts += await self._scrape(now)
        due_at = min(self._due_at, window_start(now) + timedelta(seconds=WINDOW_SECONDS))
        return Outcome(facts=tuple(facts), next_tick_seconds=max((due_at - now).total_seconds(), REST_SECONDS_MIN))

    async def _scrape(self, now: datetime) -> list[Fact]:
        ready = [node for node in self._view.state.nodes.values() if node.is_ready]
        nodes = {node.node_uid: node for node in ready if node.allocatable.has_gpus}
        urls = {str(uid): url for uid, node in nodes.items() if (url := self._url.of(node)) is not None}
        facts: list[Fact] = []
        pages = await self._exporters.scrape(urls)
        self._on_up(float(all(page is not None for page in pages.values())) if pages else math.nan)
        for uid, page in pages.items():
            node = nodes[NodeUid(uid)]
            window = self._windows.get(node.node_uid)
            if window is None:
                window = self._windows[node.node_uid] = Window(node.node_uid, node.name, window_start(now))
            window.add(None if page is None else page.gpus)
            if page is not None:
                facts.append(
                    GpuNodeSampled(
                        node_uid=node.node_uid,
                        node_name=node.name,
                        sampled_at=now,
                        gpus=page.gpus,
                        lines_broken_count=page.lines_broken_count,
                    )
                )
        return facts
