"""What every bus does. Adapters inherit the claims and bring a broker to prove them on."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from gpu_autoscaler.bus.dead_letters import ORIGINAL_ID, DeadLetters
from gpu_autoscaler.bus.protocol import Bus, Delivery, Message, Publication
from gpu_autoscaler.bus.streams import (
    ADVISORY,
    DEAD,
    GIVEN_UP,
    MEBIBYTE,
    MESSAGE_BYTES_MAX,
    STREAMS,
    ConsumerSpec,
    Declared,
    MessageTtl,
    StreamSpec,
)
from gpu_autoscaler.model.errors import ConfigError, PermanentError, StalePlan

Connect = Callable[[Declared], Awaitable[Bus]]

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)
SOON_SECONDS = 5.0
ACK_WAIT_SECONDS = 0.5


class Desk:
    """One test's corner of a broker: a stream and a consumer of its own name."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.root = f"t{uuid4().hex[:10]}"
        self.stream = StreamSpec(
            name=self.root.upper(),
            subjects=(f"{self.root}.>",),
            description="of a test",
            max_age_seconds=3600,
            max_bytes=64 * MEBIBYTE,
            message_ttls=(MessageTtl(subject_root=f"{self.root}.sampled", ttl_seconds=1),),
        )
        self.consumer = ConsumerSpec(
            durable=f"service-{self.root}-act",
            stream=self.stream.name,
            subjects=(f"{self.root}.asked",),
            ack_wait_seconds=ACK_WAIT_SECONDS,
            max_ack_pending=3,
            max_deliver=50,
        )

    def subject(self, word: str = "asked") -> str:
        return f"{self.root}.{word}"

    def declared(self, *, stream: StreamSpec | None = None, consumer: ConsumerSpec | None = None) -> Declared:
        return Declared(streams=(stream or self.stream,), consumers=(consumer or self.consumer,))

    async def bus(self, declared: Declared | None = None) -> Bus:
        bus = await self.connect(declared or self.declared())
        await bus.ensure()
        return bus


async def read(bus: Bus, stream: str, count: int, subjects: Sequence[str] = (), after: int = 0) -> list[Message]:
    """The next `count` messages, or a failure when they do not come soon."""
    projection = await bus.projection(stream, subjects=subjects, after_sequence=after)
    messages: list[Message] = []
    async with asyncio.timeout(2 * SOON_SECONDS):
        async for batch in projection:
            messages += batch
            if len(messages) >= count:
                break
    await projection.close()
    return messages


def only(deliveries: Sequence[Delivery]) -> Delivery:
    """The one delivery that there is."""
    assert len(deliveries) == 1, [delivery.message for delivery in deliveries]
    return deliveries[0]


class BusContract:
    """Inherit, and give a `desk`."""

    @pytest.fixture
    def desk(self) -> Desk:
        pytest.fail("an adapter's tests bring their own desk")

    # --- storing

    async def test_a_message_comes_back_as_it_was_sent(self, desk: Desk) -> None:
        """Subject, payload, id and headers survive; the place is the one that the ack told."""
        bus = await desk.bus()
        headers = {"Answer-To": "ask 7: grün"}

        ack = await bus.publish(desk.subject(), b'{"a": 1}', message_id="first", headers=headers)

        message = (await read(bus, desk.stream.name, 1))[0]
        assert message == await bus.message_at(desk.stream.name, ack.sequence)
        assert (message.subject, message.payload, message.message_id) == (desk.subject(), b'{"a": 1}', "first")
        assert (message.stream, message.sequence, ack.is_duplicate) == (desk.stream.name, 1, False)
        assert message.headers == headers
        assert abs((datetime.now(UTC) - message.stored_at).total_seconds()) < 60

    async def test_an_id_is_stored_once(self, desk: Desk) -> None:
        """The repeat is told as one, with the sequence of the first."""
        bus = await desk.bus()
        first = await bus.publish(desk.subject(), b"1", message_id="same")

        again = await bus.publish(desk.subject(), b"another body", message_id="same")

        assert again.is_duplicate
        assert again.sequence == first.sequence
        assert await bus.last_sequence(desk.stream.name) == 1

    async def test_many_messages_keep_their_order(self, desk: Desk) -> None:
        """More than a window in flight, acks and reading in the order given."""
        bus = await desk.bus()
        many = [Publication(subject=desk.subject(), payload=b"%d" % n, message_id=f"m{n}") for n in range(2500)]

        acks = await bus.publish_many(many)

        assert [ack.sequence for ack in acks] == list(range(1, 2501))
        messages = await read(bus, desk.stream.name, 2500)
        assert [message.payload for message in messages] == [publication.payload for publication in many]

    async def test_a_stream_never_written_ends_at_zero(self, desk: Desk) -> None:
        """Nothing is there, and asking for it is no error."""
        bus = await desk.bus()

        assert await bus.last_sequence(desk.stream.name) == 0
        assert await bus.message_at(desk.stream.name, 1) is None

    async def test_too_large_a_message_is_refused_before_sending(self, desk: Desk) -> None:
        """It never will fit: not a matter of trying again. What just fits is taken."""
        bus = await desk.bus()

        with pytest.raises(PermanentError, match=r"'big'.*at most 8323072 are taken"):
            await bus.publish(desk.subject(), bytes(MESSAGE_BYTES_MAX + 1), message_id="big")
        fits = await bus.publish(desk.subject(), bytes(MESSAGE_BYTES_MAX - 1024), message_id="fits")

        stored = await bus.message_at(desk.stream.name, fits.sequence)
        assert stored is not None
        assert len(stored.payload) == MESSAGE_BYTES_MAX - 1024

    async def test_a_subject_without_a_stream_is_a_permanent_error(self, desk: Desk) -> None:
        """A message that no stream takes is never dropped silently."""
        bus = await desk.bus()

        with pytest.raises(PermanentError, match=r"no stream takes messages on nowhere\."):
            await bus.publish(f"nowhere.{desk.root}", b"", message_id="lost")

    async def test_samples_leave_early(self, desk: Desk) -> None:
        """A subject with a time to live of its own does not wait for the stream's age."""
        bus = await desk.bus()
        sample = await bus.publish(desk.subject("sampled") + ".n1", b"s", message_id="s")
        await bus.publish(desk.subject(), b"kept", message_id="k")

        async with asyncio.timeout(SOON_SECONDS):
            while await bus.message_at(desk.stream.name, sample.sequence) is not None:
                await asyncio.sleep(0.1)

        assert [message.payload for message in await read(bus, desk.stream.name, 1)] == [b"kept"]

    # --- the fence

    async def test_of_two_with_the_same_parent_one_is_refused(self, desk: Desk) -> None:
        """The stream itself decides, whoever is first; other subjects do not count."""
        bus, other = await desk.bus(), await desk.bus()
        parent = await bus.publish(desk.subject("made"), b"", message_id="p0", expected_last_subject_sequence=0)
        await bus.publish(desk.subject(), b"", message_id="between")

        await bus.publish(desk.subject("made"), b"", message_id="p1", expected_last_subject_sequence=parent.sequence)
        with pytest.raises(StalePlan, match=rf"{desk.subject('made')}: sequence 1 is no longer the last"):
            await other.publish(
                desk.subject("made"), b"", message_id="p2", expected_last_subject_sequence=parent.sequence
            )

        assert await bus.last_sequence(desk.stream.name) == 3

    async def test_a_repeat_of_what_passed_the_fence_is_a_duplicate(self, desk: Desk) -> None:
        """An ack that was lost on the way must not look like a defeat."""
        bus = await desk.bus()
        first = await bus.publish(desk.subject(), b"", message_id="p", expected_last_subject_sequence=0)

        again = await bus.publish(desk.subject(), b"", message_id="p", expected_last_subject_sequence=0)

        assert (again.sequence, again.is_duplicate) == (first.sequence, True)

    # --- effects

    async def test_an_acknowledged_message_never_comes_again(self, desk: Desk) -> None:
        """Not after its ack wait either."""
        bus = await desk.bus()
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"", message_id="1")

        await only(await consumer.fetch(10, SOON_SECONDS)).ack()

        assert await consumer.fetch(10, 2 * ACK_WAIT_SECONDS) == []
        assert await consumer.pending_count() == 0

    async def test_a_consumer_that_dies_before_its_ack_loses_nothing(self, desk: Desk) -> None:
        """Its message goes to the next replica; the output that it had published is stored once."""
        dying = await desk.bus()
        consumer = await dying.effect_consumer(desk.consumer.durable)
        await dying.publish(desk.subject(), b"", message_id="cause")
        given = only(await consumer.fetch(1, SOON_SECONDS))
        await dying.publish(desk.subject("done"), b"", message_id=f"effect of {given.message.message_id}")
        await dying.close()

        bus = await desk.bus()
        again = only(await (await bus.effect_consumer(desk.consumer.durable)).fetch(1, SOON_SECONDS))
        ack = await bus.publish(desk.subject("done"), b"", message_id=f"effect of {again.message.message_id}")
        await again.ack()

        assert (given.delivered_count, again.delivered_count) == (1, 2)
        assert again.message == given.message
        assert ack.is_duplicate

    async def test_only_the_declared_subjects_are_delivered(self, desk: Desk) -> None:
        """What the service did not ask for stays where it is."""
        bus = await desk.bus()
        await bus.publish(desk.subject("other"), b"", message_id="1")
        await bus.publish(desk.subject(), b"mine", message_id="2")
        consumer = await bus.effect_consumer(desk.consumer.durable)

        assert only(await consumer.fetch(10, SOON_SECONDS)).message.payload == b"mine"

    async def test_replicas_share_the_work(self, desk: Desk) -> None:
        """Each message is in one hand at a time."""
        one, two = await desk.bus(), await desk.bus()
        first, second = [await bus.effect_consumer(desk.consumer.durable) for bus in (one, two)]
        await one.publish_many(
            [Publication(subject=desk.subject(), payload=b"", message_id=str(number)) for number in range(2)]
        )

        mine = only(await first.fetch(1, SOON_SECONDS))
        theirs = only(await second.fetch(1, SOON_SECONDS))

        assert {mine.message.message_id, theirs.message.message_id} == {"0", "1"}

    async def test_work_in_flight_is_bounded(self, desk: Desk) -> None:
        """`max_ack_pending` messages are out, and the next one comes when one of them is done."""
        bus = await desk.bus(desk.declared(consumer=patient(desk)))
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish_many(
            [Publication(subject=desk.subject(), payload=b"", message_id=str(number)) for number in range(5)]
        )

        out = list(await consumer.fetch(10, SOON_SECONDS))
        more = await consumer.fetch(10, 0.3)
        pending_count = await consumer.pending_count()
        await out[0].ack()

        assert [delivery.message.message_id for delivery in out] == ["0", "1", "2"]
        assert (more, pending_count) == ([], 2)
        assert only(await consumer.fetch(10, SOON_SECONDS)).message.message_id == "3"

    async def test_a_nak_waits_as_long_as_it_says(self, desk: Desk) -> None:
        """Not at once, and not only after the ack wait."""
        bus = await desk.bus(desk.declared(consumer=patient(desk)))
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"", message_id="1")
        delivery = only(await consumer.fetch(1, SOON_SECONDS))

        started = time.monotonic()
        await delivery.nak(1.0)
        again = only(await consumer.fetch(1, 2 * SOON_SECONDS))

        assert 0.9 <= time.monotonic() - started < SOON_SECONDS
        assert again.delivered_count == 2

    async def test_work_in_progress_is_not_given_to_others(self, desk: Desk) -> None:
        """A sign of life is another ack wait."""
        bus = await desk.bus()
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"", message_id="1")
        delivery = only(await consumer.fetch(1, SOON_SECONDS))

        for _ in range(4):
            await asyncio.sleep(ACK_WAIT_SECONDS / 2)
            await delivery.in_progress()
            assert await consumer.fetch(1, 0.05) == []

        assert only(await consumer.fetch(1, SOON_SECONDS)).delivered_count == 2

    async def test_a_terminated_message_never_comes_again(self, desk: Desk) -> None:
        """The caller has put it aside."""
        bus = await desk.bus()
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"", message_id="1")

        await only(await consumer.fetch(1, SOON_SECONDS)).term("no\nvalid fact")

        assert await consumer.fetch(1, 2 * ACK_WAIT_SECONDS) == []

    # --- projections

    async def test_a_projection_goes_on_where_it_was_told_to(self, desk: Desk) -> None:
        """After the sequence given, only the subjects asked for, then whatever comes."""
        bus = await desk.bus()
        for number, word in enumerate(("asked", "done", "asked", "done", "asked")):
            await bus.publish(desk.subject(word), b"", message_id=str(number))
        projection = await bus.projection(desk.stream.name, subjects=[desk.subject()], after_sequence=1)
        lag_before = await projection.lag_count()
        seen: list[int] = []

        async with asyncio.timeout(SOON_SECONDS):
            async for batch in projection:
                seen += [message.sequence for message in batch]
                if len(seen) == 2:
                    assert await projection.lag_count() == 0
                    await bus.publish(desk.subject(), b"", message_id="later")
                if len(seen) == 3:
                    break
        await projection.close()

        assert (lag_before, seen) == (2, [3, 5, 6])

    async def test_a_closed_projection_ends(self, desk: Desk) -> None:
        """A reader that waits is let go, not left."""
        bus = await desk.bus()
        projection = await bus.projection(desk.stream.name)

        async def drain() -> int:
            return len([batch async for batch in projection])

        reader = asyncio.create_task(drain())
        await asyncio.sleep(0.1)
        await projection.close()

        assert await asyncio.wait_for(reader, SOON_SECONDS) == 0

    async def test_a_stream_shorter_than_what_was_read_is_refused(self, desk: Desk) -> None:
        """It is not the stream we knew; waiting for it to grow would skip facts."""
        bus = await desk.bus()
        await bus.publish(desk.subject(), b"", message_id="1")

        with pytest.raises(ConfigError, match="ends at sequence 1, but was read up to 7"):
            await bus.projection(desk.stream.name, after_sequence=7)

    # --- declarations

    async def test_what_is_declared_can_be_ensured_again(self, desk: Desk) -> None:
        """Every replica does so at its start."""
        await desk.bus()
        await desk.bus()

    async def test_a_drifted_stream_is_refused_with_both_values(self, desk: Desk) -> None:
        """Each differing field is told, in one go; nothing is changed."""
        await desk.bus()
        drifted = StreamSpec(
            name=desk.stream.name, subjects=(f"{desk.root}.>", f"x{desk.root}.>"), description="of a test",
            max_age_seconds=7200, max_bytes=64 * MEBIBYTE, message_ttls=desk.stream.message_ttls,
        )  # fmt: skip

        with pytest.raises(ConfigError) as caught:
            await desk.bus(desk.declared(stream=drifted))

        assert f"stream {desk.stream.name}: max_age is 3600 s on the broker, 7200 s is declared" in str(caught.value)
        assert f"subjects is ['{desk.root}.>'] on the broker" in str(caught.value)
        await desk.bus()

    async def test_a_drifted_consumer_is_refused_with_both_values(self, desk: Desk) -> None:
        """At `ensure`, and at binding too; an existing durable is never silently kept or changed."""
        await desk.bus()
        drifted = await desk.connect(desk.declared(consumer=patient(desk)))
        sentence = "ack_wait is 0.5 s on the broker, 30 s is declared"

        with pytest.raises(ConfigError, match=sentence):
            await drifted.ensure()
        with pytest.raises(ConfigError, match=sentence):
            await drifted.effect_consumer(desk.consumer.durable)

    async def test_a_consumer_that_is_not_there_is_refused(self, desk: Desk) -> None:
        """Undeclared and not made are two different mistakes."""
        bus = await desk.connect(desk.declared())

        with pytest.raises(ConfigError, match="does not exist; make it with `ensure`"):
            await bus.effect_consumer(desk.consumer.durable)
        with pytest.raises(ConfigError, match="nobody-x-act is not among those declared"):
            await bus.effect_consumer("nobody-x-act")

    # --- dead letters

    @pytest.fixture
    async def mortuary(self, desk: Desk) -> tuple[Bus, DeadLetters]:
        """A bus that declares dead letters and advisories too."""
        aside = tuple(spec for spec in STREAMS if spec.name in (DEAD, ADVISORY))
        impatient = ConsumerSpec(
            durable=desk.consumer.durable, stream=desk.stream.name, subjects=desk.consumer.subjects,
            ack_wait_seconds=0.2, max_ack_pending=10, max_deliver=2,
        )  # fmt: skip
        bus = await desk.bus(Declared(streams=(desk.stream, *aside), consumers=(impatient, GIVEN_UP)))
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
        """The last sequence of a page is where the next goes on."""
        bus, letters = mortuary
        for number in range(5):
            await self._bury(bus, letters, desk, f"m{number}")

        first = await letters.page(count_max=3)
        second = await letters.page(after_sequence=first[-1].sequence, count_max=3)

        assert [letter.message_id for letter in (*first, *second)] == ["m0", "m1", "m2", "m3", "m4"]
        assert await letters.page(after_sequence=second[-1].sequence) == []

    async def test_a_resubmitted_message_is_handled_again(self, desk: Desk, mortuary: tuple[Bus, DeadLetters]) -> None:
        """Under a new id, so that it is not taken for a repeat, and the letter says that it was sent."""
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

    async def test_no_such_dead_letter(self, mortuary: tuple[Bus, DeadLetters]) -> None:
        """A wrong number is said, not ignored."""
        _, letters = mortuary

        with pytest.raises(PermanentError, match="there is no dead letter 7"):
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

        collected = 0
        async with asyncio.timeout(2 * SOON_SECONDS):
            while not collected:
                assert await consumer.fetch(1, 0.2) == []
                collected = await letters.collect_given_up(at=AT, wait_seconds_max=0.2)

        (letter,) = await letters.page()
        assert (letter.payload, letter.service, letter.error_kind) == (b"poison", "service", "MaxDeliveries")
        assert "was given it 2 times" in letter.reason

    async def _bury(self, bus: Bus, letters: DeadLetters, desk: Desk, message_id: str) -> None:
        ack = await bus.publish(desk.subject(), message_id.encode(), message_id=message_id)
        message = await bus.message_at(ack.stream, ack.sequence)
        assert message is not None
        await letters.set_aside(
            message, service="scaler", reason="no", error_kind="InvalidFact", delivered_count=1, at=AT
        )


def patient(desk: Desk) -> ConsumerSpec:
    """The desk's consumer with the ack wait of production."""
    return ConsumerSpec(
        durable=desk.consumer.durable, stream=desk.stream.name, subjects=desk.consumer.subjects,
        max_ack_pending=desk.consumer.max_ack_pending, max_deliver=desk.consumer.max_deliver,
    )  # fmt: skip
