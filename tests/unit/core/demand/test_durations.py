"""Predicted run times: from the request, from similar jobs, as work outlives them, and silenced when wrong."""

import math
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from tests.support.stories import EPOCH, MINUTE, T0, Story, TimedFact, given, job, request

from gpu_autoscaler.core.demand import durations
from gpu_autoscaler.core.demand.durations import Duration, Durations
from gpu_autoscaler.core.queueing.estimates import likely_seconds
from gpu_autoscaler.core.state import duration_history
from gpu_autoscaler.core.state.duration_history import LogQuantiles, group_keys, shrunk
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPreempted, JobStarted
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec

LIMIT_SECONDS = 48 * 3600.0


def completed(name: str, seconds: float, outcome: Literal["completed", "failed"] = "completed", **fields: Any) -> Story:  # noqa: ANN401 - fields of JobSpec
    """A job that ran for so long."""
    end = T0 + timedelta(seconds=seconds)
    fields = {"duration_seconds_max": LIMIT_SECONDS, **fields}
    started = JobStarted(epoch=EPOCH, version=1, job_id=JobId(name), kube_job=f"jobs/{name}", started_at=T0)
    finished = JobFinished(job_id=JobId(name), outcome=outcome, finished_at=end)
    return (*job(name, **fields), TimedFact(started, T0), TimedFact(finished, end))


def spec_of(state: ClusterState, name: str = "new") -> JobSpec:
    """The specification of a job of the state."""
    queued = state.jobs[JobId(name)].queued
    assert queued is not None
    return queued.spec


def predicted(*stories: Story, elapsed: timedelta = timedelta(0), **fields: Any) -> Duration | None:  # noqa: ANN401 - fields of JobSpec
    """What is left of job `new` after the stories, once it has run for so long."""
    state = given(*stories, job("new", **{"duration_seconds_max": LIMIT_SECONDS, **fields}))
    return Durations(state).remaining(spec_of(state), elapsed.total_seconds())


def medians(*stories: Story, **fields: Any) -> float:  # noqa: ANN401 - fields of JobSpec
    """The median of job `new`."""
    known = predicted(*stories, **fields)
    assert known is not None
    return known.median_seconds


def test_without_a_job_of_the_project_nothing_is_known() -> None:
    """Other projects say nothing, failed jobs neither; unknown is not short."""
    assert predicted() is None
    assert predicted(completed("a", 600.0, project_id="other")) is None
    assert predicted(completed("a", 600.0, outcome="failed")) is None


def test_the_request_counts_first_and_is_corrected_by_how_requests_came_true() -> None:
    """Alone within a factor of two; ten jobs of the project that took half as long correct it."""
    alone = predicted(completed("a", 60.0), expected_duration_seconds=3600.0)
    assert alone is not None
    assert (alone.source, alone.samples_count) == ("request", 0)
    assert (alone.low_seconds, alone.median_seconds, alone.high_seconds) == pytest.approx((1800, 3600, 7200))
    before = [completed(f"a-{number}", 1800.0, expected_duration_seconds=3600.0) for number in range(10)]
    assert medians(*before, expected_duration_seconds=36_000.0) == pytest.approx(18_000, rel=0.03)


def test_similar_jobs_count_more_the_more_there_are() -> None:
    """One job of the name moves the prediction of its project a little, many move it to theirs."""
    others = [completed(f"other{number}", 3600.0, job_name="eval", image="e:1") for number in range(8)]
    own = [completed(f"own{number}", 600.0, job_name=f"train-{number}", image="t:1") for number in range(8)]
    figures = [medians(*others, *own[:count], job_name="train-99", image="t:1") for count in (0, 1, 3, 8)]
    assert figures[0] == pytest.approx(3600)
    assert figures == sorted(figures, reverse=True)
    assert figures[-1] == pytest.approx(600, rel=0.05)


def test_work_that_outlives_its_prediction_is_predicted_again() -> None:
    """What is left never falls below zero, the expected end moves on; far beyond it is unknown."""
    history = [completed(f"a{number}", 3600.0 * (0.5 + number / 8)) for number in range(9)]
    ends: list[float] = []
    for hours in (0.0, 0.5, 1.0, 1.5):
        left = predicted(*history, elapsed=timedelta(hours=hours))
        assert left is not None
        assert 0 <= left.low_seconds <= left.median_seconds <= left.high_seconds
        ends.append(hours * 3600 + left.median_seconds)
    assert ends == sorted(ends)
    assert predicted(*history, elapsed=timedelta(hours=40)) is None


def test_wrong_predictions_are_silenced_and_return_when_right_again() -> None:
    """Run times that jump by a factor of 100 silence the project; the request of a job still counts."""
    wild = [completed(f"w{number}", 36.0 if number % 2 else 36_000.0) for number in range(10)]
    assert predicted(*wild) is None
    assert medians(*wild, expected_duration_seconds=600.0) == pytest.approx(600)
    calm = [completed(f"c{number}", 600.0) for number in range(duration_history.SAMPLES_COUNT_MAX)]
    assert medians(*wild, *calm) == pytest.approx(600, rel=0.05)


def test_a_part_of_a_run_is_no_run_time() -> None:
    """A job that went on from its checkpoint is not counted; one that started over is."""
    lost = (TimedFact(JobPreempted(job_id=JobId("a"), attempt=1, cause="spot", preempted_at=T0 - MINUTE), T0),)
    saves = {labels.CHECKPOINTED_AT: ""}
    assert predicted(lost, completed("a", 600.0, pod_annotations=saves)) is None
    assert medians(lost, completed("a", 600.0)) == pytest.approx(600)


def test_the_order_of_start_and_end_does_not_matter() -> None:
    """Both come from watchers; a repeat is counted once."""
    story = completed("a", 600.0)
    turned = (*story[:-2], story[-1], story[-2], story[-1])
    assert given(story).durations == given(turned).durations != {}


def test_the_table_has_a_limit_and_keeps_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group whose last job completed first goes, the most specific one of its instant before its parents."""
    monkeypatch.setattr(duration_history, "GROUPS_COUNT_MAX", 12)
    state = given(*(completed(f"a{number}", 60.0 + number, project_id=f"p{number}") for number in range(20)))
    assert len(state.durations) == 12
    assert all(key.rpartition(" ")[0] in state.durations for key in state.durations if key != "all")
    assert "all p19" in state.durations
    assert "all p0" not in state.durations


SAMPLES = st.lists(st.floats(1.0, 1e6), min_size=0, max_size=40)


@drawn(st.lists(SAMPLES, min_size=1, max_size=5), st.floats(1.0, 1e6))
def test_shrunk_quantiles_lie_between_all_samples_and_the_parent(groups: list[list[float]], center: float) -> None:
    """They are ordered, whatever the samples; an empty group changes nothing."""
    middle = math.log(center)
    parent = LogQuantiles(middle - 1, middle, middle + 1, 0)
    result = shrunk(groups, parent)
    logs = [math.log(sample) for group in groups for sample in group]
    assert min([parent.low, *logs]) - 1e-9 <= result.low <= result.median + 1e-9
    assert result.median <= result.high + 1e-9 <= max([parent.high, *logs]) + 2e-9
    assert shrunk([*groups, []], parent) == result


@drawn(st.lists(st.floats(1.0, 4e6), max_size=60), st.none() | st.floats(1.0, LIMIT_SECONDS), st.floats(0.0, 3e5))
def test_no_prediction_leaves_its_limits(runs: list[float], expected: float | None, elapsed: float) -> None:
    """Never below zero, never beyond the time limit, ordered; groups keep their last samples only."""
    state = given(*(completed(f"a-{number}", seconds) for number, seconds in enumerate(runs)), job(
        "new", duration_seconds_max=LIMIT_SECONDS, expected_duration_seconds=expected))  # fmt: skip
    left = Durations(state).remaining(spec_of(state), elapsed)
    if left is not None:
        assert 0 <= left.low_seconds <= left.median_seconds + 1e-6 <= left.high_seconds + 2e-6
        assert left.high_seconds <= LIMIT_SECONDS - elapsed
    assert 0 < likely_seconds(spec_of(state), state) <= LIMIT_SECONDS
    for group in state.durations.values():
        assert max(map(len, (group.run_seconds, group.log_errors))) <= duration_history.SAMPLES_COUNT_MAX


def test_groups_go_from_the_project_to_the_name_without_numbers() -> None:
    """Sizes are powers of two; a long image is a digest; every key begins with that of its parent."""
    state = given(job("new", job_name="train-17", gpus=6, members=2, image="r/" + "x" * 100))
    keys = group_keys(spec_of(state))
    assert keys[0] == "all"
    assert keys[-1].endswith(" 16xany train#")
    assert all(child.startswith(f"{parent} ") for parent, child in pairwise(keys))
    assert max(map(len, keys)) < 300
    assert request().expected_duration_seconds is None
    assert durations.ERRORS_COUNT_MIN <= duration_history.SAMPLES_COUNT_MAX
