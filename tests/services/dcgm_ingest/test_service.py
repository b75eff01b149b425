"""Pages become samples and minutes; silence is told as silence."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta

import pytest
from tests.support.stories import MINUTE, SECOND, T0, Told, given, node, on_sale, planned, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, node_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.dcgm.parse import Page, parse_page
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled, GpuNodeSummarised
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.simcluster.exporter import Sickness, Telemetry
from gpu_autoscaler.simcluster.offers import CATALOGUE
from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest

URL = "http://{node_name}/metrics"


class Exporters:
    """Answers by the text that the test gave each URL; None for one that has none."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.asked: list[str] = []

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """As a scraper does."""
        self.asked += urls.values()
        return {name: parse_page(self.texts[url]) if url in self.texts else None for name, url in urls.items()}


class Story:
    """A service that is ticked second by second."""

    def __init__(self, *nodes: str, scrape_seconds: float = 10.0) -> None:
        self.view = StateView(given(*(node(name) for name in nodes)))
        self.exporters = Exporters()
        self.service = DcgmIngest(self.view, self.exporters, dcgm_url=URL, scrape_seconds=scrape_seconds)
        self.facts: list[Fact] = []

    async def run(self, start: datetime, seconds: int) -> None:
        """Tick every second."""
        for second in range(seconds):
            self.facts += (await self.service.on_tick(start + second * SECOND)).facts

    def says(self, name: str, percent: float) -> None:
        """The node's exporter shows this utilisation from now on."""
        self.exporters.texts[f"http://{name}/metrics"] = (
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="GPU-{name}",modelName="Tesla T4"}} {percent}\n'
        )

    @property
    def samples(self) -> list[GpuNodeSampled]:
        """What was sampled."""
        return [fact for fact in self.facts if isinstance(fact, GpuNodeSampled)]

    @property
    def minutes(self) -> list[GpuNodeSummarised]:
        """What was summarised."""
        return [fact for fact in self.facts if isinstance(fact, GpuNodeSummarised)]


async def test_each_node_is_read_every_ten_seconds() -> None:
    """One sample a node and scrape, under the node's own subject."""
    story = Story("n1", "n2")
    story.says("n1", 50)
    story.says("n2", 60)
    await story.run(T0, 25)
    assert [(fact.node_name, fact.sampled_at - T0) for fact in story.samples] == [
        (name, timedelta(seconds=at)) for at in (0, 10, 20) for name in ("n1", "n2")
    ]
    assert story.samples[0].subject() == "gpu.node_sampled.uid-n1"
    assert story.samples[0].gpus[0].utilization_ratio == 0.5


async def test_nothing_is_to_be_done_between_two_scrapes() -> None:
    """A tick says when the next one is due: at the next scrape, or when the minute is over, whichever comes first."""
    story = Story("n1", scrape_seconds=45.0)
    rests = [
        (await story.service.on_tick(T0 + timedelta(seconds=at))).next_tick_seconds for at in (0.0, 45.0, 59.999, 60.0)
    ]
    assert rests == [45.0, 15.0, 0.01, 30.0]


async def test_the_interval_is_a_setting() -> None:
    """Down to the tick itself."""
    story = Story("n1", scrape_seconds=1.0)
    story.says("n1", 50)
    await story.run(T0, 5)
    assert len(story.samples) == 5


async def test_a_minute_is_summarised_once() -> None:
    """Minimum, mean and maximum of its scrapes, when it is over."""
    story = Story("n1")
    for percent in (10, 20, 30, 40, 50, 60):
        story.says("n1", percent)
        await story.run(T0 + timedelta(seconds=percent - 10), 10)
    assert story.minutes == []
    await story.run(T0 + MINUTE, 30)

    (minute,) = story.minutes
    assert (minute.window_started_at, minute.window_seconds) == (T0, 60.0)
    assert (minute.scrapes_expected_count, minute.scrapes_answered_count) == (6, 6)
    (gpu,) = minute.gpus
    assert (gpu.utilization_ratio_min, gpu.utilization_ratio_mean, gpu.utilization_ratio_max) == (0.1, 0.35, 0.6)
    assert gpu.samples_count == 6


async def test_a_silent_exporter_is_not_an_idle_gpu() -> None:
    """No sample, and a minute without answers and without GPUs."""
    story = Story("n1")
    await story.run(T0, 65)
    assert story.samples == []
    (minute,) = story.minutes
    assert (minute.scrapes_expected_count, minute.scrapes_answered_count, minute.gpus) == (6, 0, ())


async def test_a_gpu_without_a_valid_value_has_none() -> None:
    """A sentinel leaves minimum, mean and maximum unknown; it was sampled all the same."""
    story = Story("n1")
    story.says("n1", 4294967295)
    await story.run(T0, 65)
    (gpu,) = story.minutes[0].gpus
    assert (gpu.utilization_ratio_min, gpu.utilization_ratio_mean, gpu.utilization_ratio_max) == (None, None, None)
    assert gpu.samples_count == 6


async def test_half_a_minute_of_silence_shows() -> None:
    """Fewer answers than scrapes; the mean is that of the answers."""
    story = Story("n1")
    story.says("n1", 80)
    await story.run(T0, 30)
    story.exporters.texts.clear()
    await story.run(T0 + 30 * SECOND, 40)
    (minute,) = story.minutes
    assert (minute.scrapes_expected_count, minute.scrapes_answered_count) == (6, 3)
    assert minute.gpus[0].utilization_ratio_mean == 0.8


async def test_nodes_without_an_exporter_are_not_asked() -> None:
    """While a node boots, or its GPUs are not there yet, silence is to be expected and means nothing."""
    story = Story()
    story.view = StateView(given(node("booting", is_ready=False), node("no-gpus-yet", gpus_allocatable=0)))
    story.service = DcgmIngest(story.view, story.exporters, dcgm_url=URL)
    await story.run(T0, 65)
    assert (story.exporters.asked, story.facts) == ([], [])


async def test_whether_exporters_answer_is_told_with_each_scrape() -> None:
    """1 where all did, 0 where one is silent, NaN where none is there to be asked."""
    story, told = Story("n1"), list[float]()
    story.service = DcgmIngest(story.view, story.exporters, dcgm_url=URL, on_up=told.append)
    story.says("n1", 70)
    await story.run(T0, 10)
    story.exporters.texts.clear()
    await story.run(T0 + 10 * SECOND, 10)
    story.view.advance(given(), {})
    await story.run(T0 + 20 * SECOND, 10)
    assert told[:2] == [1.0, 0.0]
    assert math.isnan(told[2])


async def test_a_node_that_goes_has_its_last_minute_told() -> None:
    """Then nothing more is said of it."""
    story = Story("n1")
    story.says("n1", 70)
    await story.run(T0, 30)
    story.view.advance(given(), {})
    await story.run(T0 + 30 * SECOND, 120)
    assert [minute.scrapes_answered_count for minute in story.minutes] == [3]


async def test_a_minute_has_one_name() -> None:
    """The same window told after a restart is the same fact to the broker."""
    names = set()
    for _ in range(2):
        story = Story("n1")
        story.says("n1", 70)
        await story.run(T0 + 20 * SECOND, 50)
        names.add(story.minutes[0].condition())
    assert len(names) == 1


@pytest.mark.parametrize("percent", [0, 100])
async def test_zero_and_full_are_values(percent: float) -> None:
    """An idle GPU that says so is idle."""
    story = Story("n1")
    story.says("n1", percent)
    await story.run(T0, 65)
    assert story.minutes[0].gpus[0].utilization_ratio_mean == percent / 100


async def test_a_gpu_that_falls_off_the_bus_is_told_by_why() -> None:
    """From the exporter's page to the drain and its sentence, with what an application did after it in between."""
    story = Story("n1", "n2")
    pages = {name: Telemetry(name, CATALOGUE[0]) for name in ("n1", "n2")}
    pages["n1"].sicken(0, Sickness(xid=79))
    for minutes in range(13):
        now = T0 + minutes * MINUTE
        if minutes == 6:
            pages["n1"].sicken(0, Sickness(xid=45))
        for name, exporter in pages.items():
            story.exporters.texts[f"http://{name}/metrics"] = exporter.page((), now) or ""
        await story.run(now, 60)
    ended = T0 + 13 * MINUTE
    told = tuple(Told(fact, ended) for fact in story.facts)
    state = given(node("n1"), node("n2"), pod("a", on="n1"), told, on_sale(), as_of=ended)
    made = plan(state, policy(), ended)
    after = given(
        node("n1"), node("n2"), pod("a", on="n1"), told, on_sale(), planned(*made.decisions, at=ended), as_of=ended
    )

    assert check(made, state, policy()) == ()
    assert "It leaves: It is sick: GPU 0 reported XID 79" in node_line("n1", StatusView.of(after, policy(), ended, made))


async def test_application_errors_and_who_held_a_gpu_are_told() -> None:
    """The holder of the whole minute, the last error, and every error in between."""
    story = Story("n1")
    for second, xid in ((0, 0), (10, 13), (20, 31), (30, 0)):
        story.exporters.texts["http://n1/metrics"] = (
            f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-n1",namespace="ml",pod="a"}} {xid}\n'
        )
        await story.run(T0 + second * SECOND, 10)
    story.exporters.texts.clear()
    await story.run(T0 + MINUTE, 1)
    (gpu,) = story.minutes[0].gpus

    assert (gpu.pod, gpu.xid_last, gpu.xids) == ("ml/a", 0, (13, 31))
    assert (gpu.is_row_remap_failed, gpu.ecc_double_bit_count) == (None, None)
