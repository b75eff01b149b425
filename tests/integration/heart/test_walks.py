"""The stories of docs/architecture/walks.md with the real services: their facts come in the order of the page."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from tests.support.line import Line, running_line
from tests.support.stories import policy, request

from gpu_autoscaler.events.job import JobFinished, JobStarted
from gpu_autoscaler.events.node import NodeGone
from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeTerminated, ScalingPlanMade
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.model.reasons.drain import NodeIdle
from gpu_autoscaler_services.registry import specs

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs/architecture/walks.md"
POLICY = policy(idle_seconds_max=60.0, scale_down_cooldown_seconds=30.0, disruption_ratio_max=1.0)
WALKS = ("One job", "One notice", "One idle node")


def walk(title: str) -> list[tuple[str, list[str]]]:
    """Return the rows of a walk: fact, and the services that may publish it."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| `([a-z_.]+)` \| ([^|]+) \|", section)
    return [(fact, re.findall(r"`(\w+)`", services)) for fact, services in rows]


def first_missing(rows: Sequence[str], record: Iterable[str]) -> str | None:
    """Return the first row that the record lacks after all rows before it; None: the record has them in this order."""
    rest = iter(record)
    return next((row for row in rows if row not in rest), None)


async def assert_order(line: Line, title: str, since: FactId | None = None) -> None:
    """The facts of the walk were published in its order; `since`: the id of the fact before it."""
    record = sorted(await line.record(), key=lambda recorded: recorded.envelope.time)
    ids = [recorded.envelope.id for recorded in record]
    names = [recorded.fact.subject() for recorded in record[0 if since is None else ids.index(since) + 1 :]]
    rows = [fact for fact, _ in walk(title)]
    assert first_missing(rows, names) is None, f"{title}: not in this order: {rows}; recorded: {names}"


def idle_drains(plan: Plan) -> list[DrainNode]:
    """Return the drains of nodes that were idle."""
    drains = plan.drains
    return [drain for drain in drains if isinstance(drain.reason, NodeIdle)]


@pytest.mark.parametrize("title", WALKS)
def test_each_fact_of_a_walk_is_published_by_the_service_that_the_page_names(title: str) -> None:
    """As its declaration says."""
    published = {spec.name: {fact.subject_root() for fact in spec.service.publishes} for spec in specs()}
    rows = walk(title)
    assert len(rows) >= 6
    for fact, services in rows:
        assert services, fact
        assert [name for name in services if fact not in published[name]] == [], fact


def test_a_wrong_order_is_found() -> None:
    """The comparison can fail: for a fact that is missing, and for two that changed places."""
    rows = [fact for fact, _ in walk("One job")]
    assert first_missing(rows, ["pod.watched", *rows, "pod.gone"]) is None
    assert first_missing(rows, rows[:-1]) == "job.finished"
    assert first_missing(rows, [rows[1], rows[0], *rows[2:]]) == "job.queued"


async def test_a_job_and_then_its_idle_node_take_the_documented_steps(tmp_path: Path) -> None:
    """From the request to the end of the job, then until the node object is gone."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=60.0))
        await line.wait_for(JobStarted)
        (started,) = [one.envelope.id for one in await line.record() if isinstance(one.fact, JobStarted)]
        await line.wait_for(JobFinished)
        await assert_order(line, "One job")
        await line.wait_for(ScalingNodeTerminated)
        await line.wait_for(NodeGone)
        await assert_order(line, "One idle node", since=started)
        plans = [fact.plan for fact in await line.said(ScalingPlanMade)]
        first = next(number for number, plan in enumerate(plans) if idle_drains(plan))
        kept = [group.reason.tag() for plan in plans[:first] for group in plan.deferred_groups]
        assert "not_yet_idle" in kept
        assert idle_drains(plans[first])[0].is_voluntary


async def test_a_notice_takes_the_documented_steps(tmp_path: Path) -> None:
    """From the notice until the cloud has confirmed the end of the instance."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=None))
        await line.wait_for(JobStarted)
        (started,) = [one.envelope.id for one in await line.record() if isinstance(one.fact, JobStarted)]
        notice = await line.give_notice()
        await line.wait_for(ScalingDrainStarted, lambda fact: fact.node_name == notice.node_name)
        await line.wait_for(ScalingNodeTerminated, lambda fact: fact.provider_id == notice.provider_id)
        await assert_order(line, "One notice", since=started)
