"""Job budgets: spend with unbilled time, and budgets that are too small."""

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
    """A job on a node of 8 GPUs and 10 USD per hour, since T0."""
    limit = round(budget_usd * USD)
    return (
        *ledger(),
        *node("n"),
        *instance(purchase("buy-n")),
        *job("train", gpus=gpus, placed_on=("n",), is_running=True, budget_limit_micro_usd=limit),
        *pod("train-0", on="n", gpus=gpus, job_id="train", owner_kind="Job", at=T0),
    )


def spend_after(state: ClusterState, after: timedelta) -> JobSpend:
    """The spend of the only job this long after T0."""
    (result,) = job_spends(state, T0 + after)
    return result


def test_unbilled_time_is_spent() -> None:
    """Ten minutes of a whole node, to the end of the half minute."""
    result = spend_after(given(running(5.0)), 10 * MINUTE)

    assert 10 * USD * 10 / 60 <= result.spent_micro_usd <= 10 * USD * 10.6 / 60
    assert not result.is_nearly_spent


def test_charges_count_once() -> None:
    """The ledger charged the first hour."""
    paid = charged("n", to_at=T0 + HOUR, total_usd=4.0, job_id="train")
    result = spend_after(given(running(50.0), paid), HOUR + 6 * MINUTE)

    assert 5 * USD <= result.spent_micro_usd <= 5.1 * USD


def test_a_job_pays_for_its_gpus() -> None:
    """Two of eight are a quarter of the price."""
    result = spend_after(given(running(50.0, gpus=2)), HOUR)

    assert 2.5 * USD <= result.spent_micro_usd <= 2.53 * USD


def test_a_budget_is_nearly_exhausted_before_it_is_exhausted() -> None:
    """Time to save a checkpoint before the job ends."""
    state = given(running(5.0))

    assert spend_after(state, 30 * MINUTE - timedelta(seconds=CHECKPOINT_SECONDS)).is_nearly_spent
    assert not spend_after(state, 30 * MINUTE - timedelta(seconds=CHECKPOINT_SECONDS)).is_spent
    assert spend_after(state, 30 * MINUTE).is_spent


def test_jobs_without_a_budget_have_no_spend() -> None:
    """Nor finished jobs."""
    assert job_spends(given(job("train")), T0) == ()


def spec(state: ClusterState) -> JobSpec:
    """The spec of the only job."""
    queued = state.jobs[JobId("train")].queued
    assert queued is not None
    return queued.spec


@pytest.mark.parametrize(("usd", "is_enough"), [(0.17, True), (0.16, False)])
def test_an_insufficient_budget_is_rejected(usd: float, *, is_enough: bool) -> None:
    """It must pay for one minute at the lowest price."""
    expensive = offer(zone="zone-b", usd_per_hour=30.0)
    state = given(on_sale(expensive, offer()), job("train", budget_limit_micro_usd=round(usd * USD)))
    violation = budget_violation(spec(state), state)

    assert (violation is None) == is_enough
    assert violation is None or violation.field == "budget_limit_usd"


def test_without_prices_no_budget_is_rejected() -> None:
    """Unknown is not too expensive."""
    state = given(job("train", budget_limit_micro_usd=1))

    assert budget_violation(spec(state), state) is None


def test_an_unknown_price_is_not_zero() -> None:
    """Its cost is not counted, and the offer is named."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    limited = job("train", placed_on=("n",), is_running=True, budget_limit_micro_usd=USD)
    member = pod("train-0", on="n", gpus=8, job_id="train", owner_kind="Job", at=T0)
    result = spend_after(given(ledger(), node("n", unknown), limited, member), HOUR)

    assert result.spent_micro_usd == 0
    assert result.unpriced == (unknown.key,)
    assert spend_after(given(running(5.0)), HOUR).unpriced == ()


def test_a_job_with_a_budget_avoids_unknown_prices() -> None:
    """It is deferred with the offer, uses nodes of known price, and leaves the capacity to others."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    alone = given(node("n", unknown), job("train", budget_limit_micro_usd=USD))
    beside = given(node("n", unknown), node("p"), instance(purchase("buy-p")), job("train", budget_limit_micro_usd=USD))
    other = given(node("n", unknown), job("train", budget_limit_micro_usd=USD), job("free"))

    assert [held.reason for held in schedule(alone, policy(), T0).deferred] == [PriceUnknown(offers=(unknown.key,))]
    assert [each.node_names for each in schedule(beside, policy(), T0).placements] == [("p",)]
    assert [each.job_id for each in schedule(other, policy(), T0).placements] == ["free"]


def test_nodes_of_others_do_not_count_for_job_budgets() -> None:
    """They are not billed: the job is placed there, and nothing else is bought."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    state = given(node("own", unknown, is_ours=False), job("train", budget_limit_micro_usd=USD))
    limited = job("train", placed_on=("own",), is_running=True, budget_limit_micro_usd=USD)
    member = pod("train-0", on="own", gpus=8, job_id="train", owner_kind="Job", at=T0)

    assert [each.node_names for each in schedule(state, policy(), T0).placements] == [("own",)]
    assert spend_after(given(ledger(), node("own", unknown, is_ours=False), limited, member), HOUR).unpriced == ()
