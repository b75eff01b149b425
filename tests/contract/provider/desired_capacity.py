"""Contract of groups that are scaled by desired capacity, without launches of single instances by token."""

from typing import Protocol, runtime_checkable

import msgspec
import pytest
from tests.contract.provider.contract import OURS, ProviderContract, Rig, order

from gpu_autoscaler.model.errors import TransientError


@runtime_checkable
class Counted(Protocol):
    """A rig whose provider tells a group a number."""

    def wanted_count(self) -> int:
        """Return the desired capacity of the group of pool `default`."""


class DesiredCapacityContract(ProviderContract):
    """The promises of every provider, of which two are kept in another way."""

    async def test_an_instance_listed_late_is_not_launched_again(self, rig: Rig) -> None:
        """Its order is unknown until it is listed: a retry raises TransientError and launches no second one."""
        assert isinstance(rig, Counted)
        wanted = await order(rig)
        await rig.show_after(60)
        for _ in range(3):
            with pytest.raises(TransientError, match="not listed yet"):
                await rig.ours.launch(wanted)
        await rig.wait(90)
        made = await rig.ours.launch(wanted)
        assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
        assert rig.wanted_count() == 1

    async def test_only_the_named_offer_is_refused(self, rig: Rig) -> None:
        """Another pool's group stays available."""
        wanted = await order(rig)
        await rig.refuse(wanted.offer.key)
        other = msgspec.structs.replace(await order(rig, "a2", index=1), pool="other")
        assert (await rig.ours.launch(other)).action_id == "a2"
