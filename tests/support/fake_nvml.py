"""NVIDIA's management library with the answers of a test. Constants and errors are those of the real binding."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20


def refused(code: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> Exception:
    """The error of a call that the device does not support."""
    error: Exception = pynvml.NVMLError(code)
    return error


@dataclass
class FakeDevice:
    """A GPU or a MIG instance. `answers` are by call; a call without one is refused."""

    uuid: str
    name: str
    answers: dict[str, Any] = field(default_factory=dict)
    instances: list["FakeDevice"] = field(default_factory=list)
    instance: int | None = None
    engine_percent: float | None = None
    minor: int = 0


def h100(number: int = 0, *, busy: int = 0, used_mib: int = 0) -> FakeDevice:
    """An H100 with 80 GB."""
    return FakeDevice(
        uuid=f"GPU-{number}",
        name="NVIDIA H100 80GB HBM3",
        minor=number,
        engine_percent=float(busy),
        answers={
            "nvmlDeviceGetMemoryInfo": memory(used_mib),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=busy, memory=busy // 2),
            "nvmlDeviceGetPowerUsage": 70_250,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetPcieThroughput": 0,
            "nvmlDeviceGetTemperature": 31,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceRegisterEvents": None,
        },
    )


def memory(used_mib: int, total_mib: int = 81559, reserved_mib: int = 518) -> SimpleNamespace:
    """The second version of the answer: used is without reserved."""
    free_mib = total_mib - used_mib - reserved_mib
    return SimpleNamespace(used=used_mib * MIB, free=free_mib * MIB, reserved=reserved_mib * MIB, total=total_mib * MIB)


class FakeNvml:
    """The module."""

    def __init__(self, *gpus: FakeDevice) -> None:
        self.gpus = gpus
        self.events: deque[tuple[FakeDevice, int, int]] = deque()  # GPU, instance, XID
        self.samples_count = 0  # allocated and not freed

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - calls and constants
        if not name.startswith(("nvmlDevice", "nvmlSystem")):
            return getattr(pynvml, name)

        def call(device: FakeDevice, *_: object, **__: object) -> Any:  # noqa: ANN401 - as above
            answer = device.answers.get(name, refused())
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def nvmlInit(self) -> None:  # noqa: N802 - the binding's name, as all below
        """Do nothing."""

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:  # noqa: N802
        if isinstance(lost := self.gpus[index].answers.get("nvmlDeviceGetHandleByIndex"), Exception):
            raise lost
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetName(self, device: FakeDevice) -> str:  # noqa: N802
        return device.name

    def nvmlDeviceGetMinorNumber(self, device: FakeDevice) -> int:  # noqa: N802
        return device.minor

    def nvmlDeviceGetPciInfo(self, device: FakeDevice) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{device.minor + 4:02X}:00.0".encode())

    def nvmlDeviceGetMaxMigDeviceCount(self, _: FakeDevice) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeDevice, number: int) -> FakeDevice:  # noqa: N802
        if number >= len(device.instances):
            raise refused(pynvml.NVML_ERROR_NOT_FOUND)
        return device.instances[number]

    def nvmlDeviceGetGpuInstanceId(self, device: FakeDevice) -> int | None:  # noqa: N802
        return device.instance

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlEventSetWait(self, _: object, _timeout: int) -> SimpleNamespace:  # noqa: N802
        if not self.events:
            raise refused(pynvml.NVML_ERROR_TIMEOUT)
        gpu, instance, xid = self.events.popleft()
        return SimpleNamespace(device=gpu, gpuInstanceId=instance, eventData=xid)

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:  # noqa: N802
        self.samples_count += 1
        return SimpleNamespace(percent=None)

    def nvmlGpmSampleFree(self, _: SimpleNamespace) -> None:  # noqa: N802
        self.samples_count -= 1

    def nvmlGpmSampleGet(self, device: FakeDevice, sample: SimpleNamespace) -> None:  # noqa: N802
        if device.engine_percent is None:
            raise refused()
        sample.percent = device.engine_percent

    def nvmlGpmMigSampleGet(self, gpu: FakeDevice, instance: int, sample: SimpleNamespace) -> None:  # noqa: N802
        self.nvmlGpmSampleGet(next(mig for mig in gpu.instances if mig.instance == instance), sample)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(metrics=[SimpleNamespace()])

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> SimpleNamespace:  # noqa: N802
        metric = request.metrics[0]
        metric.nvmlReturn, metric.value = pynvml.NVML_SUCCESS, request.sample2.percent
        return request
