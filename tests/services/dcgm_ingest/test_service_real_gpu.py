"""Pages of a real GPU, through the ingest: the figures are those of nvidia-smi, and idle and busy differ."""

import pytest
from tests.services.dcgm_ingest.test_service import Bench
from tests.support.gpu_pages import PAGE_SECONDS, PHASES, pages, smi_rows
from tests.support.stories import HOUR, MINUTE, SECOND, T0, TimedFact, given, job, node, pod, policy

from gpu_autoscaler.core.disruption.idle_jobs import idle_jobs
from gpu_autoscaler.core.policy.disruption_settings import IdleJobsPolicy
from gpu_autoscaler.dcgm.exporter_pages import MEBIBYTE, parse_page
from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSummary

NOW = T0 + HOUR  # a node is older than this before its telemetry counts


async def summarized(phase: str, labels: str = "") -> GpuNodeSummarized:
    """The summary of a phase's pages but the first, whose activity began before the phase.

    `labels` are added to those of the GPU, as where the kubelet answers.
    """
    bench = Bench("n1")
    for number, page in enumerate(pages(phase)[1:]):
        bench.exporters.texts["http://n1/metrics"] = page.replace('Hostname="gpu-node"', f'Hostname="gpu-node"{labels}')
        await bench.run(NOW - MINUTE + number * PAGE_SECONDS * SECOND, PAGE_SECONDS)
    await bench.run(NOW, 1)
    (minute,) = bench.minutes
    return minute


async def gpu_of(phase: str) -> GpuSummary:
    """The GPU's summary."""
    (gpu,) = (await summarized(phase)).gpus
    return gpu


@pytest.mark.parametrize("phase", PHASES)
def test_samples_agree_with_nvidia_smi(phase: str) -> None:
    """Memory to the MiB, power to a few percent; temperature to a degree, where it does not change within the load."""
    celsius = 10 if phase == "half" else 1
    for page, smi in zip(pages(phase), smi_rows(phase), strict=True):
        parsed = parse_page(page)
        (gpu,) = parsed.gpus
        assert parsed.lines_broken_count == 0
        assert (gpu.gpu_model, gpu.xid, gpu.is_row_remap_failed) == ("H200", 0, False)
        assert gpu.memory_total_bytes == smi["memory.total"] * MEBIBYTE
        assert gpu.memory_used_bytes == pytest.approx(smi["memory.used"] * MEBIBYTE, abs=MEBIBYTE)
        assert gpu.temperature_celsius == pytest.approx(smi["temperature.gpu"], abs=celsius)
        assert gpu.power_watts == pytest.approx(smi["power.draw"], rel=0.03)
        assert gpu.ecc_double_bit_count == smi["ecc.errors.uncorrected.volatile.total"]


@pytest.mark.parametrize("phase", PHASES)
async def test_summary_is_that_of_nvidia_smi(phase: str) -> None:
    """Of scrapes that were all answered."""
    minute, rows = await summarized(phase), smi_rows(phase)[1:]
    (gpu,) = minute.gpus
    watts = sum(row["power.draw"] for row in rows) / len(rows)

    assert (minute.scrapes_expected_count, minute.scrapes_answered_count, gpu.samples_count) == (5, 5, 5)
    assert gpu.power_watts_mean == pytest.approx(watts, rel=0.02)
    assert gpu.memory_used_bytes_max == pytest.approx(rows[0]["memory.used"] * MEBIBYTE, abs=MEBIBYTE)


async def test_idle_and_busy_differ() -> None:
    """A GPU that only holds memory is idle; one that computes half of the time is half busy, not less."""
    idle, load, half, memory = [await gpu_of(phase) for phase in PHASES]

    assert (idle.utilization_ratio_max, idle.memory_used_bytes_max) == (0.0, 0)
    assert load.utilization_ratio_mean == pytest.approx(1.0, abs=0.01)
    assert half.utilization_ratio_min == pytest.approx(0.524, abs=0.001)
    assert memory.utilization_ratio_mean is not None
    assert memory.utilization_ratio_mean < 0.001
    assert memory.memory_used_bytes_max == pytest.approx(64 * 2**30, rel=0.01)


@pytest.mark.parametrize(("phase", "are_idle"), [("memory", True), ("half", False), ("load", False)])
async def test_only_a_job_that_computes_nothing_is_idle(phase: str, *, are_idle: bool) -> None:
    """Where jobs that are idle for a minute are canceled."""
    minute = await summarized(phase, labels=',container="c",namespace="default",pod="a"')
    state = given(
        node("n1"), job("train", gpus=1, placed_on=("n1",), is_running=True),
        pod("a", on="n1", gpus=1, owner_kind="Job", job_id="train"), (TimedFact(minute, NOW),), as_of=NOW,
    )  # fmt: skip
    rules = policy(idle_jobs=IdleJobsPolicy(is_on=True, idle_seconds=60.0))

    assert [idle.job_id for idle in idle_jobs(state, rules, NOW)] == (["train"] if are_idle else [])
