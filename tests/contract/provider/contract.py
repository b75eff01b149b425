"""What every provider must do. Test modules of providers inherit `ProviderContract` and provide the setup."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from datetime import datetime
from typing import Literal

import pytest

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.protocol import (
    CapacityProvider,
    DescribesInstance,
    Instance,
    LaunchRefused,
    Order,
    RefusalKind,
)

# Too many calls; nobody answers or everything fails; the credentials ran out.
Trouble = Literal["throttled", "down", "expired"]

OURS = "installation-ours"
THEIRS = "installation-theirs"


class Rig(ABC):
    """A cloud under test: our provider, a stranger's, and the hand that makes it misbehave."""

    ours: CapacityProvider
    theirs: CapacityProvider
    capacity_code = "InsufficientInstanceCapacity"  # the cloud's word for: none is left here now

    @abstractmethod
    def now(self) -> datetime:
        """Cluster time."""

    @abstractmethod
    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """Refuse offers whose key matches the pattern, in the cloud's own words for this kind."""

    async def leave_room(self, pattern: str, count: int) -> None:
        """Leave capacity for at most `count` instances of these offers. For clouds with launch groups."""
        raise AssertionError(f"the rig of {self.ours.name} has to say how {pattern} is cut to {count}")

    @abstractmethod
    async def refuse_nothing(self) -> None:
        """Sell everything again."""

    @abstractmethod
    async def lose_next_answer(self) -> None:
        """Do what the next call asks for, and lose the answer."""

    @abstractmethod
    async def trouble(self, kind: Trouble) -> None:
        """Let every call fail so, until `calm`."""

    @abstractmethod
    async def calm(self) -> None:
        """Let calls work again."""

    @abstractmethod
    async def show_after(self, seconds: float) -> None:
        """List what is launched from now on only so long after its launch."""

    @abstractmethod
    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """End the instance on its own, as one that fails while booting."""

    @abstractmethod
    async def stock(self, wanted: Order, count: int) -> None:
        """Have `count` of our instances run already."""

    @abstractmethod
    async def stranger(self, wanted: Order) -> ProviderId:
        """Have an instance run that somebody made by hand, without any tag of ours."""

    @abstractmethod
    async def wait(self, seconds: float) -> None:
        """Let that much cluster time pass."""


async def order(rig: Rig, action: str = "a1", *, installation: str = OURS, index: int = 0) -> Order:
    """An order for the offer at this place of the list."""
    offers = sorted(await rig.ours.offers(), key=lambda offer: offer.key)
    return Order(
        action_id=ActionId(action),
        installation=installation,
        pool="default",
        offer=offers[index],
        labels=(("team", "vision"),),
        taints=(Taint("nvidia.com/gpu", "NoSchedule", "true"),),
    )


async def shown(rig: Rig, provider_id: ProviderId) -> Instance:
    """Our instance of that name, as the list shows it."""
    return next(instance for instance in await rig.ours.instances(OURS) if instance.provider_id == provider_id)


class ProviderContract:
    """The promises. A subclass has a fixture `rig`."""

    async def test_offers_are_complete(self, rig: Rig) -> None:
        """Every offer has a unique key and allocatable resources, and the provider a name."""
        offers: list[Offer] = list(await rig.ours.offers())
        assert offers
        assert max(Counter(offer.key for offer in offers).values()) == 1
        assert all(offer.resources.cpu_milli > 0 and offer.resources.memory_bytes > 0 for offer in offers)
        assert rig.ours.name

    async def test_a_launch_matches_its_order(self, rig: Rig) -> None:
        """Offer, price and token; running; billed from an instant that is not in the future."""
        wanted = await order(rig)
        made = await rig.ours.launch(wanted)
        assert (made.instance_type, made.zone, made.capacity_type) == (
            wanted.offer.instance_type,
            wanted.offer.zone,
            wanted.offer.capacity_type,
        )
        assert (made.action_id, made.terminated_at) == (wanted.action_id, None)
        assert made.price_micro_usd_per_hour == wanted.offer.price_micro_usd_per_hour
        assert made.state in ("pending", "running")
        assert made.launched_at <= rig.now()

    async def test_a_token_launches_one_instance(self, rig: Rig) -> None:
        """Retries, in sequence or concurrent, return the same instance."""
        wanted = await order(rig)
        first = await rig.ours.launch(wanted)
        again = await asyncio.gather(*(rig.ours.launch(wanted) for _ in range(5)))
        assert {each.provider_id for each in again} == {first.provider_id}
        assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [first.provider_id]

    async def test_a_lost_answer_launches_no_second_instance(self, rig: Rig) -> None:
        """The launch succeeded without an answer: the retry returns its instance."""
        wanted = await order(rig)
        await rig.lose_next_answer()
        with pytest.raises(TransientError):
            await rig.ours.launch(wanted)
        made = await rig.ours.launch(wanted)
        assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]

    async def test_a_token_is_bound_to_its_offer(self, rig: Rig) -> None:
        """The same token for another offer is an error and launches nothing."""
        await rig.ours.launch(await order(rig))
        with pytest.raises(PermanentError):
            await rig.ours.launch(await order(rig, index=1))
        assert len(await rig.ours.instances(OURS)) == 1

    async def test_a_used_token_never_launches_again(self, rig: Rig) -> None:
        """After its instance ended, the token returns the ended instance."""
        wanted = await order(rig)
        made = await rig.ours.launch(wanted)
        await rig.ours.terminate(made.provider_id, now=rig.now())
        await rig.wait(60)
        again = await rig.ours.launch(wanted)
        assert (again.provider_id, again.state) == (made.provider_id, "terminated")

    async def test_a_refusal_launches_nothing(self, rig: Rig) -> None:
        """It has code, scope and wait; the token can launch later."""
        wanted = await order(rig)
        await rig.refuse(wanted.offer.key)
        with pytest.raises(LaunchRefused) as refused:
            await rig.ours.launch(wanted)
        nothing = await rig.ours.instances(OURS)
        await rig.refuse_nothing()
        made = await rig.ours.launch(wanted)

        assert refused.value.code == rig.capacity_code
        assert refused.value.scope == "offer"
        assert refused.value.retry_after_seconds > 0
        assert not nothing
        assert made.action_id == wanted.action_id

    async def test_only_the_named_offer_is_refused(self, rig: Rig) -> None:
        """Other offers stay available."""
        wanted = await order(rig)
        await rig.refuse(wanted.offer.key)
        assert (await rig.ours.launch(await order(rig, "a2", index=1))).action_id == "a2"

    @pytest.mark.parametrize("kind", ["capacity", "quota", "permission", "configuration"])
    async def test_a_refusal_has_its_kind(self, rig: Rig, kind: RefusalKind) -> None:
        """Capacity, quota, or something that an operator must change; nothing was launched."""
        wanted = await order(rig)
        await rig.refuse(wanted.offer.key, kind)
        with pytest.raises(LaunchRefused) as refused:
            await rig.ours.launch(wanted)
        assert (refused.value.kind, refused.value.code in str(refused.value)) == (kind, True)
        assert refused.value.scope == ("region" if kind in ("quota", "permission") else "offer")
        assert not await rig.ours.instances(OURS)

    @pytest.mark.parametrize("kind", ["throttled", "down", "expired"])
    async def test_failures_are_transient_and_never_an_empty_list(self, rig: Rig, kind: Trouble) -> None:
        """Every call raises TransientError; a retry succeeds, and nothing is launched twice."""
        wanted = await order(rig)
        made = await rig.ours.launch(wanted)
        other = await order(rig, "a2")
        await rig.trouble(kind)
        for attempt in (
            rig.ours.instances(OURS),
            rig.ours.offers(),
            rig.ours.launch(other),
            rig.ours.terminate(made.provider_id, now=rig.now()),
        ):
            with pytest.raises(TransientError):
                await attempt
        await rig.calm()
        await rig.ours.launch(other)
        assert sorted(str(instance.action_id) for instance in await rig.ours.instances(OURS)) == ["a1", "a2"]
        assert (await shown(rig, made.provider_id)).state in ("pending", "running")

    async def test_an_instance_listed_late_is_not_launched_again(self, rig: Rig) -> None:
        """Until it is listed, the same token returns it; later the list contains it."""
        wanted = await order(rig)
        await rig.show_after(60)
        made = await rig.ours.launch(wanted)
        unseen = await rig.ours.instances(OURS)
        again = await rig.ours.launch(wanted)
        await rig.wait(90)
        assert not unseen
        assert again.provider_id == made.provider_id
        assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]

    async def test_an_instance_that_fails_at_boot_is_reported(self, rig: Rig) -> None:
        """It ended, with a date; its token launches no other."""
        wanted = await order(rig)
        made = await rig.ours.launch(wanted)
        await rig.wait(5)
        await rig.end_unexpectedly(made.provider_id)
        await rig.wait(60)
        listed = await shown(rig, made.provider_id)
        again = await rig.ours.launch(wanted)
        assert listed.state == "terminated"
        assert listed.terminated_at is not None
        assert made.launched_at < listed.terminated_at <= rig.now()
        assert (again.provider_id, again.state) == (made.provider_id, "terminated")

    async def test_a_large_fleet_is_listed_completely(self, rig: Rig) -> None:
        """2,000 instances, each once, whatever the cloud's paging."""
        await rig.stock(await order(rig), 2000)
        listed = [instance.provider_id for instance in await rig.ours.instances(OURS)]
        assert len(listed) == len(set(listed)) == 2000

    async def test_termination_is_final_and_dated(self, rig: Rig) -> None:
        """Terminating twice is no error; billing ends once, after it began, and the list shows it."""
        made = await rig.ours.launch(await order(rig))
        await rig.wait(10)
        first = await rig.ours.terminate(made.provider_id, now=rig.now())
        await rig.wait(60)
        second = await rig.ours.terminate(made.provider_id, now=rig.now())
        listed = await shown(rig, made.provider_id)

        assert first is not None
        assert first.state in ("terminating", "terminated")
        assert second == listed
        assert listed.state == "terminated"
        assert listed.terminated_at is not None
        assert made.launched_at < listed.terminated_at <= rig.now()

    async def test_a_lost_answer_to_a_termination_can_be_retried(self, rig: Rig) -> None:
        """The termination began; a retry reports it."""
        made = await rig.ours.launch(await order(rig))
        await rig.lose_next_answer()
        with pytest.raises(TransientError):
            await rig.ours.terminate(made.provider_id, now=rig.now())
        ended = await rig.ours.terminate(made.provider_id, now=rig.now())
        assert ended is not None
        assert ended.state in ("terminating", "terminated")

    async def test_an_unknown_instance_is_reported_as_none(self, rig: Rig) -> None:
        """Terminating an instance that never existed returns None."""
        made = await rig.ours.launch(await order(rig))
        never = ProviderId(made.provider_id.rpartition("/")[0] + "/i-0123456789abcdef0")
        assert await rig.ours.terminate(never, now=rig.now()) is None

    async def test_instances_of_others_are_left_untouched(self, rig: Rig) -> None:
        """Another installation's instance is neither listed nor terminated."""
        made = await rig.theirs.launch(await order(rig, installation=THEIRS))
        with pytest.raises(PermanentError):
            await rig.ours.terminate(made.provider_id, now=rig.now())
        assert not await rig.ours.instances(OURS)
        (left,) = await rig.theirs.instances(THEIRS)
        assert left.state in ("pending", "running")

    async def test_untagged_instances_are_left_untouched(self, rig: Rig) -> None:
        """A manually launched instance is neither listed nor terminated."""
        by_hand = await rig.stranger(await order(rig))
        with pytest.raises(PermanentError, match="left untouched"):
            await rig.ours.terminate(by_hand, now=rig.now())
        assert not await rig.ours.instances(OURS)

    async def test_an_instance_can_be_described_by_id(self, rig: Rig) -> None:
        """Running, then ended or unknown; unknown if it never existed. Read-only. Not for Karpenter's claims."""
        ours = rig.ours
        if not isinstance(ours, DescribesInstance):
            assert ours.name == "karpenter"
            return
        made = await ours.launch(await order(rig))
        never = ProviderId(made.provider_id.rpartition("/")[0] + "/i-0123456789abcdef0")
        assert await ours.instance(never) is None
        alive = [await ours.instance(made.provider_id) for _ in range(2)]
        assert all(one is not None and one.state in ("pending", "running") for one in alive)
        await ours.terminate(made.provider_id, now=rig.now())
        await rig.wait(60)
        apply_to = await ours.instance(made.provider_id)
        assert apply_to is None or (apply_to.provider_id, apply_to.state) == (made.provider_id, "terminated")

    @pytest.mark.parametrize("kind", ["throttled", "down", "expired"])
    async def test_a_failure_proves_nothing_about_an_instance(self, rig: Rig, kind: Trouble) -> None:
        """Neither its existence nor its absence."""
        if isinstance(rig.ours, DescribesInstance):
            made = await rig.ours.launch(await order(rig))
            await rig.trouble(kind)
            with pytest.raises(TransientError):
                await rig.ours.instance(made.provider_id)
            await rig.calm()
            assert await rig.ours.instance(made.provider_id) is not None

    @pytest.mark.parametrize("is_by_hand", [False, True])
    async def test_instances_of_others_cannot_be_described(self, rig: Rig, is_by_hand: bool) -> None:  # noqa: FBT001
        """Another installation's, or a manually launched one: PermanentError."""
        if isinstance(rig.ours, DescribesInstance):
            theirs = None if is_by_hand else await rig.theirs.launch(await order(rig, installation=THEIRS))
            name = await rig.stranger(await order(rig)) if theirs is None else theirs.provider_id
            with pytest.raises(PermanentError, match="left untouched"):
                await rig.ours.instance(name)

    async def test_installations_do_not_share_tokens(self, rig: Rig) -> None:
        """The same token of two installations launches two instances."""
        ours = await rig.ours.launch(await order(rig))
        theirs = await rig.theirs.launch(await order(rig, installation=THEIRS))
        assert ours.provider_id != theirs.provider_id

    async def test_ended_instances_are_listed_for_an_hour(self, rig: Rig) -> None:
        """Long enough to learn of a missed end, then no longer."""
        made = await rig.ours.launch(await order(rig))
        await rig.ours.terminate(made.provider_id, now=rig.now())
        await rig.wait(3000)
        listed = await rig.ours.instances(OURS)
        await rig.wait(1500)
        assert [each.state for each in listed] == ["terminated"]
        assert not await rig.ours.instances(OURS)
