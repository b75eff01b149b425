"""States of all jobs at once equal those of each job."""

from tests.support.stories import T0, bought, given, job, node, purchase

from gpu_autoscaler.core.state.queries import job_state, job_states
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.model.reasons.buy import UnmetDemand


def test_all_job_states_equal_each_job_state() -> None:
    """Queued, provisioning, placed and running jobs."""
    for_coming = UnmetDemand(demand=("job/coming", "job/runs"), offers_considered=1, price_micro_usd_per_hour=1)
    state = given(
        node("n1"),
        job("waits"),
        job("coming"),
        job("placed", placed_on=("n1",)),
        job("runs", placed_on=("n1",), is_running=True),
        bought(purchase("order", reason=for_coming)),
        as_of=T0,
    )

    states = job_states(state)

    assert states == {job_id: job_state(state, job_id) for job_id in state.jobs}
    assert set(states.values()) == {JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING}
