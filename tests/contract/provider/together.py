"""What a provider promises that makes several instances at once, or none. Inherited beside `ProviderContract`."""

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
    """So many orders that differ in their names alone."""
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


class TogetherContract:
    """The promises. A subclass has a fixture `rig`, whose settings let its first offer be bought so."""

    async def test_all_are_made_and_each_is_one_order_s(self, rig: Rig) -> None:
        """As ordered, one instance an order, in their order; the list shows each with its own order's name."""
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
    async def test_where_some_have_no_room_none_is_made(self, rig: Rig, room_count: int) -> None:
        """One refusal for all; with room for all a next transaction is whole."""
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

    async def test_as_many_as_there_is_room_for_are_made(self, rig: Rig) -> None:
        """And not one more, together or alone."""
        wanted = await gang(rig)
        await rig.leave_room(wanted[0].offer.key, 3)
        made = list(await ours(rig).launch_group(FIRST, wanted))
        with pytest.raises(LaunchRefused):
            await rig.ours.launch(await order(rig))
        assert await listed(rig) == names(made)

    async def test_one_transaction_is_made_once(self, rig: Rig) -> None:
        """Asked again, in turn or at once, in another order or for some of it only: the same instances."""
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
    async def test_a_lost_answer_makes_no_more(self, rig: Rig, kept_count: int) -> None:
        """They were made and nobody heard: asked again, for all or for what is still wanted, they are told."""
        wanted = await gang(rig)
        await rig.lose_next_answer()
        with pytest.raises(TransientError):
            await ours(rig).launch_group(FIRST, wanted)
        made = names(list(await ours(rig).launch_group(FIRST, wanted[3 - kept_count :])))
        there = await listed(rig)
        assert sorted(there) == ["t1", "t2", "t3"]
        assert made == {name: there[name] for name in sorted(made)}
        assert len(made) == kept_count

    async def test_what_shows_up_late_is_not_made_again(self, rig: Rig) -> None:
        """Made and not listed yet; asked again, for all or for some, nothing more is made."""
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

    async def test_a_transaction_that_is_over_makes_nothing(self, rig: Rig) -> None:
        """After its instances have ended it returns the ended ones."""
        wanted = await gang(rig)
        made = list(await ours(rig).launch_group(FIRST, wanted))
        for one in made:
            await rig.ours.terminate(one.provider_id, now=rig.now())
        await rig.wait(60)
        again = list(await ours(rig).launch_group(FIRST, wanted))
        assert names(again) == names(made)
        assert {one.state for one in again} == {"terminated"}
        assert await listed(rig) == {}

    async def test_a_transaction_makes_no_others(self, rig: Rig) -> None:
        """Orders that it did not have at first are a mistake, and are not made."""
        wanted = await gang(rig, 4)
        await ours(rig).launch_group(FIRST, wanted[:3])
        with pytest.raises((PermanentError, TransientError)):
            await ours(rig).launch_group(FIRST, wanted)
        assert sorted(await listed(rig)) == ["t1", "t2", "t3"]

    async def test_each_of_them_ends_alone(self, rig: Rig) -> None:
        """An instance that was made with others is ended like any other."""
        made = list(await ours(rig).launch_group(FIRST, await gang(rig)))
        await rig.wait(10)
        ended = await rig.ours.terminate(made[1].provider_id, now=rig.now())
        assert ended is not None
        assert ended.action_id == "t2"
        assert sorted(await listed(rig)) == ["t1", "t3"]

    async def test_transactions_of_two_installations_are_two(self, rig: Rig) -> None:
        """The same names, and nobody sees the other's."""
        theirs = rig.theirs
        assert isinstance(theirs, LaunchesGroups)
        made = list(await ours(rig).launch_group(FIRST, await gang(rig)))
        others = await theirs.launch_group(FIRST, await gang(rig, installation=THEIRS))
        assert await listed(rig) == names(made)
        counts = Counter(one.provider_id for one in (*made, *others))
        assert max(counts.values()) == 1

    async def test_trouble_makes_nothing_for_good(self, rig: Rig) -> None:
        """The call may be made again, and is then made once."""
        wanted = await gang(rig)
        await rig.trouble("throttled")
        with pytest.raises(TransientError):
            await ours(rig).launch_group(FIRST, wanted)
        await rig.calm()
        made = list(await ours(rig).launch_group(FIRST, wanted))
        assert await listed(rig) == names(made)
