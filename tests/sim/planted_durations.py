"""Bugs to plant in predicted run times that a test finds: no decision of a simulated world goes by a prediction."""

from collections.abc import Mapping

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_DURATIONS = f"{_CORE}/demand/durations.py"
_HISTORY = f"{_CORE}/state/duration_history.py"
_TEST = "tests/unit/core/demand/test_durations.py"

# By the test that finds it.
DURATIONS: Mapping[str, Planted] = {
    f"{_TEST}::test_without_a_job_of_the_project_nothing_is_known": Planted(
        "a failed job counts as a short one",
        2,
        _HISTORY,
        'finished is None or finished.outcome != "completed":\n',
        "finished is None:\n",
    ),
    f"{_TEST}::test_the_request_counts_first_and_is_corrected_by_how_requests_came_true": Planted(
        "requests are believed however they came true",
        2,
        _DURATIONS,
        "(log_seconds + ratio for ratio in ratios[:3])",
        "(log_seconds + ratio for ratio in _REQUESTED[:3])",
    ),
    f"{_TEST}::test_similar_jobs_count_more_the_more_there_are": Planted(
        "many similar jobs count as little as one",
        2,
        _HISTORY,
        "        weight = len(logs) / (len(logs) + SHRINK_SAMPLES_COUNT)\n",
        "        weight = 1 / (1 + SHRINK_SAMPLES_COUNT)\n",
    ),
    f"{_TEST}::test_work_that_outlives_its_prediction_is_predicted_again": Planted(
        "work that has outlived its prediction by far is still predicted",
        2,
        _DURATIONS,
        "    if gone > OUTLIVED_RATIO:\n        return None\n",
        "",
    ),
    f"{_TEST}::test_wrong_predictions_are_silenced_and_return_when_right_again": Planted(
        "wrong predictions are never silenced",
        2,
        _DURATIONS,
        "len(errors) >= ERRORS_COUNT_MIN and median(errors)",
        "not errors and median(errors or (0.0,))",
    ),
    f"{_TEST}::test_a_part_of_a_run_is_no_run_time": Planted(
        "a run that went on from a checkpoint counts as a whole one",
        2,
        _HISTORY,
        "if job.preempted is not None and labels.CHECKPOINTED_AT in queued.spec.pod_annotations:",
        "if job.preempted is None and labels.CHECKPOINTED_AT in queued.spec.pod_annotations:",
    ),
    f"{_TEST}::test_the_order_of_start_and_end_does_not_matter": Planted(
        "a job whose start is reported after its end is not learned from",
        2,
        f"{_CORE}/intake/fold.py",
        "            fold_duration(self._batch, before, after)\n        if isinstance(fact, job.JobFinished):\n",
        "        if isinstance(fact, job.JobFinished):\n            fold_duration(self._batch, before, after)\n",
    ),
    f"{_TEST}::test_the_table_has_a_limit_and_keeps_parents": Planted(
        "groups of similar jobs are kept without their parents",
        2,
        _HISTORY,
        "(table.now[key].last_at, -len(key), key)",
        "(table.now[key].last_at, len(key), key)",
    ),
    f"{_TEST}::test_no_prediction_leaves_its_limits": Planted(
        "a prediction exceeds the time limit of its job",
        2,
        _DURATIONS,
        "(min(float(round(seconds)), limit_seconds) for seconds in left)",
        "(float(round(seconds)) for seconds in left)",
    ),
}
