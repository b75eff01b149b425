"""A job's own budget: what it has spent with the time that is not charged yet, and whether it can be enough at all."""

from datetime import timedelta

import msgspec
import pytest
from tests.support.money import USD, charged, ledger
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.queueing.job_budgets import CHECKPOINT_SECONDS, JobSpend, budget_violation, job_spends
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.defer import PriceUnknown


def running(budget_usd: float, *, gpus: int = 8) -> Story:
    """A job on a node of 8 GPUs and 10 USD an hour, since T0."""
    limit = round(budget_usd * USD)
    return (
        *ledger(),
        *node("n"),
        *instance(purchase("buy-n")),
        *job("train", gpus=gpus, placed_on=("n",), is_running=True, budget_limit_micro_usd=limit),
        *pod("train-0", on="n", gpus=gpus, job_id="train", owner_kind="Job", at=T0),
    )


def outlay(state: ClusterState, after: timedelta) -> JobSpend:
    """What the one job has spent so long after T0."""
    (found,) = job_spends(state, T0 + after)
    return found


def test_time_that_is_not_charged_is_spent() -> None:
    """Ten minutes of a whole node, counted to the end of the half minute."""
    found = outlay(given(running(5.0)), 10 * MINUTE)

    assert 10 * USD * 10 / 60 <= found.spent_micro_usd <= 10 * USD * 10.6 / 60
    assert not found.is_nearly_spent


def test_what_is_charged_counts_once() -> None:
    """The ledger has the first hour, and says what the job's share was of it."""
    paid = charged("n", to_at=T0 + HOUR, total_usd=4.0, job_id="train")
    found = outlay(given(running(50.0), paid), HOUR + 6 * MINUTE)

    assert 5 * USD <= found.spent_micro_usd <= 5.1 * USD


def test_a_job_pays_for_the_gpus_that_it_holds() -> None:
    """Two of eight are a quarter of the price."""
    found = outlay(given(running(50.0, gpus=2)), HOUR)

    assert 2.5 * USD <= found.spent_micro_usd <= 2.53 * USD


def test_little_is_left_before_nothing_is() -> None:
    """It is told to save while there is time for that, and ends when its budget is spent."""
    state = given(running(5.0))

    assert outlay(state, 30 * MINUTE - timedelta(seconds=CHECKPOINT_SECONDS)).is_nearly_spent
    assert not outlay(state, 30 * MINUTE - timedelta(seconds=CHECKPOINT_SECONDS)).is_spent
    assert outlay(state, 30 * MINUTE).is_spent


def test_without_a_budget_nobody_looks() -> None:
    """Nor after the end."""
    assert job_spends(given(job("train")), T0) == ()


def spec(state: ClusterState) -> JobSpec:
    """Of the one job."""
    queued = state.jobs[JobId("train")].queued
    assert queued is not None
    return queued.spec


@pytest.mark.parametrize(
    ("run_seconds", "usd", "is_enough"),
    [(None, 0.17, True), (None, 0.16, False), (3600.0, 9.9, False), (3600.0, 10.0, True)],
)
def test_what_cannot_be_enough_is_refused(run_seconds: float | None, usd: float, *, is_enough: bool) -> None:
    """A minute on the cheapest that is for sale; the whole length, where that is known."""
    dear = offer(zone="zone-b", usd_per_hour=30.0)
    state = given(
        on_sale(dear, offer()), job("train", budget_limit_micro_usd=round(usd * USD), run_seconds=run_seconds)
    )
    mistake = budget_violation(spec(state), state)

    assert (mistake is None) == is_enough
    assert mistake is None or mistake.field == "budget_limit_usd"


def test_where_no_price_is_known_nothing_is_refused() -> None:
    """Not known is not too dear."""
    state = given(job("train", budget_limit_micro_usd=1))

    assert budget_violation(spec(state), state) is None


def test_a_price_that_nobody_knows_is_not_zero() -> None:
    """What is spent there is in no sum, and the offer is named."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    limited = job("train", placed_on=("n",), is_running=True, budget_limit_micro_usd=USD)
    member = pod("train-0", on="n", gpus=8, job_id="train", owner_kind="Job", at=T0)
    found = outlay(given(ledger(), node("n", unknown), limited, member), HOUR)

    assert found.spent_micro_usd == 0
    assert found.unpriced == (unknown.key,)
    assert outlay(given(running(5.0)), HOUR).unpriced == ()


def test_no_job_with_a_budget_is_placed_where_the_price_is_unknown() -> None:
    """It waits with the offer's name, goes where a price is known, and leaves the room to others."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    alone = given(node("n", unknown), job("train", budget_limit_micro_usd=USD))
    beside = given(node("n", unknown), node("p"), instance(purchase("buy-p")), job("train", budget_limit_micro_usd=USD))
    other = given(node("n", unknown), job("train", budget_limit_micro_usd=USD), job("free"))

    assert [held.reason for held in schedule(alone, policy(), T0).deferred] == [PriceUnknown(offers=(unknown.key,))]
    assert [each.node_names for each in schedule(beside, policy(), T0).placements] == [("p",)]
    assert [each.job_id for each in schedule(other, policy(), T0).placements] == ["free"]


def test_a_node_that_is_not_ours_costs_a_budget_nothing() -> None:
    """It is in no bill of ours: the job is placed there, and the plan that counts on its room buys nothing else."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    state = given(node("own", unknown, is_ours=False), job("train", budget_limit_micro_usd=USD))
    limited = job("train", placed_on=("own",), is_running=True, budget_limit_micro_usd=USD)
    member = pod("train-0", on="own", gpus=8, job_id="train", owner_kind="Job", at=T0)

    assert [each.node_names for each in schedule(state, policy(), T0).placements] == [("own",)]
    assert outlay(given(ledger(), node("own", unknown, is_ours=False), limited, member), HOUR).unpriced == ()
