"""The demo as a user runs it: the scenario and a real trace, each with every promise kept."""

import os
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from tests.support.aws import moto_or_skip
from tests.support.gcp import discovery_or_skip

from gpu_autoscaler_services.demo.report import Report
from gpu_autoscaler_services.demo.run import DemoOptions, run_demo
from gpu_autoscaler_services.demo.story import JOBS_COUNT
from gpu_autoscaler_services.local.system import CloudName

TRACE = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces")) / "openb-gpu-2023"
PODS_COUNT = 500
SPEED = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.sweep  # `make demo` plays one of them
@pytest.mark.parametrize("cloud", get_args(CloudName))
async def test_the_scenario_keeps_every_promise(cloud: CloudName, tmp_path: Path) -> None:
    """Jobs run, a refusal is answered elsewhere, a notice is handled, the cluster ends empty, costs equal the bill."""
    if cloud == "aws":
        moto_or_skip()
    if cloud == "gcp":
        discovery_or_skip()
    lines: list[str] = []
    reports: list[Report] = []
    options = DemoOptions(folder=tmp_path / "demo", gateway_port=0, cloud=cloud)
    await run_demo(options, lines.append, on_report=reports.append)
    (report,) = reports
    assert report.broken_promises == ()
    assert (report.jobs_requested, report.jobs_finished) == (JOBS_COUNT, JOBS_COUNT)
    assert report.jobs_completed == JOBS_COUNT - 1, "one is cancelled"
    assert report.launches_refused >= 1
    assert report.notices_answered == report.notices_received == 1
    assert report.nodes_bought == report.nodes_removed
    assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd > 0
    research, product = report.teams
    assert (research.namespace, product.namespace) == ("team-research", "team-product")
    assert research.requests_refused == ("quota-exceeded", "right-missing")
    assert (product.jobs_preempted, product.jobs_completed) == (0, 3)
    if cloud == "sim":  # nodes of the emulated clouds may be ready so late that quota is free when its owner needs it
        assert (research.jobs_preempted, research.borrowed_gpu_count_max) == (2, 5)
        assert any("saved a checkpoint on request" in line for line in lines)
        assert any("(fair-share)" in line for line in lines), "what waits shows the recent use of its team"
    assert any("NOTICE" in line for line in lines)
    prefix = {"gcp": "gce://fake-project/"}.get(cloud, f"{cloud}:///")
    assert any(f"the cloud launched {prefix}" in line for line in lines)
    written = msgspec.json.decode((tmp_path / "demo" / "report.json").read_bytes(), type=Report)
    assert written == report


@pytest.mark.sweep
@pytest.mark.skipif(not TRACE.is_dir(), reason=f"openb trace: no folder {TRACE}; set GPU_AUTOSCALER_TRACES")
async def test_500_pods_of_a_real_trace_all_run(tmp_path: Path) -> None:
    """Every feasible pod from the end of the trace runs to completion, 600 times faster."""
    options = DemoOptions(
        folder=tmp_path / "demo", gateway_port=0, trace=f"openb:{TRACE}", pods=PODS_COUNT, speed=SPEED
    )
    reports: list[Report] = []
    await run_demo(options, lambda _: None, on_report=reports.append)
    (report,) = reports
    assert report.broken_promises == ()
    assert report.jobs_requested == report.jobs_finished == report.jobs_completed == PODS_COUNT
    assert 0 < report.gpu_hours_allocated < report.gpu_hours_bought
    assert report.queue_wait_seconds_p95 is not None
