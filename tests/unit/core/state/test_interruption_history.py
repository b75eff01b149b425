"""What is remembered of spot machines that the cloud took, and how it fades."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.stories import (
    HOUR,
    T0,
    Story,
    Told,
    bought,
    drained,
    given,
    instance,
    node,
    notice,
    offer,
    purchase,
)

from gpu_autoscaler.core.state.interruption_history import interruption_rate, is_taken
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType

SPOT = offer(capacity_type=CapacityType.SPOT)


def ended(name: str, at: datetime = T0, *, by_cloud: bool = True) -> Story:
    """A spot instance that ended."""
    (told,) = instance(purchase(f"buy-{name}", SPOT), state="terminated", at=at)
    assert isinstance(told.fact, NodeInstanceObserved)
    return (Told(msgspec.structs.replace(told.fact, terminated_at=at, is_taken=by_cloud), at),)


def rate(*stories: Story, as_of: datetime = T0) -> float:
    """The rate of the spot offer after these stories."""
    return interruption_rate(given(*stories, as_of=as_of), SPOT, as_of)


def test_nothing_known_is_one_in_twenty() -> None:
    """Unknown is not zero; what is not spot is not taken."""
    assert rate() == pytest.approx(0.05)
    assert interruption_rate(given(), offer(capacity_type=CapacityType.ON_DEMAND), T0) == 0.0


def test_what_the_cloud_takes_raises_the_rate_and_what_we_end_lowers_it() -> None:
    """Two taken of two are above a tenth; two of forty are not."""
    taken = [ended(f"t{number}") for number in range(2)]
    ours = [ended(f"o{number}", by_cloud=False) for number in range(38)]

    assert rate(*taken) == pytest.approx(3 / 22)
    assert rate(*taken, *ours) == pytest.approx(3 / 60)


def test_a_storm_counts_when_it_is_announced() -> None:
    """The plan that answers the notices knows already that this zone is being taken."""
    nodes = [node(f"n{number}", SPOT) for number in range(4)]
    notices = [notice(f"n{number}") for number in range(4)]

    assert rate(*nodes) == pytest.approx(1 / 24)
    assert rate(*nodes, *notices) == pytest.approx(5 / 24)


def test_a_storm_is_forgiven() -> None:
    """Half of its weight is gone after six hours, all of it after two days."""
    storm = [ended(f"t{number}") for number in range(20)]
    later = rate(*storm, as_of=T0 + 6 * HOUR)
    sign_of_life = (Told(NodeInstanceListed(provider_ids=(), listed_at=T0 + 49 * HOUR), T0 + 49 * HOUR),)

    assert rate(*storm) == pytest.approx(21 / 40)
    assert later == pytest.approx(11 / 30)
    assert given(*storm, sign_of_life, as_of=T0 + 49 * HOUR).spot_terminations == {}


def test_other_zones_and_types_are_not_blamed() -> None:
    """A storm in one zone says nothing of another one."""
    state = given(*(ended(f"t{number}") for number in range(20)))
    external = msgspec.structs.replace(SPOT, zone="sim-z")

    assert interruption_rate(state, external, T0) == pytest.approx(0.05)


def test_who_ended_an_instance_is_read_from_notices_and_decisions() -> None:
    """Taken: under a standing notice, or without a word of ours. A drain of ours is our doing."""
    uid = ProviderId(f"sim:///{SPOT.zone}/buy-n1")
    (told,) = instance(purchase("buy-n1", SPOT))
    assert isinstance(told.fact, NodeInstanceObserved)
    uid = told.fact.provider_id

    assert is_taken(given(node("n1", SPOT)), uid, "terminated")
    assert not is_taken(given(node("n1", SPOT)), uid, "running")
    assert not is_taken(given(node("n1", SPOT), drained("n1")), uid, "terminated")
    assert is_taken(given(node("n1", SPOT), drained("n1"), notice("n1")), uid, "terminating")


def test_an_end_is_counted_once_however_often_it_is_told() -> None:
    """Told twice, in two states of its end, one instance is one end."""
    once = ended("t")
    again = ended("t", T0 + timedelta(minutes=1))

    assert (
        given(bought(purchase("buy-t", SPOT)), once, again).spot_terminations
        == given(bought(purchase("buy-t", SPOT)), once).spot_terminations
    )
