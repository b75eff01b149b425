"""DCGM pages become samples: units, sentinels, lies, broken lines, MIG, pods; a real page; one other parser's word."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_autoscaler.dcgm.exporter_pages import MEBIBYTE, parse_page
from gpu_autoscaler.events.gpu import GpuSample
from gpu_autoscaler.simcluster.exporter import Telemetry
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG

TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
LABELS = 'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA A100-SXM4-40GB",Hostname="n1"'


def lines(values: dict[str, object], labels: str = LABELS) -> str:
    """A page with these counters of one GPU."""
    return "".join(f"DCGM_FI_{name}{{{labels}}} {value}\n" for name, value in values.items())


def only(text: str) -> GpuSample:
    """The one GPU of a page."""
    (gpu,) = parse_page(text).gpus
    return gpu


def test_units_are_ours() -> None:
    """Percent becomes a ratio, MiB bytes, and memory is what is used, free and reserved together."""
    values = {
        "DEV_GPU_UTIL": 87,
        "DEV_FB_USED": 1000,
        "DEV_FB_FREE": 39000,
        "DEV_FB_RESERVED": 960,
        "DEV_GPU_TEMP": 61,
        "DEV_POWER_USAGE": "251.500000",
    }
    assert only(lines(values)) == GpuSample(
        gpu="0",
        gpu_uuid="GPU-1",
        gpu_model="A100",
        utilization_ratio=0.87,
        memory_used_bytes=1000 * MEBIBYTE,
        memory_total_bytes=40960 * MEBIBYTE,
        temperature_celsius=61.0,
        power_watts=251.5,
        pod=None,
    )


@pytest.mark.parametrize(
    "value", ["9223372036854775794", "140737488355328.0", "4294967295", "1000", "-1", "NaN", "+Inf", "9.22e18"]
)
def test_a_value_that_cannot_be_is_unknown(value: str) -> None:
    """Blank sentinels and absurd figures are dropped; they are neither zero nor a broken line."""
    page = parse_page(lines({"DEV_GPU_UTIL": value, "DEV_FB_USED": 5}))
    assert page.lines_broken_count == 0
    assert page.gpus[0].utilization_ratio is None
    assert page.gpus[0].memory_used_bytes == 5 * MEBIBYTE


def test_total_memory_is_unknown_without_its_parts() -> None:
    """Used alone says nothing about the total; a missing reserve does not hide it."""
    assert only(lines({"DEV_FB_USED": 5})).memory_total_bytes is None
    assert only(lines({"DEV_FB_USED": 5, "DEV_FB_FREE": 10})).memory_total_bytes == 15 * MEBIBYTE


@pytest.mark.parametrize(
    "broken",
    [
        "DCGM_FI_DEV_GPU_UTIL{" + LABELS + "}",
        "DCGM_FI_DEV_GPU_UTIL{" + LABELS,
        "DCGM_FI_DEV_GPU_UTIL{" + LABELS + "} ERROR - FAILED TO CONVERT TO STRING",
        'DCGM_FI_DEV_GPU_UTIL{device="nvidia0"} 5',
        "DCGM_FI_DEV_GPU_UTIL{} 5",
    ],
)
def test_a_broken_line_costs_itself_alone(broken: str) -> None:
    """It is counted; the lines around it are read."""
    page = parse_page(lines({"DEV_FB_USED": 5}) + broken + "\n" + lines({"DEV_GPU_TEMP": 40}))
    assert page.lines_broken_count == 1
    assert (page.gpus[0].memory_used_bytes, page.gpus[0].temperature_celsius) == (5 * MEBIBYTE, 40.0)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# HELP x y\n# TYPE x gauge\n", "<html>no exporter</html>", "go_info{} 1"]
)
def test_a_page_without_gpus_has_none(text: str) -> None:
    """Nothing there is no GPU, and no error."""
    assert parse_page(text).gpus == ()


def test_mig_instances_are_read_by_their_engines() -> None:
    """DCGM gives no utilization of a MIG instance: zero there would be a lie."""
    one = LABELS + ',GPU_I_PROFILE="1g.5gb",GPU_I_ID="7"'
    two = LABELS + ',GPU_I_PROFILE="1g.5gb",GPU_I_ID="8"'
    text = lines({"DEV_GPU_UTIL": 0, "PROF_GR_ENGINE_ACTIVE": 0.5}, one) + lines({"DEV_GPU_UTIL": 0}, two)
    assert [(gpu.gpu, gpu.utilization_ratio) for gpu in parse_page(text).gpus] == [("0:7", 0.5), ("0:8", None)]


def test_the_engine_counter_replaces_missing_utilization() -> None:
    """And only there: it has been seen at zero under full load."""
    assert only(lines({"PROF_GR_ENGINE_ACTIVE": 0.4})).utilization_ratio == 0.4
    assert only(lines({"PROF_GR_ENGINE_ACTIVE": 0, "DEV_GPU_UTIL": 90})).utilization_ratio == 0.9


@pytest.mark.parametrize(
    ("labels", "pod"),
    [
        (',container="main",namespace="team",pod="train-0"', "team/train-0"),
        (',exported_namespace="team",exported_pod="train-0",namespace="gpu-operator",pod="dcgm-x"', "team/train-0"),
        (',pod_namespace="team",pod_name="train-0"', "team/train-0"),
        (',container="",namespace="",pod=""', None),
        ("", None),
    ],
)
def test_the_pod_that_holds_the_gpu_is_named(labels: str, pod: str | None) -> None:
    """In each spelling that exporters use; an idle GPU belongs to nobody."""
    assert only(lines({"DEV_GPU_UTIL": 1}, LABELS + labels)).pod == pod


def test_label_values_may_hold_anything() -> None:
    """Braces, commas and escaped quotes in a label do not end it; a time stamp behind the value is no value."""
    odd = LABELS.replace("n1", 'a}b,c=\\"d\\"{')
    assert only(f"DCGM_FI_DEV_GPU_UTIL{{{odd}}} 50 1395066363000").utilization_ratio == 0.5


def test_a_real_page_is_read() -> None:
    """A captured page of a Tesla T4, in which two exports follow one another."""
    path = TRACES / "dcgm" / "datadog_t4_metrics.txt"
    if not path.exists():
        pytest.skip(f"NOT RUN: no captured page at {path}; set GPU_AUTOSCALER_TRACES to the folder of traces")
    page = parse_page(path.read_text())
    gpu = page.gpus[0]
    assert page.lines_broken_count == 0
    assert (gpu.gpu, gpu.gpu_model) == ("0", "T4")
    assert gpu.gpu_uuid == "GPU-20c56d28-0da5-6d26-a36a-e7af1ce2586e"
    assert (gpu.utilization_ratio, gpu.temperature_celsius, gpu.power_watts) == (0.0, 25.0, 8.969)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (0, 15109 * MEBIBYTE)


def test_values_are_those_that_prometheus_reads() -> None:
    """The reference parser agrees on every value that is used."""
    kind = next(kind for kind in INSTANCE_CATALOG if kind.name == "p4d.24xlarge")
    text = Telemetry("n1", kind).page([], datetime(2026, 11, 21, 12, tzinfo=UTC))
    assert text is not None
    reference: dict[tuple[str, str], float] = {
        (family.name, sample.labels["gpu"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for gpu in parse_page(text).gpus:
        read = {name: value for (name, index), value in reference.items() if index == gpu.gpu}
        assert gpu.temperature_celsius == read["DCGM_FI_DEV_GPU_TEMP"]
        assert gpu.power_watts == read["DCGM_FI_DEV_POWER_USAGE"]
        assert gpu.memory_used_bytes == read["DCGM_FI_DEV_FB_USED"] * MEBIBYTE
        assert gpu.memory_total_bytes == MEBIBYTE * (
            read["DCGM_FI_DEV_FB_USED"] + read["DCGM_FI_DEV_FB_FREE"] + read["DCGM_FI_DEV_FB_RESERVED"]
        )
        assert gpu.utilization_ratio == read["DCGM_FI_DEV_GPU_UTIL"] / 100
