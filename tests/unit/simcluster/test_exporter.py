"""Simulated DCGM metrics: format, values that follow the pods, faults."""

from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.kube_objects import pod
from tests.unit.simcluster.conftest import NOON

from gpu_autoscaler.dcgm.exporter_pages import parse_page
from gpu_autoscaler.simcluster.exporter import COUNTERS, Sickness, Telemetry
from gpu_autoscaler.simcluster.objects import Json
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG

KIND = next(kind for kind in INSTANCE_CATALOG if kind.name == "g4dn.12xlarge")


@pytest.fixture
def telemetry() -> Telemetry:
    """The exporter of a node with four GPUs."""
    return Telemetry("n1", KIND)


def running(name: str, gpus: int) -> Json:
    """A pod that runs on the node."""
    made = pod(name, gpus=gpus)
    made["metadata"] |= {"uid": f"uid-{name}", "namespace": "default"}
    return made | {"status": {"phase": "Running"}}


def page(telemetry: Telemetry, *pods: Json, after_seconds: float = 0) -> str:
    """The page that long after noon."""
    text = telemetry.page(pods, NOON + timedelta(seconds=after_seconds))
    assert text is not None
    return text


def busy(text: str) -> list[bool]:
    """Which GPUs of a page work."""
    return [(gpu.utilization_ratio or 0) > 0.5 for gpu in parse_page(text).gpus]


def test_a_page_has_prometheus_format(telemetry: Telemetry) -> None:
    """Every default counter and one more with its type, one line per GPU."""
    families = list(text_string_to_metric_families(page(telemetry)))
    assert len(families) == len(COUNTERS) == 26
    assert {len(family.samples) for family in families} == {4}
    types = {family.name: family.type for family in families}
    assert types["DCGM_FI_DEV_GPU_UTIL"] == "gauge"
    assert types["DCGM_FI_DEV_PCIE_REPLAY_COUNTER"] == "counter"


def test_idle_gpus_are_zero_and_have_no_pod(telemetry: Telemetry) -> None:
    """Zero is exported, with empty pod labels."""
    text = page(telemetry)
    assert 'container="",namespace="",pod=""' in text
    for gpu in parse_page(text).gpus:
        assert (gpu.utilization_ratio, gpu.memory_used_bytes, gpu.pod) == (0.0, 0, None)


def test_gpus_follow_their_pods(telemetry: Telemetry) -> None:
    """GPUs of a running pod are busy and have its labels; other pods do not change the assignment."""
    one, two = running("one", 1), running("two", 2)
    assert busy(page(telemetry, one)) == [True, False, False, False]
    gpus = parse_page(page(telemetry, two, one)).gpus
    assert [gpu.pod for gpu in gpus] == ["default/one", "default/two", "default/two", None]
    assert busy(page(telemetry, two)) == [False, True, True, False]
    assert all(0.85 <= (gpu.utilization_ratio or 0) <= 0.98 for gpu in gpus[:3])
    assert gpus[0].memory_used_bytes is not None
    assert gpus[0].memory_total_bytes == 16 * 2**30


def test_pages_are_reproducible(telemetry: Telemetry) -> None:
    """The same time gives the same page; a later time another."""
    one = running("one", 4)
    assert page(telemetry, one) == page(telemetry, one)
    assert page(telemetry, one) != page(telemetry, one, after_seconds=30)


def test_faults_are_as_configured(telemetry: Telemetry) -> None:
    """Silent, frozen, all zero, absurd; and normal afterwards."""
    one = running("one", 4)
    telemetry.break_with("silent")
    assert telemetry.page([one], NOON) is None
    telemetry.break_with("frozen")
    assert page(telemetry, one) == page(telemetry, after_seconds=600)
    telemetry.break_with("zero")
    assert busy(page(telemetry, one)) == [False] * 4
    telemetry.break_with("absurd")
    assert {gpu.utilization_ratio for gpu in parse_page(page(telemetry, one)).gpus} == {None}
    telemetry.break_with(None)
    assert busy(page(telemetry, one)) == [True] * 4


def test_an_unhealthy_gpu_reports_its_errors(telemetry: Telemetry) -> None:
    """XID, temperature and memory of one GPU, until it is healthy again."""
    telemetry.sicken(2, Sickness(xid=79, celsius=95.0, ecc_double_bit_count=1, is_row_remap_failed=True))
    gpus = parse_page(page(telemetry)).gpus
    telemetry.sicken(2, None)

    assert [gpu.xid for gpu in gpus] == [0, 0, 79, 0]
    assert (gpus[2].temperature_celsius, gpus[2].ecc_double_bit_count, gpus[2].is_row_remap_failed) == (95.0, 1, True)
    assert {gpu.xid for gpu in parse_page(page(telemetry)).gpus} == {0}
    with pytest.raises(IndexError, match="GPU 4: the node has 4"):
        telemetry.sicken(4, None)
