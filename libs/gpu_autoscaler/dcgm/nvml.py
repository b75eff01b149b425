"""Reads the GPUs of this machine through NVML, as a page in the format of NVIDIA's dcgm-exporter.

For nodes without DCGM: names, units and labels are those of `exporter_pages.py`, so that everything that reads DCGM
reads this page. A value that NVML refuses is left out, never zero. Nothing is set: all calls only read.
Sources: NVML API reference (driver 580) for calls and units, dcgm-exporter `etc/default-counters.csv` for names.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from gpu_autoscaler.dcgm import exporter_pages as page
from gpu_autoscaler.dcgm.exporter_pages import MEBIBYTE
from gpu_autoscaler.dcgm.pod_resources import Holder

MEMORY_TOTAL = "DCGM_FI_DEV_FB_TOTAL"
MEMORY_COPY = "DCGM_FI_DEV_MEM_COPY_UTIL"
SM_CLOCK = "DCGM_FI_DEV_SM_CLOCK"
MEMORY_CLOCK = "DCGM_FI_DEV_MEM_CLOCK"
PCIE_SENT = "DCGM_FI_DEV_PCIE_TX_THROUGHPUT"
PCIE_RECEIVED = "DCGM_FI_DEV_PCIE_RX_THROUGHPUT"
SINGLE_BIT_ERRORS = "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL"

EVENTS_MAX = 100  # read for one page
ALL_INSTANCES = 0xFFFFFFFF  # the instance of an event without one (nvml.h, nvmlEventData_t)

# Name, type and help of each value, in the order of the page.
METRICS = (
    (SM_CLOCK, "gauge", "SM clock frequency (in MHz)."),
    (MEMORY_CLOCK, "gauge", "Memory clock frequency (in MHz)."),
    (page.TEMPERATURE, "gauge", "GPU temperature (in C)."),
    (page.POWER, "gauge", "Power draw (in W)."),
    (PCIE_SENT, "gauge", "PCIe transmit throughput (in KB/s)."),
    (PCIE_RECEIVED, "gauge", "PCIe receive throughput (in KB/s)."),
    (page.UTILIZATION, "gauge", "GPU utilization (in %)."),
    (MEMORY_COPY, "gauge", "Memory utilization (in %)."),
    (page.XID, "gauge", "Latest XID error since the exporter started; 0 is none."),
    (page.MEMORY_FREE, "gauge", "Framebuffer memory free (in MiB)."),
    (page.MEMORY_USED, "gauge", "Framebuffer memory used (in MiB)."),
    (page.MEMORY_RESERVED, "gauge", "Framebuffer memory reserved (in MiB)."),
    (MEMORY_TOTAL, "gauge", "Framebuffer memory in total (in MiB)."),
    (SINGLE_BIT_ERRORS, "counter", "Corrected ECC errors since the first use of the GPU."),
    (page.DOUBLE_BIT_ERRORS, "counter", "Uncorrected ECC errors since the driver was loaded."),
    (page.ROW_REMAP_FAILURE, "gauge", "Whether remapping of rows has failed."),
    (page.ENGINE_ACTIVE, "gauge", "Ratio of time since the previous page that the graphics engine was active."),
)

_Values = dict[str, float]
_Reading = Callable[[Any, Any], _Values]  # of the library and a device


def _memory(nvml: Any, device: Any) -> _Values:  # noqa: ANN401 - ctypes
    memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)  # version 2: used is without reserved
    return {
        page.MEMORY_FREE: memory.free / MEBIBYTE,
        page.MEMORY_USED: memory.used / MEBIBYTE,
        page.MEMORY_RESERVED: memory.reserved / MEBIBYTE,
        MEMORY_TOTAL: memory.total / MEBIBYTE,
    }


def _utilization(nvml: Any, device: Any) -> _Values:  # noqa: ANN401 - ctypes
    rates = nvml.nvmlDeviceGetUtilizationRates(device)
    return {page.UTILIZATION: rates.gpu, MEMORY_COPY: rates.memory}


# Of a GPU as a whole.
_GPU_READINGS: tuple[_Reading, ...] = (
    _memory,
    _utilization,
    lambda nvml, gpu: {page.POWER: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},  # from mW
    lambda nvml, gpu: {SM_CLOCK: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)},
    lambda nvml, gpu: {MEMORY_CLOCK: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)},
    lambda nvml, gpu: {PCIE_SENT: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES)},
    lambda nvml, gpu: {PCIE_RECEIVED: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES)},
)
# Of a GPU; its MIG instances share them.
_HEALTH_READINGS: tuple[_Reading, ...] = (
    lambda nvml, gpu: {page.TEMPERATURE: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)},
    lambda nvml, gpu: {
        page.DOUBLE_BIT_ERRORS: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    },
    lambda nvml, gpu: {
        SINGLE_BIT_ERRORS: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_AGGREGATE_ECC
        )
    },
    lambda nvml, gpu: {page.ROW_REMAP_FAILURE: nvml.nvmlDeviceGetRemappedRows(gpu)[3]},
)


@dataclass(frozen=True, slots=True)
class _Gpu:
    device: Any
    index: int
    uuid: str
    bus_id: str
    device_file: str  # below /dev
    model: str


class _Part(NamedTuple):
    """What a line of the page is about: a GPU, or one of its MIG instances."""

    gpu: _Gpu
    device: Any
    instance: int | None
    uuid: str
    profile: str


class NvmlReader:
    """The GPUs of this machine. Not safe for use by several threads at once."""

    def __init__(self, hostname: str, nvml: Any = pynvml) -> None:  # noqa: ANN401 - the library has no types
        """Raise `nvml.NVMLError` without a driver. `hostname` becomes a label."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._hostname = hostname
        self._driver = nvml.nvmlSystemGetDriverVersion()
        self._gpus = [gpu for index in range(nvml.nvmlDeviceGetCount()) if (gpu := self._gpu(index)) is not None]
        self._xids: dict[tuple[str, int], int] = {}  # by GPU and instance
        self._events = self._opened_events()
        self._engine_samples: dict[str, Any] = {}  # by UUID

    def page(self, holders: Mapping[str, Holder]) -> str | None:
        """Return the page, None if no GPU gave any value. `holders`: of devices, by name of the device plugin."""
        self._read_events()
        parts = [part for gpu in self._gpus for part in self._parts(gpu)]
        self._forget_samples({part.uuid for part in parts})
        read = [(self._labels(part, holders), self._values(part)) for part in parts]
        lines: list[str] = []
        for name, kind, text in METRICS:
            found = [f"{name}{{{labels}}} {_text(values[name])}" for labels, values in read if name in values]
            if found:
                lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}", *found)
        return "\n".join(lines) + "\n" if lines else None

    def _gpu(self, index: int) -> _Gpu | None:
        """Return what never changes of a GPU; None if it cannot be read, as after it fell off the bus."""
        nvml = self._nvml
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            return _Gpu(
                device=device,
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(device),
                bus_id=_decoded(nvml.nvmlDeviceGetPciInfo(device).busId),
                device_file=f"nvidia{nvml.nvmlDeviceGetMinorNumber(device)}",
                model=nvml.nvmlDeviceGetName(device),
            )
        except nvml.NVMLError:
            return None

    def _parts(self, gpu: _Gpu) -> Iterator[_Part]:
        """Yield the MIG instances of a GPU; without any, the GPU."""
        nvml, has_instances = self._nvml, False
        count = self._answer(nvml.nvmlDeviceGetMaxMigDeviceCount, gpu.device) or 0
        for number in range(count):
            try:
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.device, number)
                instance = nvml.nvmlDeviceGetGpuInstanceId(device)
                uuid, name = nvml.nvmlDeviceGetUUID(device), nvml.nvmlDeviceGetName(device)
            except nvml.NVMLError:  # most often a number without instance
                continue
            has_instances = True
            yield _Part(gpu, device, instance, uuid, name.rpartition("MIG ")[2])
        if not has_instances:
            yield _Part(gpu, gpu.device, None, gpu.uuid, "")

    def _labels(self, part: _Part, holders: Mapping[str, Holder]) -> str:
        gpu, instance = part.gpu, part.instance
        labels: dict[str, object] = {
            "gpu": gpu.index,
            "UUID": gpu.uuid,
            "pci_bus_id": gpu.bus_id,
            "device": gpu.device_file,
            "modelName": gpu.model,
        }
        if instance is not None:
            labels |= {"GPU_I_PROFILE": part.profile, "GPU_I_ID": instance}
        labels |= {"Hostname": self._hostname, "DCGM_FI_DRIVER_VERSION": self._driver}
        # Plugins name devices by UUID; that of GKE by device file and instance.
        plugin_name = gpu.device_file if instance is None else f"{gpu.device_file}/gi{instance}"
        holder = holders.get(part.uuid) or holders.get(plugin_name)
        if holder is not None:
            labels |= holder._asdict()
        return ",".join(f'{name}="{value}"' for name, value in labels.items())

    def _values(self, part: _Part) -> _Values:
        """Return what NVML answers about a GPU or an instance. The power of an instance is unknown."""
        readings = [(reading, part.gpu.device) for reading in _HEALTH_READINGS]
        readings += [(reading, part.device) for reading in (_GPU_READINGS if part.instance is None else (_memory,))]
        values: _Values = {}
        for reading, device in readings:
            values |= self._answer(reading, self._nvml, device) or {}
        if (ratio := self._answer(self._engine_ratio, part)) is not None:
            values[page.ENGINE_ACTIVE] = ratio
        whole = self._xids.get((part.gpu.uuid, ALL_INSTANCES))
        xid = whole if part.instance is None else self._xids.get((part.gpu.uuid, part.instance), whole)
        if xid or (xid == 0 and values):  # a GPU that answers nothing is not free of errors
            values[page.XID] = xid
        return values

    def _answer(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - of any type
        """Return the answer, None if NVML refuses one."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    # Engine activity: GPM, on Hopper and later, compares two samples. Each page ends one interval and begins the next.

    def _engine_ratio(self, part: _Part) -> float | None:
        nvml = self._nvml
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            if part.instance is None:
                nvml.nvmlGpmSampleGet(part.device, sample)
            else:
                nvml.nvmlGpmMigSampleGet(part.gpu.device, part.instance, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            raise
        previous = self._engine_samples.get(part.uuid)
        self._engine_samples[part.uuid] = sample
        if previous is None:
            return None
        try:
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
            request.sample1, request.sample2 = previous, sample
            request.metrics[0].metricId = nvml.NVML_GPM_METRIC_GRAPHICS_UTIL
            metric = nvml.nvmlGpmMetricsGet(request).metrics[0]
        finally:
            nvml.nvmlGpmSampleFree(previous)
        return metric.value / 100 if metric.nvmlReturn == nvml.NVML_SUCCESS and 0 <= metric.value <= 100 else None

    def _forget_samples(self, uuids: set[str]) -> None:
        """Free samples of instances that no longer exist."""
        for uuid in self._engine_samples.keys() - uuids:
            self._nvml.nvmlGpmSampleFree(self._engine_samples.pop(uuid))

    # XIDs are events. A GPU whose events cannot be read has no value: none is not known.

    def _opened_events(self) -> Any:  # noqa: ANN401 - ctypes
        nvml = self._nvml
        events = self._answer(nvml.nvmlEventSetCreate)
        for gpu in self._gpus if events is not None else ():
            try:
                nvml.nvmlDeviceRegisterEvents(gpu.device, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                continue
            self._xids[gpu.uuid, ALL_INSTANCES] = 0
        return events

    def _read_events(self) -> None:
        nvml = self._nvml
        for _ in range(EVENTS_MAX if self._xids else 0):
            try:
                event = nvml.nvmlEventSetWait(self._events, 0)
                uuid = nvml.nvmlDeviceGetUUID(event.device)
            except nvml.NVMLError:  # most often: no further event
                return
            if event.gpuInstanceId == ALL_INSTANCES:  # later than those of its instances
                for key in [key for key in self._xids if key[0] == uuid]:
                    del self._xids[key]
            self._xids[uuid, event.gpuInstanceId] = event.eventData


def _decoded(text: bytes | str) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
