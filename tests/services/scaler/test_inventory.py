"""The cloud's lists of instances, as facts."""

from datetime import timedelta

import msgspec
from tests.support.stories import T0, TimedFact, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.queries import listed_instances
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.node import InstanceChanges, NodeInstanceListed, NodeWatched
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.protocol import Instance
from gpu_autoscaler_services.scaler.inventory import InstanceLists, InstancesListed

LIST_INTERVAL = timedelta(seconds=10)


def listed(*names: str, number: int) -> InstancesListed:
    """Return the list of this number."""
    instances = tuple(
        Instance(
            provider_id=ProviderId(name),
            action_id=ActionId(name),
            state="running",
            instance_type="p4d.24xlarge",
            zone="a",
            capacity_type=CapacityType.SPOT,
            price_micro_usd_per_hour=1,
            launched_at=T0,
        )
        for name in names
    )
    return InstancesListed(instances=instances, listed_at=T0 + number * LIST_INTERVAL)


def test_lists_are_published_as_changes() -> None:
    """An hour of lists of 1,000 instances with AWS ids: three in full, the others have a few hundred bytes."""
    lists, state, sizes = InstanceLists(), EMPTY_STATE, []
    names = [f"aws:///us-east-1a/i-{number:017x}" for number in range(1000)]
    for number in range(361):
        present = names[:-1] if 5 <= number < 9 else names
        item = listed(*present, number=number)
        fact = lists.fact(state, item)
        sizes.append(len(msgspec.json.encode(fact)))
        state = fold(state, record([TimedFact(fact, item.listed_at)]))
        assert state.instances_listed_at == item.listed_at
        assert listed_instances(state.instances_seen_at, item.listed_at) == set(present)
    assert sum(size > 1000 for size in sizes) == 3
    assert state.instances_seen_at[ProviderId(names[-1])] == T0 + 360 * LIST_INTERVAL


def test_a_change_means_nothing_without_the_list_before_it() -> None:
    """A reader that missed one waits for the next full list, and takes nothing for absent meanwhile."""
    full = NodeInstanceListed(provider_ids=(ProviderId("a"),), listed_at=T0)
    changes = InstanceChanges(since=T0 + LIST_INTERVAL)
    late = NodeWatched(epoch=0, version=0, watched_at=T0 + 2 * LIST_INTERVAL, instances=changes)
    state = fold(EMPTY_STATE, record([TimedFact(full, T0), TimedFact(late, late.watched_at)]))
    assert state.instances_listed_at == T0
    assert fold(EMPTY_STATE, record([TimedFact(late, late.watched_at)])).instances_listed_at is None
