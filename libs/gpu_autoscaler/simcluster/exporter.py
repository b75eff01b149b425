"""DCGM exporter pages of simulated nodes: real format, values that follow the pods, faults on demand.

Format, labels and the counters exported by default: NVIDIA dcgm-exporter, `etc/default-counters.csv` and README
(read 2026-11-21). Values depend on GPU, counter and time alone, so a page can be repeated.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec

from gpu_autoscaler.model.gpu import GPU_TABLE, GpuModel, gpu_sizes
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.model.resources import GPU_RESOURCE, is_slice
from gpu_autoscaler.simcluster.objects import Json, is_finished, phase_of, requests_milli
from gpu_autoscaler.simcluster.offers import InstanceType

TelemetryFault = Literal["silent", "frozen", "zero", "absurd"]

NOISE_SECONDS = 10  # interval in which values change
DRIVER_VERSION = "580.95.05"
BLANK_INT64 = 9223372036854775794  # DCGM_INT64_BLANK of dcgm_structs.h: "no value"
ABSURD_UTILIZATION = 4294967295  # an unsigned -1, as reported by users
AMBIENT_CELSIUS = 27.0
RESERVED_RATIO = 0.02  # of the memory, kept by the driver


def gpu_products(table: Iterable[GpuModel] = GPU_TABLE) -> dict[tuple[str, int], tuple[str, float, float]]:
    """Return device name, idle and maximum power in watts, by model and memory in GiB."""
    return {
        (model.name, size.memory_gib): (size.device_name or f"NVIDIA {model.name}", size.idle_watts, size.max_watts)
        for model, size in gpu_sizes(table)
    }


_PRODUCTS = gpu_products()


class Sickness(msgspec.Struct, frozen=True, kw_only=True):
    """Defects of one GPU. The XID stays in its gauge until the driver is reloaded, as in reality."""

    xid: int = 0
    celsius: float | None = None  # minimum temperature
    ecc_double_bit_count: int = 0
    is_row_remap_failed: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    """State of a GPU at an instant; ratios are 0 to 1."""

    busy_ratio: float
    memory_ratio: float
    seconds: float  # since the exporter started, for counters that only grow
    sickness: Sickness


@dataclass(frozen=True, slots=True)
class _Card:
    memory_mib: int
    idle_watts: float
    full_watts: float


class _Counter(NamedTuple):
    type: Literal["gauge", "counter"]
    name: str
    help: str
    value: Callable[[_Load, _Card], float]


def _watts(load: _Load, card: _Card) -> float:
    # A real sensor's value always fluctuates, even on an idle GPU, which distinguishes it from a frozen one.
    wobble = (math.floor(load.seconds / NOISE_SECONDS) * 7919 % 101) / 1000
    return card.idle_watts + (card.full_watts - card.idle_watts) * load.busy_ratio * 0.9 + wobble


def _celsius(load: _Load, _card: _Card) -> float:
    own = round(AMBIENT_CELSIUS + 42.0 * load.busy_ratio)
    return own if load.sickness.celsius is None else max(own, load.sickness.celsius)


def _used_mib(load: _Load, card: _Card) -> float:
    return int(card.memory_mib * load.memory_ratio)


def _reserved_mib(_load: _Load, card: _Card) -> float:
    return int(card.memory_mib * RESERVED_RATIO)


def _free_mib(load: _Load, card: _Card) -> float:
    return card.memory_mib - _used_mib(load, card) - _reserved_mib(load, card)


def _zero(_load: _Load, _card: _Card) -> float:
    return 0


def _millijoules(load: _Load, card: _Card) -> float:
    return int(card.idle_watts * 1000 * load.seconds)


def _gauge(name: str, text: str, value: Callable[[_Load, _Card], float]) -> _Counter:
    return _Counter("gauge", f"DCGM_FI_{name}", text, value)


def _counter(name: str, text: str, value: Callable[[_Load, _Card], float]) -> _Counter:
    return _Counter("counter", f"DCGM_FI_{name}", text, value)


_PCIE_RATE = (
    "The rate of data {} over the PCIe bus - including both protocol headers and data payloads - in bytes per second."
)
COUNTERS = (
    _gauge("DEV_SM_CLOCK", "SM clock frequency (in MHz).", lambda at, _: 1410 if at.busy_ratio else 210),
    _gauge("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", lambda _, __: 1215),
    _gauge("DEV_MEMORY_TEMP", "Memory temperature (in C).", lambda at, card: _celsius(at, card) + 4),
    _gauge("DEV_GPU_TEMP", "GPU temperature (in C).", _celsius),
    _gauge("DEV_POWER_USAGE", "Power draw (in W).", _watts),
    _counter("DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).", _millijoules),
    _counter("DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", _zero),
    _gauge("DEV_GPU_UTIL", "GPU utilization (in %).", lambda at, _: round(at.busy_ratio * 100)),
    _gauge("DEV_MEM_COPY_UTIL", "Memory utilization (in %).", lambda at, _: round(at.busy_ratio * 42)),
    _gauge("DEV_ENC_UTIL", "Encoder utilization (in %).", _zero),
    _gauge("DEV_DEC_UTIL", "Decoder utilization (in %).", _zero),
    _gauge("DEV_XID_ERRORS", "Value of the last XID error encountered.", lambda at, _: at.sickness.xid),
    # Not a default counter: it has to be added to the counters file.
    _counter(
        "DEV_ECC_DBE_VOL_TOTAL",
        "Total number of double-bit volatile ECC errors.",
        lambda at, _: at.sickness.ecc_double_bit_count,
    ),
    _gauge("DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free_mib),
    _gauge("DEV_FB_USED", "Framebuffer memory used (in MiB).", _used_mib),
    _gauge("DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", _reserved_mib),
    _counter("DEV_NVLINK_BANDWIDTH_TOTAL", "Total number of NVLink bandwidth counters for all lanes.", _zero),
    _gauge("DEV_VGPU_LICENSE_STATUS", "vGPU License status", _zero),
    _counter("DEV_UNCORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for uncorrectable errors", _zero),
    _counter("DEV_CORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for correctable errors", _zero),
    _gauge(
        "DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed",
        lambda at, _: int(at.sickness.is_row_remap_failed),
    ),
    _gauge("PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", lambda at, _: at.busy_ratio),
    _gauge(
        "PROF_PIPE_TENSOR_ACTIVE",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda at, _: at.busy_ratio * 0.55,
    ),
    _gauge(
        "PROF_DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        lambda at, _: at.busy_ratio * 0.4,
    ),
    _gauge("PROF_PCIE_TX_BYTES", _PCIE_RATE.format("transmitted"), lambda at, _: int(at.busy_ratio * 2.1e8)),
    _gauge("PROF_PCIE_RX_BYTES", _PCIE_RATE.format("received"), lambda at, _: int(at.busy_ratio * 3.4e8)),
)


class Telemetry:
    """The exporter of one node: the pods on its GPUs, and its faults."""

    def __init__(self, node_name: str, kind: InstanceType) -> None:
        product, idle_watts, full_watts = _PRODUCTS.get(
            (kind.gpu_model or "", kind.gpu_memory_gib or 0), (f"NVIDIA {kind.gpu_model}", 30.0, 300.0)
        )
        self.product = product
        self._card = _Card((kind.gpu_memory_gib or 16) * 1024, idle_watts, full_watts)
        self._holders: list[Json | None] = [None] * kind.gpu_count
        self._uuids = [_uuid(node_name, index) for index in range(kind.gpu_count)]
        self._labels = [
            f'gpu="{index}",UUID="{uuid}",pci_bus_id="00000000:{index + 16:02X}:00.0",device="nvidia{index}",'
            f'modelName="{product}",Hostname="{node_name}",DCGM_FI_DRIVER_VERSION="{DRIVER_VERSION}"'
            for index, uuid in enumerate(self._uuids)
        ]
        self._sick: dict[int, Sickness] = {}
        self._fault: TelemetryFault | None = None
        self._frozen_page: str | None = None

    @property
    def fault(self) -> TelemetryFault | None:
        return self._fault

    def break_with(self, fault: TelemetryFault | None) -> None:
        """Set the telemetry fault; None: works again."""
        self._fault = fault
        self._frozen_page = None

    def sicken(self, gpu: int, sickness: Sickness | None) -> None:
        """Set defects of the GPU with this index; None: none. Raises IndexError."""
        if not 0 <= gpu < len(self._holders):
            raise IndexError(f"GPU {gpu}: the node has {len(self._holders)}")
        self._sick.pop(gpu, None)
        if sickness is not None:
            self._sick[gpu] = sickness

    def page(self, pods: Iterable[Json], now: datetime) -> str | None:
        """Return the page at `now`, None for a silent exporter. `pods` are those bound to the node."""
        self._hand_out(pods)
        if self._fault == "silent":
            return None
        if self._fault == "frozen":
            self._frozen_page = self._frozen_page or self._render(now)
            return self._frozen_page
        return self._render(now)

    def _hand_out(self, pods: Iterable[Json]) -> None:
        """Keep each running pod on its GPUs; new ones get the lowest free GPUs, as from a device plugin."""
        wanted = {
            pod["metadata"]["uid"]: pod
            for pod in pods
            if phase_of(pod) == "Running" and not is_finished(pod) and _gpus_of(pod)
        }
        for index, holder in enumerate(self._holders):
            if holder is not None and holder["metadata"]["uid"] not in wanted:
                self._holders[index] = None
        held = {holder["metadata"]["uid"] for holder in self._holders if holder is not None}
        for uid, pod in sorted(wanted.items()):
            if uid not in held:
                count = _gpus_of(pod)
                free = [index for index, holder in enumerate(self._holders) if holder is None]
                for index in free[:count]:
                    self._holders[index] = pod

    def _render(self, now: datetime) -> str:
        seconds = now.timestamp()
        loads = [self._load(index, seconds) for index in range(len(self._holders))]
        labels = [base + _pod_labels(holder) for base, holder in zip(self._labels, self._holders, strict=True)]
        lines: list[str] = []
        for counter in COUNTERS:
            lines += (f"# HELP {counter.name} {counter.help}", f"# TYPE {counter.name} {counter.type}")
            lines += [
                f"{counter.name}{{{label}}} {self._value(counter, load)}"
                for label, load in zip(labels, loads, strict=True)
            ]
        return "\n".join(lines) + "\n"

    def _load(self, index: int, seconds: float) -> _Load:
        sickness = self._sick.get(index, Sickness())
        if self._holders[index] is None or self._fault == "zero":
            return _Load(0.0, 0.0, seconds, sickness)
        window = math.floor(seconds / NOISE_SECONDS)
        noise = zlib.crc32(f"{self._uuids[index]}/{window}".encode()) / 0xFFFFFFFF
        return _Load(
            round(0.85 + 0.13 * noise, 4),
            0.62 + 0.2 * (zlib.crc32(self._uuids[index].encode()) % 100) / 100,
            seconds,
            sickness,
        )

    def _value(self, counter: _Counter, load: _Load) -> str:
        if self._fault == "absurd":
            return str(ABSURD_UTILIZATION if counter.name == "DCGM_FI_DEV_GPU_UTIL" else BLANK_INT64)
        value = counter.value(load, self._card)
        return str(int(value)) if value == int(value) else f"{value:.6f}"


def _gpus_of(pod: Json) -> int:
    """Return the pod's GPUs; a pod with part of a GPU counts one."""
    requests = requests_milli(pod)
    return requests.get(GPU_RESOURCE, 0) // 1000 or int(any(is_slice(name) and requests[name] for name in requests))


def _uuid(node_name: str, index: int) -> str:
    digest = derive_id("gpu", node_name, index)
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def _pod_labels(pod: Json | None) -> str:
    """Return the labels that name the holder; an idle GPU has them empty."""
    if pod is None:
        return ',container="",namespace="",pod=""'
    metadata, container = pod["metadata"], pod["spec"]["containers"][0]["name"]
    return f',container="{container}",namespace="{metadata["namespace"]}",pod="{metadata["name"]}"'
