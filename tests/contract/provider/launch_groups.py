"""Contract of providers that launch several instances together or none. Inherited with `ProviderContract`."""

import asyncio
from collections import Counter

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, Rig, order

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.protocol import Instance, LaunchesGroups, LaunchRefused, Order

FIRST = ActionId("t1")


async def gang(rig: Rig, count: int = 3, *, installation: str = OURS, first: int = 1) -> list[Order]:
    """Return `count` orders that differ only by name."""
    model = await order(rig, installation=installation)
    return [msgspec.structs.replace(model, action_id=ActionId(f"t{number}")) for number in range(first, first + count)]


def ours(rig: Rig) -> LaunchesGroups:
    """The provider, as one that launches together."""
    assert isinstance(rig.ours, LaunchesGroups)
    return rig.ours


def names(made: list[Instance]) -> dict[str, str]:
    """Which instance each order has become."""
    return {str(one.action_id): one.provider_id for one in made}


async def listed(rig: Rig) -> dict[str, str]:
    """The same, by the cloud's own list of what lives."""
    return names([instance for instance in await rig.ours.instances(OURS) if instance.state in ("pending", "running")])


class LaunchGroupsContract:
    """The promises. A subclass has a fixture `rig`, whose settings let its first offer be bought so."""

    async def test_all_are_launched_one_per_order(self, rig: Rig) -> None:
        """As ordered, in the order of the orders; the list shows each with its action id."""
        wanted = await gang(rig)
        assert ours(rig).can_launch_group(wanted[0].pool, wanted[0].offer)
        made = list(await ours(rig).launch_group(FIRST, wanted))
        assert [one.action_id for one in made] == ["t1", "t2", "t3"]
        assert len({one.provider_id for one in made}) == 3
        for one in made:
            offer = wanted[0].offer
            assert (one.instance_type, one.zone, one.capacity_type) == (
                offer.instance_type,
                offer.zone,
                offer.capacity_type,
            )
            assert one.price_micro_usd_per_hour == offer.price_micro_usd_per_hour
            assert one.state in ("pending", "running")
            assert one.launched_at <= rig.now()
        assert await listed(rig) == names(made)

    @pytest.mark.parametrize("room_count", [0, 1, 2])
    async def test_without_capacity_for_all_none_is_launched(self, rig: Rig, room_count: int) -> None:
        """One refusal for all; with capacity a next transaction is complete."""
        wanted = await gang(rig)
        await rig.leave_room(wanted[0].offer.key, room_count)
        with pytest.raises(LaunchRefused) as refused:
            await ours(rig).launch_group(FIRST, wanted)
        nothing = await listed(rig)
        await rig.refuse_nothing()
        later = await gang(rig, first=7)
        made = list(await ours(rig).launch_group(later[0].action_id, later))
        assert (refused.value.kind, refused.value.scope) == ("capacity", "offer")
        assert refused.value.retry_after_seconds > 0
        assert nothing == {}
        assert await listed(rig) == names(made)

    async def test_capacity_is_used_up_exactly(self, rig: Rig) -> None:
        """Neither group nor single launches exceed it."""
        wanted = await gang(rig)
        await rig.leave_room(wanted[0].offer.key, 3)
        made = list(await ours(rig).launch_group(FIRST, wanted))
        with pytest.raises(LaunchRefused):
            await rig.ours.launch(await order(rig))
        assert await listed(rig) == names(made)

    async def test_a_transaction_is_launched_once(self, rig: Rig) -> None:
        """Retries, in sequence or concurrent, reordered or partial, return the same instances."""
        wanted = await gang(rig)
        first = names(list(await ours(rig).launch_group(FIRST, wanted)))
        again = await asyncio.gather(*(ours(rig).launch_group(FIRST, wanted) for _ in range(3)))
        turned = await ours(rig).launch_group(FIRST, wanted[::-1])
        part = await ours(rig).launch_group(FIRST, wanted[1:2])
        assert [names(list(each)) for each in again] == [first] * 3
        assert [one.action_id for one in turned] == ["t3", "t2", "t1"]
        assert names(list(turned)) == first
        assert names(list(part)) == {"t2": first["t2"]}
        assert await listed(rig) == first

    @pytest.mark.parametrize("kept_count", [3, 2, 1])
    async def test_a_lost_answer_launches_no_more(self, rig: Rig, kept_count: int) -> None:
        """The launch succeeded without an answer: a retry, complete or partial, returns the instances."""
        wanted = await gang(rig)
        await rig.lose_next_answer()
        with pytest.raises(TransientError):
            await ours(rig).launch_group(FIRST, wanted)
        made = names(list(await ours(rig).launch_group(FIRST, wanted[3 - kept_count :])))
        there = await listed(rig)
        assert sorted(there) == ["t1", "t2", "t3"]
        assert made == {name: there[name] for name in sorted(made)}
        assert len(made) == kept_count

    async def test_instances_listed_late_are_not_launched_again(self, rig: Rig) -> None:
        """A retry, complete or partial, launches nothing more."""
        wanted = await gang(rig)
        await rig.show_after(60)
        made = names(list(await ours(rig).launch_group(FIRST, wanted)))
        assert names(list(await ours(rig).launch_group(FIRST, wanted))) == made
        try:
            part = names(list(await ours(rig).launch_group(FIRST, wanted[:2])))
        except TransientError:
            part = {}  # a cloud may want to see them first
        await rig.wait(90)
        assert part.items() <= made.items()
        assert names(list(await ours(rig).launch_group(FIRST, wanted[:2]))) == {
            name: made[name] for name in ("t1", "t2")
        }
        assert await listed(rig) == made

    async def test_a_finished_transaction_launches_nothing(self, rig: Rig) -> None:
        """After its instances ended it returns the ended ones."""
        wanted = await gang(rig)
        made = list(await ours(rig).launch_group(FIRST, wanted))
        for one in made:
            await rig.ours.terminate(one.provider_id, now=rig.now())
        await rig.wait(60)
        again = list(await ours(rig).launch_group(FIRST, wanted))
        assert names(again) == names(made)
        assert {one.state for one in again} == {"terminated"}
        assert await listed(rig) == {}

    async def test_a_transaction_has_a_fixed_set_of_orders(self, rig: Rig) -> None:
        """Other orders are an error and are not launched."""
        wanted = await gang(rig, 4)
        await ours(rig).launch_group(FIRST, wanted[:3])
        with pytest.raises((PermanentError, TransientError)):
            await ours(rig).launch_group(FIRST, wanted)
        assert sorted(await listed(rig)) == ["t1", "t2", "t3"]

    async def test_each_instance_is_terminated_separately(self, rig: Rig) -> None:
        """An instance launched in a group is terminated like any other."""
        made = list(await ours(rig).launch_group(FIRST, await gang(rig)))
        await rig.wait(10)
        ended = await rig.ours.terminate(made[1].provider_id, now=rig.now())
        assert ended is not None
        assert ended.action_id == "t2"
        assert sorted(await listed(rig)) == ["t1", "t3"]

    async def test_transactions_of_installations_are_separate(self, rig: Rig) -> None:
        """With the same names, and invisible to each other."""
        theirs = rig.theirs
        assert isinstance(theirs, LaunchesGroups)
        made = list(await ours(rig).launch_group(FIRST, await gang(rig)))
        others = await theirs.launch_group(FIRST, await gang(rig, installation=THEIRS))
        assert await listed(rig) == names(made)
        counts = Counter(one.provider_id for one in (*made, *others))
        assert max(counts.values()) == 1

    async def test_a_failed_group_launch_can_be_retried(self, rig: Rig) -> None:
        """It is then launched once."""
        wanted = await gang(rig)
        await rig.trouble("throttled")
        with pytest.raises(TransientError):
            await ours(rig).launch_group(FIRST, wanted)
        await rig.calm()
        made = list(await ours(rig).launch_group(FIRST, wanted))
        assert await listed(rig) == names(made)
