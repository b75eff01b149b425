"""Interruption history of spot capacity pools, and its decay."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.stories import (
    HOUR,
    T0,
    Story,
    TimedFact,
    bought,
    drained,
    given,
    instance,
    node,
    notice,
    offer,
    purchase,
)

from gpu_autoscaler.core.state.interruption_history import is_reclaimed, rate_of, terminations_by_pool
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType

SPOT = offer(capacity_type=CapacityType.SPOT)


def terminated(name: str, at: datetime = T0, *, by_cloud: bool = True) -> Story:
    """A terminated spot instance."""
    (event,) = instance(purchase(f"buy-{name}", SPOT), state="terminated", at=at)
    assert isinstance(event.fact, NodeInstanceObserved)
    return (TimedFact(msgspec.structs.replace(event.fact, terminated_at=at, is_reclaimed=by_cloud), at),)


def rate(*stories: Story, as_of: datetime = T0) -> float:
    """The interruption rate of the spot offer after these stories."""
    return rate_of(SPOT, terminations_by_pool(given(*stories, as_of=as_of), as_of))


def test_the_assumed_rate_is_one_in_twenty() -> None:
    """Unknown is not zero; other capacity types have rate 0."""
    assert rate() == pytest.approx(0.05)
    assert rate_of(offer(capacity_type=CapacityType.ON_DEMAND), terminations_by_pool(given(), T0)) == 0.0


def test_interruptions_raise_and_own_terminations_lower_the_rate() -> None:
    """Two interruptions of two are above a tenth; two of forty are not."""
    taken = [terminated(f"t{number}") for number in range(2)]
    ours = [terminated(f"o{number}", by_cloud=False) for number in range(38)]

    assert rate(*taken) == pytest.approx(3 / 22)
    assert rate(*taken, *ours) == pytest.approx(3 / 60)


def test_notices_raise_the_rate_at_once() -> None:
    """The plan that handles the notices uses the higher rate."""
    nodes = [node(f"n{number}", SPOT) for number in range(4)]
    notices = [notice(f"n{number}") for number in range(4)]

    assert rate(*nodes) == pytest.approx(1 / 24)
    assert rate(*nodes, *notices) == pytest.approx(5 / 24)


def test_interruptions_decay() -> None:
    """Half of the weight is gone after six hours, all of it after two days."""
    storm = [terminated(f"t{number}") for number in range(20)]
    later = rate(*storm, as_of=T0 + 6 * HOUR)
    sign_of_life = (TimedFact(NodeInstanceListed(provider_ids=(), listed_at=T0 + 49 * HOUR), T0 + 49 * HOUR),)

    assert rate(*storm) == pytest.approx(21 / 40)
    assert later == pytest.approx(11 / 30)
    assert given(*storm, sign_of_life, as_of=T0 + 49 * HOUR).spot_terminations == {}


def test_capacity_pools_are_independent() -> None:
    """Interruptions in one zone do not affect another."""
    state = given(*(terminated(f"t{number}") for number in range(20)))
    elsewhere = msgspec.structs.replace(SPOT, zone="sim-z")

    assert rate_of(elsewhere, terminations_by_pool(state, T0)) == pytest.approx(0.05)


def test_an_interruption_is_distinguished_from_an_own_termination() -> None:
    """An interruption: under an active notice, or without a decision of ours."""
    uid = ProviderId(f"sim:///{SPOT.zone}/buy-n1")
    (event,) = instance(purchase("buy-n1", SPOT))
    assert isinstance(event.fact, NodeInstanceObserved)
    uid = event.fact.provider_id

    assert is_reclaimed(given(node("n1", SPOT)), uid, "terminated")
    assert not is_reclaimed(given(node("n1", SPOT)), uid, "running")
    assert not is_reclaimed(given(node("n1", SPOT), drained("n1")), uid, "terminated")
    assert is_reclaimed(given(node("n1", SPOT), drained("n1"), notice("n1")), uid, "terminating")


def test_a_termination_counts_once() -> None:
    """Whatever the number of facts about it."""
    once = terminated("t")
    again = terminated("t", T0 + timedelta(minutes=1))

    assert (
        given(bought(purchase("buy-t", SPOT)), once, again).spot_terminations
        == given(bought(purchase("buy-t", SPOT)), once).spot_terminations
    )
