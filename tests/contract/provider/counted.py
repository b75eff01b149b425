"""What a provider promises besides where a group is told a number, and nobody can ask it for one machine by a token."""

from typing import Protocol, runtime_checkable

import msgspec
import pytest
from tests.contract.provider.contract import OURS, ProviderContract, Rig, order

from gpu_autoscaler.model.errors import TransientError


@runtime_checkable
class Counted(Protocol):
    """A rig whose provider tells a group a number."""

    def wanted_count(self) -> int:
        """What the group of the pool `default` is told."""
        ...


class CountedContract(ProviderContract):
    """The promises of every provider, of which two are kept in another way."""

    async def test_what_shows_up_late_is_not_bought_again(self, rig: Rig) -> None:
        """Nobody knows whose it is until it shows: the order says "later" until then, and asks for no second one."""
        assert isinstance(rig, Counted)
        wanted = await order(rig)
        await rig.show_after(60)
        for _ in range(3):
            with pytest.raises(TransientError, match="does not show yet"):
                await rig.ours.launch(wanted)
        await rig.wait(90)
        made = await rig.ours.launch(wanted)
        assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
        assert rig.wanted_count() == 1

    async def test_only_the_named_offer_is_refused(self, rig: Rig) -> None:
        """Another pool's group sells meanwhile."""
        wanted = await order(rig)
        await rig.refuse(wanted.offer.key)
        other = msgspec.structs.replace(await order(rig, "a2", index=1), pool="other")
        assert (await rig.ours.launch(other)).action_id == "a2"
