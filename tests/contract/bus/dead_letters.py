"""What dead letters are on every bus. Adapters inherit the claims beside `BusContract`."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from tests.contract.bus.desk import SOON_SECONDS, Desk, only

from gpu_autoscaler.bus.dead_letters import ORIGINAL_ID, DeadLetters, MaxDeliveriesAdvisory
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import ADVISORY, DEAD, MAX_DELIVERIES_CONSUMER, STREAMS, BusDeclaration, ConsumerSpec
from gpu_autoscaler.model.errors import PermanentError

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)


class DeadLetterContract:
    """Inherit, and give a `desk`."""

    @pytest.fixture
    async def mortuary(self, desk: Desk) -> tuple[Bus, DeadLetters]:
        """A bus that declares dead letters and advisories too."""
        aside = tuple(spec for spec in STREAMS if spec.name in (DEAD, ADVISORY))
        impatient = ConsumerSpec(
            durable=desk.consumer.durable, stream=desk.stream.name, subjects=desk.consumer.subjects,
            ack_wait_seconds=0.2, max_ack_pending=10, max_deliver=2,
        )  # fmt: skip
        bus = await desk.bus(
            BusDeclaration(streams=(desk.stream, *aside), consumers=(impatient, MAX_DELIVERIES_CONSUMER))
        )
        return bus, DeadLetters(bus)

    async def test_a_dead_letter_keeps_message_and_reason(self, desk: Desk, mortuary: tuple[Bus, DeadLetters]) -> None:
        """The original payload and place, why, and how often; a repeat is stored once."""
        bus, letters = mortuary
        await bus.publish(desk.subject(), b"\x00broken", message_id="möp", headers={"Own": "kept"})
        consumer = await bus.effect_consumer(desk.consumer.durable)
        delivery = only(await consumer.fetch(1, SOON_SECONDS))

        acks = [
            await letters.set_aside(
                delivery.message, service="scaler", reason="field gpus: 100 % wrong\nsecond line, ü",
                error_kind="InvalidFact", delivered_count=delivery.delivered_count, at=AT,
            )
            for _ in range(2)
        ]  # fmt: skip
        await delivery.term("set aside")

        (letter,) = await letters.page()
        assert [ack.is_duplicate for ack in acks] == [False, True]
        assert letter.reason == "field gpus: 100 % wrong\nsecond line, ü"
        assert (letter.service, letter.error_kind, letter.delivered_count) == ("scaler", "InvalidFact", 1)
        assert (letter.subject, letter.payload, letter.message_id) == (desk.subject(), b"\x00broken", "möp")
        assert (letter.stream, letter.stream_sequence, letter.at) == (desk.stream.name, 1, AT)
        assert letter.headers == {"Own": "kept"}

    async def test_dead_letters_are_listed_in_pages(self, desk: Desk, mortuary: tuple[Bus, DeadLetters]) -> None:
        """The next page starts after the last sequence of this one."""
        bus, letters = mortuary
        for number in range(5):
            await self._bury(bus, letters, desk, f"m{number}")

        first = await letters.page(count_max=3)
        second = await letters.page(after_sequence=first[-1].sequence, count_max=3)

        assert [letter.message_id for letter in (*first, *second)] == ["m0", "m1", "m2", "m3", "m4"]
        assert await letters.page(after_sequence=second[-1].sequence) == []

    async def test_a_resubmitted_message_is_handled_again(self, desk: Desk, mortuary: tuple[Bus, DeadLetters]) -> None:
        """Under a new id, so that it is not a duplicate; the letter records the resubmission."""
        bus, letters = mortuary
        await self._bury(bus, letters, desk, "m0")
        await self._bury(bus, letters, desk, "m1")
        (first, _) = await letters.page()

        sent = await letters.resubmit(first.sequence, at=AT)
        rest = await letters.resubmit_all(at=AT, service="scaler")

        stored = await bus.message_at(desk.stream.name, sent.ack.sequence)
        assert stored is not None
        assert not sent.ack.is_duplicate
        assert (stored.subject, stored.payload) == (desk.subject(), b"m0")
        assert stored.headers[ORIGINAL_ID] == "m0"
        assert [one.letter.message_id for one in rest] == ["m1"]
        assert [letter.resubmitted_count for letter in await letters.page()] == [1, 1]
        assert await letters.resubmit_all(at=AT) == []

    async def test_a_senders_header_is_no_mark_of_ours(self, desk: Desk, mortuary: tuple[Bus, DeadLetters]) -> None:
        """Whoever sends broken messages under our headers' names neither hides a letter nor breaks the list."""
        bus, letters = mortuary
        await bus.publish(desk.subject(), b"broken", message_id="m0", headers={"Dead-Letter": "x", "Dead-Own": "y"})
        consumer = await bus.effect_consumer(desk.consumer.durable)
        delivery = only(await consumer.fetch(1, SOON_SECONDS))
        await letters.set_aside(
            delivery.message, service="scaler", reason="broken", error_kind="InvalidFact", delivered_count=1, at=AT
        )

        (letter,) = await letters.page()
        assert (letter.message_id, letter.headers) == ("m0", {})

    async def test_no_such_dead_letter(self, mortuary: tuple[Bus, DeadLetters]) -> None:
        """An unknown number is an error."""
        _, letters = mortuary

        with pytest.raises(PermanentError, match="dead letter 7 not found"):
            await letters.resubmit(7, at=AT)

    async def test_a_message_that_its_consumer_gave_up_is_not_lost(
        self, desk: Desk, mortuary: tuple[Bus, DeadLetters]
    ) -> None:
        """The broker's word that it delivers no more becomes a dead letter with the message itself."""
        bus, letters = mortuary
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"poison", message_id="p")
        for count in (1, 2):
            assert only(await consumer.fetch(1, SOON_SECONDS)).delivered_count == count

        collected: Sequence[MaxDeliveriesAdvisory] = ()
        async with asyncio.timeout(SOON_SECONDS):
            while not collected:
                assert await consumer.fetch(1, 0.2) == []
                collected = await letters.collect_max_deliveries(at=AT, wait_seconds_max=0.2)

        (letter,) = await letters.page()
        assert [(one.stream, one.stream_seq, one.deliveries) for one in collected] == [(desk.stream.name, 1, 2)]
        assert (letter.payload, letter.service, letter.error_kind) == (b"poison", "service", "MaxDeliveries")
        assert "delivered 2 times" in letter.reason

    async def _bury(self, bus: Bus, letters: DeadLetters, desk: Desk, message_id: str) -> None:
        ack = await bus.publish(desk.subject(), message_id.encode(), message_id=message_id)
        message = await bus.message_at(ack.stream, ack.sequence)
        assert message is not None
        await letters.set_aside(
            message, service="scaler", reason="no", error_kind="InvalidFact", delivered_count=1, at=AT
        )
