"""Provider, instance metadata, GPU exporters and store as one process reaches them, with faults injected."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.dcgm.exporter_pages import Page
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.gpu import GpuSample
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import ActionId, JobId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalScope
from gpu_autoscaler.sim.adapters.call_boundary import CallBoundary
from gpu_autoscaler.sim.adapters.snapshots import corrupted
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.invariants.observer import Observer
from gpu_autoscaler.store.protocol import Acceptance, JobOutcome

METADATA_URL = "sim://{node_name}/metadata"
EXPORTER_URL = "sim://{node_name}/metrics"
REFUSED_SECONDS = 180.0
SLOW_SECONDS = (2.0, 60.0)
LISTED_LATE_SECONDS = (5.0, 90.0)  # until a launched instance is listed
INCOMPLETE_RATIO = 0.5  # share of the instances that an incomplete list shows
LAUNCH_TIMEOUT_SECONDS = 30.0  # timeout of a launch call
_CODES: tuple[tuple[str, RefusalScope], ...] = (
    ("InsufficientInstanceCapacity", "offer"),
    ("Unsupported", "zone"),
    ("VcpuLimitExceeded", "region"),
)


def node_of(address: str) -> str:
    """Return the node name in an address of these two forms."""
    return address.removeprefix("sim://").partition("/")[0]


class SimProvider:
    """A CapacityProvider."""

    name = "sim"

    def __init__(
        self, boundary: CallBoundary, cloud: Cloud, observer: Observer, reported_up_to: Callable[[], int] = lambda: 0
    ) -> None:
        """`reported_up_to`: the sequence of its own stream up to which the process knows the outcome of its orders."""
        self._boundary = boundary
        self._cloud = cloud
        self._observer = observer
        self._reported_up_to = reported_up_to

    async def offers(self) -> Sequence[Offer]:
        await self._boundary.before_call("cloud_call_failed")
        return self._cloud.sampled()

    async def launch(self, order: Order) -> Instance:
        return (await self._launched((order,)))[0]

    def can_launch_group(self, pool: str, offer: Offer) -> bool:  # noqa: ARG002 - equal for all
        """Fixed for the run."""
        return self._cloud.has_launch_groups

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        launched_count = sum(self._cloud.has_machine(order.action_id) for order in orders)
        if 0 < launched_count < len(orders):
            raise PermanentError(
                f"transaction {transaction} has launched only {launched_count} of {len(orders)} orders"
            )
        return await self._launched(orders)

    async def _launched(self, orders: Sequence[Order]) -> list[Instance]:
        """Launch all of them or none."""
        for order in orders:
            self._observer.launch_requested(order, self._reported_up_to())
        await self._boundary.before_call()
        faults, offer = self._boundary.faults, orders[0].offer
        if self._cloud.is_delaying:
            for order in orders:
                self._cloud.delay_launch(order)
            await self._boundary.sleep(LAUNCH_TIMEOUT_SECONDS)
            raise TransientError("RequestTimeout: the outcome is unknown")
        if faults.strikes("launch_slow"):
            await self._boundary.sleep(faults.seconds("launch_slow", *SLOW_SECONDS))
        if faults.strikes("launch_throttled"):
            raise TransientError("RequestLimitExceeded", retry_after_seconds=2.0)
        # The instance of a known token is returned: a refusal means that nothing was launched
        # (`providers/protocol.py`).
        has_machine = self._cloud.has_machine(orders[0].action_id)
        if not has_machine and faults.strikes("launch_refused"):
            raise _refused(orders[0], *_CODES[int(faults.seconds("launch_refused", 0.0, 2.2))])
        if not has_machine and not self._cloud.allows_gpus(offer):
            raise _refused(orders[0], *_CODES[2])
        if not has_machine and self._cloud.is_out_of(offer):
            raise _refused(orders[0], *_CODES[0])
        machines = [self._launch_machine(order) for order in orders]
        await self._boundary.after_call("launch_answer_lost")
        return [machine.shown() for machine in machines]

    def _launch_machine(self, order: Order) -> Machine:
        faults = self._boundary.faults
        is_late = faults.strikes("instance_visible_late")
        return self._cloud.launch(
            order,
            visible_in_seconds=faults.seconds("instance_visible_late", *LISTED_LATE_SECONDS) if is_late else 0.0,
            comes_up=not faults.strikes("instance_never_registers"),
            shows_gpus=not faults.strikes("gpus_never_allocatable"),
        )

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:  # noqa: ARG002 - protocol
        await self._boundary.before_call("cloud_call_failed")
        machine = self._cloud.of_id(provider_id)
        if machine is not None:
            if machine.is_alive:
                self._observer.machine_terminated(machine)
            self._cloud.terminate(machine)
        await self._boundary.after_call("cloud_call_failed")
        return None if machine is None else machine.shown()

    async def instances(self, installation: str) -> Sequence[Instance]:  # noqa: ARG002 - one account, one installation
        await self._boundary.before_call("cloud_call_failed")
        shown, faults = self._cloud.shown(), self._boundary.faults
        if shown and faults.strikes("instances_left_out"):  # one incomplete list
            return [instance for instance in shown if faults.seconds("instances_left_out", 0.0, 1.0) < INCOMPLETE_RATIO]
        return shown

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        await self._boundary.before_call("cloud_call_failed")
        machine = self._cloud.of_id(provider_id)
        return None if machine is None or machine.visible_at > self._boundary.loop.now() else machine.shown()

    async def close(self) -> None:
        """Nothing to close."""


class SimMetadata:
    """One machine's InstanceMetadata."""

    def __init__(self, boundary: CallBoundary, cloud: Cloud, address: str, *, is_closed: bool = False) -> None:
        """`is_closed`: metadata never responds in this run."""
        self._boundary = boundary
        self._cloud = cloud
        self._is_closed = is_closed
        self._node_name = node_of(address)

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        notice = (await self._machine()).notice
        return () if notice is None else (notice,)

    async def rebalance_recommended_at(self) -> datetime | None:
        return (await self._machine()).hinted_at

    async def provider_id(self) -> ProviderId:
        return (await self._machine()).provider_id

    async def _machine(self) -> Machine:
        await self._boundary.before_call()
        machine = self._cloud.of_node(self._node_name)
        if self._is_closed or machine is None or not machine.is_alive:
            raise TransientError(f"the metadata of {self._node_name} does not respond")
        return machine


_FREE = ("", False)  # no holder
_IDLE_RATIO = 0.02  # of a process that holds a GPU and computes nothing


class SimExporters:
    """Exporter pages of all machines."""

    def __init__(self, boundary: CallBoundary, cloud: Cloud) -> None:
        self._boundary = boundary
        self._cloud = cloud
        self._frozen: dict[str, Page] = {}

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        await self._boundary.before_call()
        return {name: self._page(url) for name, url in urls.items()}

    def _page(self, url: str) -> Page | None:
        machine = self._cloud.of_node(node_of(url))
        if machine is None or not machine.is_alive or machine.telemetry == "silent":
            return None
        holders = [
            (f"{pod.metadata.namespace}/{pod.metadata.name}", self._cloud.is_idle(pod))
            for pod in self._cloud.pods_on(machine)
            for _ in range(int(pod.spec.containers[0].resources.requests.get("nvidia.com/gpu", "0")))
        ]
        holders += [_FREE] * (_gpus(machine) - len(holders))
        now = self._boundary.loop.time()
        true = Page(tuple(_sample(machine, index, now, holders[index]) for index in range(_gpus(machine))), 0)
        if machine.telemetry == "frozen":
            return self._frozen.setdefault(machine.node_name, true)
        self._frozen.pop(machine.node_name, None)
        if machine.telemetry == "all_zero":
            zero = (_sample(machine, index, now, _FREE) for index in range(_gpus(machine)))
            return Page(tuple(replace(sample, pod=holders[number][0] or None) for number, sample in enumerate(zero)), 0)
        if machine.telemetry == "absurd":  # what the parser keeps of impossible values
            return Page(
                tuple(GpuSample(gpu=sample.gpu, gpu_uuid=sample.gpu_uuid) for sample in true.gpus), len(true.gpus)
            )
        return true


class SimStore(MemoryStore):
    """The store, full or slow by faults."""

    def __init__(self, boundary: CallBoundary, tables: Tables, store_faults: "StoreFaults") -> None:
        super().__init__(tables)
        self._boundary = boundary
        self._store_faults = store_faults

    async def accept_job(
        self, spec: JobSpec, *, request_digest: str, accepted_at: datetime, template: bytes | None = None
    ) -> Acceptance:
        """See Store; the row is written, but the caller may be killed or get no response."""
        acceptance = await super().accept_job(
            spec, request_digest=request_digest, accepted_at=accepted_at, template=template
        )
        await self._boundary.after_call("store_answer_lost")
        return acceptance

    async def finish_job(self, job_id: JobId, *, outcome: JobOutcome, finished_at: datetime) -> bool:
        is_known = await super().finish_job(job_id, outcome=outcome, finished_at=finished_at)
        await self._boundary.after_call("store_answer_lost")
        return is_known

    async def charge(self, spans: Sequence[CostAccrued]) -> int:
        new_count = await super().charge(spans)
        await self._boundary.after_call("store_answer_lost")
        return new_count

    async def save_snapshot(self, *, label: bytes, body: bytes, saved_at: datetime, service: str = "") -> None:
        """Keep the snapshot, corrupted if a fault strikes."""
        label, body = corrupted(self._boundary.faults, label, body)
        await super().save_snapshot(label=label, body=body, saved_at=saved_at, service=service)

    async def _reached(self) -> None:
        await self._boundary.before_call()
        if self._boundary.faults.strikes("store_slow", self._boundary.role):
            seconds = self._boundary.faults.seconds("store_slow", 0.1, 5.0)
            self._boundary.faults.disturb(seconds, self._boundary.role)
            await self._boundary.sleep(seconds)
        if self._store_faults.is_full:
            raise TransientError("store: database or disk is full; free the disk; the call is retried")


class StoreFaults:
    """Active faults of the store; set by the fault schedule."""

    is_full = False


def _refused(order: Order, code: str, scope: RefusalScope) -> LaunchRefused:
    message = f"{code}: {order.offer.key} cannot be launched now"
    return LaunchRefused(message, code=code, scope=scope, retry_after_seconds=REFUSED_SECONDS)


def _gpus(machine: Machine) -> int:
    return machine.offer.resources.gpu_count if machine.is_usable else 0


def _sample(machine: Machine, index: int, now: float, use: tuple[str, bool]) -> GpuSample:
    """Return a sample of a GPU that this pod holds, busy or idle."""
    holder, is_idle = use
    is_busy = bool(holder)
    sample = GpuSample(
        gpu=str(index),
        gpu_uuid=f"GPU-{machine.node_name}-{index}",
        gpu_model=machine.offer.gpu_model,
        utilization_ratio=(_IDLE_RATIO if is_idle else 0.9) if is_busy else 0.0,
        memory_used_bytes=16 * GIBIBYTE if is_busy else 0,
        memory_total_bytes=machine.offer.gpu_memory_bytes,
        temperature_celsius=65.0 if is_busy else 35.0,
        power_watts=(250.0 if is_busy else 60.0) + now // 10 % 7 / 10,  # a working sensor is never constant
        pod=holder or None,
        xid=0,
        is_row_remap_failed=False,
        ecc_double_bit_count=0,
    )
    return sample if index else replace(sample, **machine.gpu_fault)
