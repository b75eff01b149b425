"""Collects the evidence at the end of a soak: what exists, what is charged, and what services and streams know."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
from tests.soak import archive, population
from tests.soak.judge import Known, Objects, Span
from tests.soak.population import SimApi
from tests.soak.system import SoakSystem

from gpu_autoscaler.bus.protocol import StreamSpan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events import job, node, scaling, spot
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.snapshot_codec import Refusal, decode_label
from gpu_autoscaler.runtime.snapshots import state_of
from gpu_autoscaler.simcluster.instances import Invoice
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler.store.protocol import LastCharge, Store
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.demo.record import Record, Seen
from gpu_autoscaler_services.demo.subscriber import connect
from gpu_autoscaler_services.scaler.service import Scaler

UNPUBLISHED_COUNT_MAX = 100_000
READ_SECONDS_MAX = 120.0  # until the oracle has read what is stored
RETRY_SECONDS = 1.0
# Services that save their state: process, class, and whose snapshots they are.
_SAVING = (("scaler", Scaler, ""), ("cost-tracker", CostTracker, CostTracker.name))
_PROMISED = frozenset(fact for fact in FACTS if fact.__module__ in {module.__name__ for module in (job, scaling, spot)})
_ENDED = frozenset({"Complete", "Failed"})


class Collector:
    """Reads everything that is compared, of one system and its oracle."""

    def __init__(self, system: SoakSystem, oracle: archive.Archive, folder: Path) -> None:
        self._system = system
        self._oracle = oracle
        self._folder = folder
        self._clock = system.clock
        self._current = archive.ArchivedState(oracle.folder, system.clock)

    async def spans(self) -> dict[str, StreamSpan]:
        """Return what each stream stores now, once the oracle has read it; a broker that was killed may be away."""
        bus, spans = await connect(self._system.nats_url), dict[str, StreamSpan]()
        try:
            async with asyncio.timeout(READ_SECONDS_MAX):
                while len(spans) < len(archive.STREAMS):
                    try:
                        spans = {stream: await bus.span(stream) for stream in archive.STREAMS}
                    except TransientError:
                        await asyncio.sleep(RETRY_SECONDS)
        finally:
            await bus.close()
        await self._oracle.until({stream: span.last_sequence for stream, span in spans.items()}, READ_SECONDS_MAX)
        return spans

    async def state(self) -> ClusterState:
        """Return the oracle's state of everything that is stored now."""
        last = {stream: span.last_sequence for stream, span in (await self.spans()).items()}
        return await asyncio.to_thread(self._current.advance, last)

    async def rebuilt(self) -> Known:
        """Read the streams as a process that starts now; the oracle has also read what they have discarded since."""
        bus = await connect(self._system.nats_url)
        folder = self._folder / "rebuilt"
        try:
            async with archive.Archive(bus, folder) as reader:
                last = {stream: span.last_sequence for stream, span in (await self.spans()).items()}
                await reader.until(last, READ_SECONDS_MAX)
        finally:
            await bus.close()
        expected = await asyncio.to_thread(archive.state_at, self._oracle.folder, self._clock, last)
        actual = await asyncio.to_thread(archive.state_at, folder, self._clock, last)
        return Known(name="a process that starts now", oracle=expected, actual=actual, folds=FACTS)

    async def saved(self) -> list[Known]:
        """Stop the services that save their state, and return what they knew. Raises PermanentError: unreadable."""
        for process, _, _ in _SAVING:
            await self._system.children[process].stop()
        await self.spans()
        store = await self._store()
        try:
            return [await self._saved(store, service, keeper) for _, service, keeper in _SAVING]
        finally:
            await store.close()

    async def _saved(self, store: Store, service: type[Scaler] | type[CostTracker], keeper: str) -> Known:
        rows = await store.snapshots(keeper)
        if not rows:
            raise PermanentError(f"{service.name} has saved no snapshot")
        label = decode_label(rows[0].label)
        actual = label if isinstance(label, Refusal) else await state_of(store, rows[0])
        if isinstance(label, Refusal) or isinstance(actual, Refusal):
            raise PermanentError(f"the last snapshot of {service.name} is unreadable: {actual}")
        last = dict(label.cut.last_sequences)
        expected = await asyncio.to_thread(archive.state_at, self._oracle.folder, self._clock, last, service.folds)
        return Known(name=service.name, oracle=expected, actual=actual, folds=service.folds)

    async def charges(self, invoice: Invoice) -> tuple[Mapping[str, LastCharge], Sequence[CostAccrued]]:
        """Return what the ledger has charged for the instances of the invoice and for any other, and the spans that
        are not known to be published."""
        store = await self._store()
        try:
            charges = await store.last_charges([line.provider_id for line in invoice.lines])
            unpublished = await store.unconfirmed_charges(UNPUBLISHED_COUNT_MAX)
            return {str(provider_id): charge for provider_id, charge in charges.items()}, unpublished
        finally:
            await store.close()

    async def _store(self) -> Store:
        return await open_store(self._system.postgres.url(), is_read_only=True)

    def charged(self, unpublished: Sequence[CostAccrued]) -> dict[str, list[Span]]:
        """Return the published spans by instance, and those still to be published; each once, by their starts."""
        recorded = archive.recorded_facts(self._oracle.folder, CostAccrued.stream(), self._clock)
        facts = chain((item.fact for item in recorded), unpublished)
        spans = {(fact.provider_id, fact.from_at): fact for fact in facts if isinstance(fact, CostAccrued)}
        charged: defaultdict[str, list[Span]] = defaultdict(list)
        for (provider_id, _), span in sorted(spans.items()):
            charged[provider_id].append(Span(span.from_at, span.to_at, span.total_micro_usd))
        return dict(charged)

    def record(self) -> Record:
        """Return the archived facts that promises are about."""
        record = Record()
        for stream in ("JOB", "NODE", "SCALING", "SPOT"):
            for message in archive.messages(self._oracle.folder, stream):
                for item in archive.decoded(message, self._clock):
                    is_end = isinstance(item.fact, node.NodeInstanceObserved) and item.fact.state == "terminated"
                    if is_end or type(item.fact) in _PROMISED:
                        record.add(Seen(recorded=item, stored_at=message.stored_at))
        return record


async def invoice_of(api: SimApi) -> Invoice:
    """Return the bill of the provider."""
    return msgspec.convert(await api.call("GET", "/admin/invoice"), Invoice)


async def objects_of(api: SimApi) -> Objects:
    """Return what exists in simcluster."""
    pods = await api.items("/api/v1/pods")
    jobs = await api.items(population.JOBS_PATH)
    nodes = await api.items("/api/v1/nodes")
    machines = await api.call("GET", "/admin/instances")
    return Objects(
        pods={
            pod["metadata"]["uid"]: pod["spec"].get("nodeName")
            for pod in pods
            if pod["status"]["phase"] in ("Pending", "Running")
        },
        nodes=[item["metadata"]["uid"] for item in nodes],
        jobs=[
            job_id
            for item in jobs
            if (job_id := (item["metadata"].get("labels") or {}).get(labels.JOB_ID)) and not _has_ended(item)
        ],
        instances=[
            machine["instance"]["provider_id"] for machine in machines if machine["instance"]["state"] != "terminated"
        ],
    )


def _has_ended(item: Mapping[str, Mapping[str, object]]) -> bool:
    conditions = item.get("status", {}).get("conditions") or ()
    assert isinstance(conditions, list | tuple), "a list, as the API has it"
    return any(entry["type"] in _ENDED and entry["status"] == "True" for entry in conditions)
