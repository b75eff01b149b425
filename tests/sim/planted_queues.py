"""Bugs to plant in the order of queues that a test finds: runs last hours, and gangs starve over days."""

from collections.abc import Mapping

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_PROPERTIES = "tests/property/test_queues.py"
_SCHEDULE = "tests/unit/core/queueing/test_schedule_queues.py"

# By the test that finds it.
QUEUES: Mapping[str, Planted] = {
    f"{_PROPERTIES}::test_waits_are_bounded_and_nodes_never_overcommitted[fcfs-best-effort]": Planted(
        "small jobs pass a reservation whatever their time limit",
        2,
        f"{_CORE}/queueing/schedule.py",
        "        if self._reservation is not None and not self._reservation.is_over_before(item, self._as_of):\n",
        "        if self._reservation is not None and item.work_seconds_max is None:\n",
    ),
    f"{_PROPERTIES}::test_a_reservation_is_never_delayed": Planted(
        "a job that waited long is no longer ahead of others",
        2,
        f"{_CORE}/demand/queue_order.py",
        "    return sorted(overdue, key=lambda job: (job.since, job.job_id))\n",
        "    return sorted(overdue, key=lambda job: (-job.spec.priority, job.since, job.job_id))\n",
    ),
    f"{_SCHEDULE}::test_capacity_of_jobs_that_have_just_started_counts": Planted(
        "jobs that have just started give nothing back",
        2,
        f"{_CORE}/queueing/schedule.py",
        "        if item.job_id is not None and at is not None:\n",
        "        if item.job_id is None and at is not None:\n",
    ),
    f"{_PROPERTIES}::test_strict_order_is_the_order_of_submission": Planted(
        "jobs of a strict queue pass one that does not fit",
        2,
        f"{_CORE}/queueing/schedule.py",
        "                    self._strict_heads.setdefault(item.strict_queue, item.job_id)\n",
        "                    self._strict_heads.pop(item.strict_queue, None)\n",
        also=(
            (
                f"{_CORE}/queueing/schedule.py",
                "            heads.setdefault(queue.name, job_id)\n",
                "            heads.pop(queue.name, None)\n",
            ),
        ),
    ),
    f"{_PROPERTIES}::test_below_average_use_goes_first": Planted(
        "fair share forgets the GPU time of attempts that ended",
        2,
        f"{_CORE}/demand/fair_share.py",
        "        return self._ended[owner] + self._running.get(owner, 0)\n",
        "        return self._running.get(owner, 0)\n",
    ),
    f"{_PROPERTIES}::test_gpu_time_decays_by_half_per_half_life": Planted(
        "GPU time never decays",
        2,
        f"{_CORE}/state/usage_history.py",
        "    whole = WHOLE >> int(halvings)\n",
        "    whole, rest = WHOLE, 0 * halvings\n",
    ),
    f"{_PROPERTIES}::test_a_burst_does_not_delay_others_by_more_than_its_starts": Planted(
        "a burst of one project goes before all others",
        2,
        f"{_CORE}/demand/fair_share.py",
        "(used + entries[taken].assumed, entries",
        "(used, entries",
    ),
}
