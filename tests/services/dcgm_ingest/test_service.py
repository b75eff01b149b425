"""Exporter pages become samples and summaries; missing answers stay missing."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta

import pytest
from tests.support.stories import MINUTE, SECOND, T0, TimedFact, given, node, on_sale, planned, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, node_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.dcgm.exporter_pages import Page, parse_page
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled, GpuNodeSummarized
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.simcluster.exporter import Sickness, Telemetry
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG
from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest

URL = "http://{node_name}/metrics"


class Exporters:
    """Answers with the text that the test set for a URL; None without one."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.asked: list[str] = []

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Scrape as a scraper does."""
        self.asked += urls.values()
        return {name: parse_page(self.texts[url]) if url in self.texts else None for name, url in urls.items()}


class Bench:
    """A service that is ticked every second."""

    def __init__(self, *nodes: str, scrape_seconds: float = 10.0) -> None:
        self.view = StateView(given(*(node(name) for name in nodes)))
        self.exporters = Exporters()
        self.service = DcgmIngest(self.view, self.exporters, dcgm_url=URL, scrape_seconds=scrape_seconds)
        self.facts: list[Fact] = []

    async def run(self, start: datetime, seconds: int) -> None:
        """Tick every second."""
        for second in range(seconds):
            self.facts += (await self.service.on_tick(start + second * SECOND)).facts

    def set_page(self, name: str, percent: float) -> None:
        """Set the utilization that the node's exporter shows."""
        self.exporters.texts[f"http://{name}/metrics"] = (
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="GPU-{name}",modelName="Tesla T4"}} {percent}\n'
        )

    @property
    def samples(self) -> list[GpuNodeSampled]:
        """The published samples."""
        return [fact for fact in self.facts if isinstance(fact, GpuNodeSampled)]

    @property
    def minutes(self) -> list[GpuNodeSummarized]:
        """The published summaries."""
        return [fact for fact in self.facts if isinstance(fact, GpuNodeSummarized)]


async def test_nodes_are_scraped_every_ten_seconds() -> None:
    """One sample per node and scrape, on the node's own subject."""
    bench = Bench("n1", "n2")
    bench.set_page("n1", 50)
    bench.set_page("n2", 60)
    await bench.run(T0, 25)
    assert [(fact.node_name, fact.sampled_at - T0) for fact in bench.samples] == [
        (name, timedelta(seconds=at)) for at in (0, 10, 20) for name in ("n1", "n2")
    ]
    assert bench.samples[0].subject() == "gpu.node_sampled.uid-n1"
    assert bench.samples[0].gpus[0].utilization_ratio == 0.5


async def test_tick_returns_time_of_next_scrape() -> None:
    """Or the end of the minute, whichever is first."""
    bench = Bench("n1", scrape_seconds=45.0)
    rests = [
        (await bench.service.on_tick(T0 + timedelta(seconds=at))).next_tick_seconds for at in (0.0, 45.0, 59.999, 60.0)
    ]
    assert rests == [45.0, 15.0, 0.01, 30.0]


async def test_scrape_interval_is_configurable() -> None:
    """Down to the tick itself."""
    bench = Bench("n1", scrape_seconds=1.0)
    bench.set_page("n1", 50)
    await bench.run(T0, 5)
    assert len(bench.samples) == 5


async def test_minute_is_summarised_once() -> None:
    """Minimum, mean and maximum of its scrapes, when it is over."""
    bench = Bench("n1")
    for percent in (10, 20, 30, 40, 50, 60):
        bench.set_page("n1", percent)
        await bench.run(T0 + timedelta(seconds=percent - 10), 10)
    assert bench.minutes == []
    await bench.run(T0 + MINUTE, 30)

    (minute,) = bench.minutes
    assert (minute.window_started_at, minute.window_seconds) == (T0, 60.0)
    assert (minute.scrapes_expected_count, minute.scrapes_answered_count) == (6, 6)
    (gpu,) = minute.gpus
    assert (gpu.utilization_ratio_min, gpu.utilization_ratio_mean, gpu.utilization_ratio_max) == (0.1, 0.35, 0.6)
    assert gpu.samples_count == 6


async def test_silent_exporter_is_no_idle_gpu() -> None:
    """No sample, and a summary without answers and GPUs."""
    bench = Bench("n1")
    await bench.run(T0, 65)
    assert bench.samples == []
    (minute,) = bench.minutes
    assert (minute.scrapes_expected_count, minute.scrapes_answered_count, minute.gpus) == (6, 0, ())


async def test_invalid_values_stay_unknown() -> None:
    """A sentinel value leaves minimum, mean and maximum unknown; the sample counts."""
    bench = Bench("n1")
    bench.set_page("n1", 4294967295)
    await bench.run(T0, 65)
    (gpu,) = bench.minutes[0].gpus
    assert (gpu.utilization_ratio_min, gpu.utilization_ratio_mean, gpu.utilization_ratio_max) == (None, None, None)
    assert gpu.samples_count == 6


async def test_partial_answers_are_counted() -> None:
    """Fewer answers than scrapes; the mean is that of the answers."""
    bench = Bench("n1")
    bench.set_page("n1", 80)
    await bench.run(T0, 30)
    bench.exporters.texts.clear()
    await bench.run(T0 + 30 * SECOND, 40)
    (minute,) = bench.minutes
    assert (minute.scrapes_expected_count, minute.scrapes_answered_count) == (6, 3)
    assert minute.gpus[0].utilization_ratio_mean == 0.8


async def test_nodes_without_exporter_are_not_scraped() -> None:
    """While a node boots or has no GPUs yet."""
    bench = Bench()
    bench.view = StateView(given(node("booting", is_ready=False), node("no-gpus-yet", gpus_allocatable=0)))
    bench.service = DcgmIngest(bench.view, bench.exporters, dcgm_url=URL)
    await bench.run(T0, 65)
    assert (bench.exporters.asked, bench.facts) == ([], [])


async def test_exporter_health_is_reported_with_each_scrape() -> None:
    """1 if all answered, 0 if one did not, NaN without exporters."""
    bench, values = Bench("n1"), list[float]()
    bench.service = DcgmIngest(bench.view, bench.exporters, dcgm_url=URL, on_up=values.append)
    bench.set_page("n1", 70)
    await bench.run(T0, 10)
    bench.exporters.texts.clear()
    await bench.run(T0 + 10 * SECOND, 10)
    bench.view.advance(given(), {})
    await bench.run(T0 + 20 * SECOND, 10)
    assert values[:2] == [1.0, 0.0]
    assert math.isnan(values[2])


async def test_last_minute_of_deleted_node_is_published() -> None:
    """Then nothing more."""
    bench = Bench("n1")
    bench.set_page("n1", 70)
    await bench.run(T0, 30)
    bench.view.advance(given(), {})
    await bench.run(T0 + 30 * SECOND, 120)
    assert [minute.scrapes_answered_count for minute in bench.minutes] == [3]


async def test_summary_has_one_name_across_restarts() -> None:
    """The same window published again is the same fact to the broker."""
    names = set()
    for _ in range(2):
        bench = Bench("n1")
        bench.set_page("n1", 70)
        await bench.run(T0 + 20 * SECOND, 50)
        names.add(bench.minutes[0].condition())
    assert len(names) == 1


@pytest.mark.parametrize("percent", [0, 100])
async def test_zero_and_full_utilization_are_values(percent: float) -> None:
    """A GPU that reports zero is idle."""
    bench = Bench("n1")
    bench.set_page("n1", percent)
    await bench.run(T0, 65)
    assert bench.minutes[0].gpus[0].utilization_ratio_mean == percent / 100


async def test_gpu_off_the_bus_is_shown_by_why() -> None:
    """From the exporter's page to the drain and its sentence, despite an application error in between."""
    bench = Bench("n1", "n2")
    pages = {name: Telemetry(name, INSTANCE_CATALOG[0]) for name in ("n1", "n2")}
    pages["n1"].sicken(0, Sickness(xid=79))
    for minutes in range(13):
        now = T0 + minutes * MINUTE
        if minutes == 6:
            pages["n1"].sicken(0, Sickness(xid=45))
        for name, exporter in pages.items():
            bench.exporters.texts[f"http://{name}/metrics"] = exporter.page((), now) or ""
        await bench.run(now, 60)
    ended = T0 + 13 * MINUTE
    telemetry = tuple(TimedFact(fact, ended) for fact in bench.facts)
    state = given(node("n1"), node("n2"), pod("a", on="n1"), telemetry, on_sale(), as_of=ended)
    made = plan(state, policy(), ended)
    after = given(
        node("n1"), node("n2"), pod("a", on="n1"), telemetry, on_sale(), planned(*made.decisions, at=ended), as_of=ended
    )

    assert check(made, state, policy()) == ()
    assert "Being removed: The node is unhealthy: GPU 0 reported XID 79" in node_line(
        "n1", StatusView.of(after, policy(), ended, made)
    )


async def test_xids_and_pod_of_a_gpu_are_published() -> None:
    """The pod of the whole minute, the last error, and all errors in between."""
    bench = Bench("n1")
    for second, xid in ((0, 0), (10, 13), (20, 31), (30, 0)):
        bench.exporters.texts["http://n1/metrics"] = (
            f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-n1",namespace="ml",pod="a"}} {xid}\n'
        )
        await bench.run(T0 + second * SECOND, 10)
    bench.exporters.texts.clear()
    await bench.run(T0 + MINUTE, 1)
    (gpu,) = bench.minutes[0].gpus

    assert (gpu.pod, gpu.xid_last, gpu.xids) == ("ml/a", 0, (13, 31))
    assert (gpu.is_row_remap_failed, gpu.ecc_double_bit_count) == (None, None)
