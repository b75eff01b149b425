"""Answers of NVML become a page that the parser of DCGM pages reads; what NVML refuses is not on it."""

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.fake_nvml import MIB, FakeDevice, FakeNvml, h100, memory, refused

from gpu_autoscaler.dcgm import exporter_pages
from gpu_autoscaler.dcgm.exporter_pages import parse_page
from gpu_autoscaler.dcgm.nvml import ALL_INSTANCES, EVENTS_MAX, METRICS, NvmlReader
from gpu_autoscaler.dcgm.pod_resources import Holder
from gpu_autoscaler.events.gpu import GpuSample

HOLDER = Holder("worker", "ml", "train-0")


def reader(*gpus: FakeDevice) -> tuple[NvmlReader, FakeNvml]:
    """A reader of these GPUs."""
    nvml = FakeNvml(*gpus)
    return NvmlReader("n1", nvml), nvml


def samples(of: NvmlReader, **holders: Holder) -> tuple[GpuSample, ...]:
    """The samples of a page, by the parser."""
    page = parse_page(of.page({name.replace("_", "-"): holder for name, holder in holders.items()}) or "")
    assert page.lines_broken_count == 0
    return page.gpus


def mig(instance: int, profile: str, percent: float | None, used_mib: int) -> FakeDevice:
    """A MIG instance."""
    name, uuid = f"NVIDIA H100 80GB HBM3 MIG {profile}", f"MIG-{instance}"
    answers = {"nvmlDeviceGetMemoryInfo": memory(used_mib, total_mib=9856, reserved_mib=0)}
    return FakeDevice(uuid=uuid, name=name, answers=answers, instance=instance, engine_percent=percent)


def test_all_values_reach_the_sample_in_our_units() -> None:
    """With the pod that holds the GPU."""
    (gpu,) = samples(reader(h100(busy=40, used_mib=1000))[0], GPU_0=HOLDER)

    assert gpu == GpuSample(
        gpu="0", gpu_uuid="GPU-0", gpu_model="H100", utilization_ratio=0.4, memory_used_bytes=1000 * MIB,
        memory_total_bytes=81559 * MIB, temperature_celsius=31.0, power_watts=70.25, pod="ml/train-0", xid=0,
        is_row_remap_failed=False, ecc_double_bit_count=0,
    )  # fmt: skip


def test_a_page_has_the_format_of_prometheus() -> None:
    """Every metric with its type, the labels of a DCGM exporter, and all that the parser can read."""
    nvml_reader, _ = reader(h100(0), h100(1))
    nvml_reader.page({})
    families = {family.name: family for family in text_string_to_metric_families(nvml_reader.page({}) or "")}

    assert families.keys() == {name for name, _, _ in METRICS}
    assert exporter_pages.RANGES.keys() <= {name for name, _, _ in METRICS}
    assert families["DCGM_FI_DEV_GPU_TEMP"].samples[1].labels == {
        "gpu": "1", "UUID": "GPU-1", "pci_bus_id": "00000000:05:00.0", "device": "nvidia1",
        "modelName": "NVIDIA H100 80GB HBM3", "Hostname": "n1", "DCGM_FI_DRIVER_VERSION": "580.159.04",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "metrics"),
    [
        ("nvmlDeviceGetMemoryInfo", {"FB_USED", "FB_FREE", "FB_RESERVED", "FB_TOTAL"}),
        ("nvmlDeviceGetUtilizationRates", {"GPU_UTIL", "MEM_COPY_UTIL"}),
        ("nvmlDeviceGetPowerUsage", {"POWER_USAGE"}),
        ("nvmlDeviceGetClockInfo", {"SM_CLOCK", "MEM_CLOCK"}),
        ("nvmlDeviceGetPcieThroughput", {"PCIE_TX_THROUGHPUT", "PCIE_RX_THROUGHPUT"}),
        ("nvmlDeviceGetTemperature", {"GPU_TEMP"}),
        ("nvmlDeviceGetTotalEccErrors", {"ECC_SBE_AGG_TOTAL", "ECC_DBE_VOL_TOTAL"}),
        ("nvmlDeviceGetRemappedRows", {"ROW_REMAP_FAILURE"}),
        ("nvmlDeviceRegisterEvents", {"XID_ERRORS"}),
    ],
)
def test_a_refused_value_is_left_out(call: str, metrics: set[str]) -> None:
    """Of one GPU; the other values and the other GPU keep theirs."""
    gpu = h100(0)
    del gpu.answers[call]
    page = reader(gpu, h100(1))[0].page({}) or ""
    names = [{line.partition("{")[0] for line in page.split("\n") if f'gpu="{index}"' in line} for index in (0, 1)]

    assert names[1] - names[0] == {f"DCGM_FI_DEV_{name}" for name in metrics}


def test_engine_activity_needs_two_pages_and_support() -> None:
    """It is known from the second page on, and never on a GPU without it."""
    hopper, turing = h100(0, busy=60), h100(1)
    turing.engine_percent = None
    nvml_reader, nvml = reader(hopper, turing)

    assert exporter_pages.ENGINE_ACTIVE not in (nvml_reader.page({}) or "")
    lines = [line for line in (nvml_reader.page({}) or "").split("\n") if line.startswith(exporter_pages.ENGINE_ACTIVE)]
    assert [line.rpartition(" ")[2] for line in lines] == ["0.6"]
    assert nvml.samples_count == 1  # the next page compares with it


def test_mig_instances_replace_their_gpu() -> None:
    """Each with its memory and engine activity, its GPU's health and its own pod; its power is unknown."""
    gpu = h100(busy=50, used_mib=5000)
    gpu.instances = [mig(9, "1g.10gb", 80.0, 700), mig(11, "1g.10gb", None, 0)]
    nvml_reader, _ = reader(gpu)
    nvml_reader.page({})
    busy, idle = samples(nvml_reader, MIG_9=HOLDER)

    assert (busy.gpu, busy.gpu_uuid, busy.gpu_model, busy.pod) == ("0:9", "GPU-0", "H100", "ml/train-0")
    assert (busy.utilization_ratio, busy.memory_used_bytes, busy.memory_total_bytes) == (0.8, 700 * MIB, 9856 * MIB)
    assert (busy.temperature_celsius, busy.ecc_double_bit_count, busy.is_row_remap_failed) == (31.0, 0, False)
    assert (idle.gpu, idle.utilization_ratio, idle.power_watts, idle.pod) == ("0:11", None, None, None)
    assert 'GPU_I_PROFILE="1g.10gb",GPU_I_ID="9"' in (nvml_reader.page({}) or "")


def test_a_removed_instance_leaves_nothing_behind() -> None:
    """Its sample is freed, and its GPU is a whole one again."""
    gpu = h100()
    gpu.instances = [mig(9, "1g.10gb", 80.0, 700)]
    nvml_reader, nvml = reader(gpu)
    nvml_reader.page({})
    gpu.instances = []
    (whole,) = samples(nvml_reader)

    assert (whole.gpu, nvml.samples_count) == ("0", 1)


def test_devices_of_gke_are_found_by_their_file() -> None:
    """Its plugin names a GPU `nvidia1` and an instance `nvidia0/gi9`."""
    gpu = h100(0)
    gpu.instances = [mig(9, "1g.10gb", 80.0, 700)]
    nvml_reader, _ = reader(gpu, h100(1))
    page = parse_page(nvml_reader.page({"nvidia0/gi9": HOLDER, "nvidia1": Holder("main", "web", "b")}) or "")

    assert [(sample.gpu, sample.pod) for sample in page.gpus] == [("0:9", "ml/train-0"), ("1", "web/b")]


def test_the_latest_xid_is_kept() -> None:
    """Of its GPU alone, until another one; at most EVENTS_MAX are read for a page."""
    first, second = h100(0), h100(1)
    nvml_reader, nvml = reader(first, second)
    nvml.events += [(first, ALL_INSTANCES, 31), (first, ALL_INSTANCES, 79)]

    assert [gpu.xid for gpu in samples(nvml_reader)] == [79, 0]
    assert [gpu.xid for gpu in samples(nvml_reader)] == [79, 0]
    nvml.events += [(second, ALL_INSTANCES, 13)] * (EVENTS_MAX + 1)
    assert [gpu.xid for gpu in samples(nvml_reader)] == [79, 13]
    assert len(nvml.events) == 1


def test_an_xid_of_an_instance_spares_the_others() -> None:
    """One of the whole GPU is one of each instance."""
    gpu = h100()
    gpu.instances = [mig(9, "1g.10gb", 0.0, 0), mig(11, "1g.10gb", 0.0, 0)]
    nvml_reader, nvml = reader(gpu)
    nvml.events.append((gpu, 11, 31))
    assert [part.xid for part in samples(nvml_reader)] == [0, 31]
    nvml.events.append((gpu, ALL_INSTANCES, 79))
    assert [part.xid for part in samples(nvml_reader)] == [79, 79]


def test_a_lost_gpu_is_unknown() -> None:
    """From the start, and later, but for its last error; without any answer there is no page."""
    missing, lost = h100(0), h100(1)
    missing.answers["nvmlDeviceGetHandleByIndex"] = refused(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml_reader, nvml = reader(missing, lost)
    assert [gpu.gpu for gpu in samples(nvml_reader)] == ["1"]

    lost.answers.clear()
    lost.engine_percent = None
    assert nvml_reader.page({}) is None
    nvml.events.append((lost, ALL_INSTANCES, 79))
    (gpu,) = samples(nvml_reader)
    assert (gpu.xid, gpu.utilization_ratio, gpu.memory_used_bytes) == (79, None, None)
