"""Reads NodeOverlays where they are installed, and says which of them go unheard."""

from collections.abc import Mapping, Sequence

import structlog

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.overlays import OVERLAYS, NodeOverlay, Overlaid, overlaid
from gpu_autoscaler.providers.karpenter.shelf import Shelf
from gpu_autoscaler.providers.karpenter.wire import NODE_POOL

NO_POOL: Mapping[str, str | None] = {}

log = structlog.get_logger()


class Overlays:
    """The overlays of a cluster."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._told: dict[str | None, Mapping[str, str]] = {}  # by pool

    async def over(self, shelf: Shelf, pool: Mapping[str, str | None]) -> Sequence[Offer]:
        """Return what the file sells, as the overlays leave it. Those that say nothing are told once; so is that we may
        not read them. Raises TransientError: a price that may be another one is not told."""
        try:
            found = await self.look(shelf, pool)
        except PermanentError as exc:
            found = Overlaid(offers=shelf.offers(), silent={"all of them": str(exc)})
        name_of_pool = pool.get(NODE_POOL)
        if found.silent != self._told.get(name_of_pool, {}):
            for name, why in found.silent.items():
                log.warning("node overlay not heeded", node_overlay=name, reason=why)
            self._told[name_of_pool] = found.silent
        return found.offers

    async def look(self, shelf: Shelf, pool: Mapping[str, str | None]) -> Overlaid:
        """Return the same, and what goes unheard. Raises PermanentError without the right, TransientError."""
        return overlaid(shelf.offers(), await self.read(), shelf.labels(), pool)

    async def read(self) -> Sequence[NodeOverlay]:
        """Return all of them; none where they are not installed. Raises PermanentError, TransientError."""
        found: list[NodeOverlay] = []
        query: dict[str, str] = {}
        while True:
            try:
                page = await self._kube.list_page(OVERLAYS, query)
            except NotFound:
                return ()
            found += [OVERLAYS.decode(item, "list") for item in page.items or ()]
            if not page.metadata.continue_:
                return found
            query = {"continue": page.metadata.continue_}
