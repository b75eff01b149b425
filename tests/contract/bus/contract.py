"""What every bus does. Adapters inherit the claims and bring a broker to prove them on."""

import asyncio
import time
from datetime import UTC, datetime

import msgspec
import pytest
import structlog
from tests.contract.bus.desk import ACK_WAIT_SECONDS, SOON_SECONDS, Desk, only, patient, read

from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.streams import MEBIBYTE, MESSAGE_BYTES_MAX, StreamSpec
from gpu_autoscaler.model.errors import MIGRATE_COMMAND, ConfigError, PermanentError, StalePlan


class BusContract:
    """Inherit, and give a `desk`."""

    @pytest.fixture
    def desk(self) -> Desk:
        pytest.fail("an adapter's tests bring their own desk")

    # --- storing

    async def test_a_message_comes_back_as_it_was_sent(self, desk: Desk) -> None:
        """Subject, payload, id and headers survive; the sequence is that of the ack."""
        bus = await desk.bus()
        headers = {"Answer-To": "ask 7: grün"}

        ack = await bus.publish(desk.subject(), b'{"a": 1}', message_id="first", headers=headers)

        message = (await read(bus, desk.stream.name, 1))[0]
        assert message == await bus.message_at(desk.stream.name, ack.sequence)
        assert message == await bus.last_message(desk.stream.name, desk.subject())
        assert (message.subject, message.payload, message.message_id) == (desk.subject(), b'{"a": 1}', "first")
        assert (message.stream, message.sequence, ack.is_duplicate) == (desk.stream.name, 1, False)
        assert message.headers == headers
        assert abs((datetime.now(UTC) - message.stored_at).total_seconds()) < 60

    async def test_an_id_is_stored_once(self, desk: Desk) -> None:
        """A repeat is reported as a duplicate, with the sequence of the first."""
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
        assert await bus.last_message(desk.stream.name, desk.subject()) is None

    async def test_a_stream_reports_its_identity_and_its_sequences(self, desk: Desk) -> None:
        """Since when, from where, up to where: the same for all who ask; a stream that is not there is an error."""
        bus, other = await desk.bus(), await desk.bus()
        empty = await bus.span(desk.stream.name)
        await bus.publish(desk.subject(), b"1", message_id="one")
        await bus.publish(desk.subject(), b"2", message_id="two")

        span = await other.span(desk.stream.name)

        assert (empty.first_sequence, empty.last_sequence) == (1, 0)
        assert (span.first_sequence, span.last_sequence) == (1, 2)
        assert span.created_at == empty.created_at
        assert abs((datetime.now(UTC) - span.created_at).total_seconds()) < 60
        with pytest.raises(PermanentError, match="stream NOWHERE does not exist"):
            await bus.span("NOWHERE")

    async def test_too_large_a_message_is_refused_before_sending(self, desk: Desk) -> None:
        """A retry cannot help. A message of maximum size is stored."""
        bus = await desk.bus()

        with pytest.raises(PermanentError, match=r"'big'.*at most 8323072 are allowed"):
            await bus.publish(desk.subject(), bytes(MESSAGE_BYTES_MAX + 1), message_id="big")
        fits = await bus.publish(desk.subject(), bytes(MESSAGE_BYTES_MAX - 1024), message_id="fits")

        stored = await bus.message_at(desk.stream.name, fits.sequence)
        assert stored is not None
        assert len(stored.payload) == MESSAGE_BYTES_MAX - 1024

    async def test_a_subject_without_a_stream_is_a_permanent_error(self, desk: Desk) -> None:
        """A message that no stream takes is never dropped silently."""
        bus = await desk.bus()

        with pytest.raises(PermanentError, match=r"no stream stores messages on nowhere\."):
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

    async def test_fence_on_discarded_message_names_empty_subject(self, desk: Desk) -> None:
        """A subject whose messages all aged out has the last sequence 0, and 0 is a fence for one of two again."""
        bus, other = await desk.bus(), await desk.bus()
        subject = desk.subject("sampled") + ".n1"
        parent = await bus.publish(subject, b"", message_id="p0", expected_last_subject_sequence=0)
        async with asyncio.timeout(SOON_SECONDS):
            while await bus.message_at(desk.stream.name, parent.sequence) is not None:
                await asyncio.sleep(0.1)

        with pytest.raises(StalePlan) as empty:
            await bus.publish(subject, b"", message_id="p1", expected_last_subject_sequence=parent.sequence)
        assert empty.value.last_sequence == 0

        after = await bus.publish(subject, b"", message_id="p1", expected_last_subject_sequence=0)
        with pytest.raises(StalePlan) as taken:
            await other.publish(subject, b"", message_id="p2", expected_last_subject_sequence=0)
        assert taken.value.last_sequence == after.sequence == 2

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
        one, two = [await desk.bus(desk.declared(consumer=patient(desk))) for _ in range(2)]
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

    async def test_a_nak_with_a_delay_is_redelivered_after_it(self, desk: Desk) -> None:
        """Not at once, and not only after the ack wait."""
        bus = await desk.bus(desk.declared(consumer=patient(desk)))
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"", message_id="1")
        delivery = only(await consumer.fetch(1, SOON_SECONDS))

        started = time.monotonic()
        await delivery.nak(1.0)
        again = only(await consumer.fetch(1, SOON_SECONDS))

        assert time.monotonic() - started >= 0.9
        assert again.delivered_count == 2

    async def test_work_in_progress_is_not_given_to_others(self, desk: Desk) -> None:
        """A sign of life is another ack wait."""
        bus = await desk.bus()
        consumer = await bus.effect_consumer(desk.consumer.durable)
        await bus.publish(desk.subject(), b"", message_id="1")
        delivery = only(await consumer.fetch(1, SOON_SECONDS))

        for _ in range(6):
            await asyncio.sleep(ACK_WAIT_SECONDS / 4)
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

    async def test_a_projection_resumes_from_the_given_sequence(self, desk: Desk) -> None:
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
        """A waiting reader is released."""
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

    async def test_a_reader_notices_what_was_discarded_before_it_read_it(self, desk: Desk) -> None:
        """Going on with what is left would skip facts in silence; a reader from the beginning takes what there is."""
        small = msgspec.structs.replace(desk.stream, max_bytes=20_000, message_ttls=())
        bus = await desk.bus(desk.declared(stream=small))
        for number in range(5):
            await bus.publish(desk.subject(), b"", message_id=f"early-{number}")
        many = [Publication(subject=desk.subject(), payload=bytes(1000), message_id=f"m{n}") for n in range(100)]
        await bus.publish_many(many)
        first = (await bus.span(desk.stream.name)).first_sequence
        assert first > 6

        async def read_on() -> None:
            async for _ in await bus.projection(desk.stream.name, after_sequence=5):
                pass

        with pytest.raises(ConfigError, match=f"has discarded messages 6 to {first - 1} before they were read"):
            await asyncio.wait_for(read_on(), 20)
        assert (await read(bus, desk.stream.name, 1))[0].sequence == first

    async def test_a_quiet_reader_of_few_subjects_has_missed_nothing(self, desk: Desk) -> None:
        """Messages on other subjects pass by and are discarded: it had nothing to read among them."""
        small = msgspec.structs.replace(desk.stream, max_bytes=20_000, message_ttls=())
        bus = await desk.bus(desk.declared(stream=small))
        await bus.publish(desk.subject("mine"), b"", message_id="first")
        projection = await bus.projection(desk.stream.name, subjects=[desk.subject("mine")])
        seen = []
        async for batch in projection:
            seen += [message.sequence for message in batch]
            if len(seen) == 1:
                for start in range(0, 100, 10):
                    await bus.publish_many(
                        [
                            Publication(subject=desk.subject("other"), payload=bytes(1000), message_id=f"m{start + n}")
                            for n in range(10)
                        ]
                    )
                    assert await projection.lag_count() == 0
                await bus.publish(desk.subject("mine"), b"", message_id="last")
            else:
                break
        await projection.close()
        assert seen == [1, 102]

    # --- declarations

    async def test_what_is_declared_can_be_ensured_again(self, desk: Desk) -> None:
        """Every replica does so at its start."""
        await desk.bus()
        await desk.bus()

    async def test_replicas_that_start_together_agree(self, desk: Desk) -> None:
        """Whoever is first makes it, the others find it."""
        buses = await asyncio.gather(*(desk.bus() for _ in range(4)))

        assert [await bus.last_sequence(desk.stream.name) for bus in buses] == [0, 0, 0, 0]

    async def test_a_drifted_stream_is_refused_with_both_values(self, desk: Desk) -> None:
        """All differing fields are reported at once; nothing is changed."""
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

    async def test_limits_that_differ_are_reported_with_both_values(self, desk: Desk) -> None:
        """The process works with the broker's values until they are migrated; nothing is changed."""
        await desk.bus()
        stream = msgspec.structs.replace(desk.stream, max_age_seconds=7200, max_bytes=MEBIBYTE, is_append_only=False)

        with structlog.testing.capture_logs() as logs:
            bus = await desk.bus(desk.declared(stream=stream, consumer=patient(desk)))
        await bus.publish(desk.subject(), b"", message_id="1")
        delivery = only(await (await bus.effect_consumer(desk.consumer.durable)).fetch(10, SOON_SECONDS))

        assert delivery.message.message_id == "1"
        (warning,) = [log for log in logs if log["event"] == "broker runs with other values than declared"]
        assert warning["differences"] == [
            f"stream {stream.name}: max_age is 3600 s on the broker, 7200 s is declared",
            f"stream {stream.name}: max_bytes is {64 * MEBIBYTE} on the broker, {MEBIBYTE} is declared",
            (
                f"consumer {desk.consumer.durable} of {stream.name}: "
                f"ack_wait is {ACK_WAIT_SECONDS:g} s on the broker, 4 s is declared"
            ),
        ]
        assert warning["step"] == MIGRATE_COMMAND
        assert (await bus.span(stream.name)).bytes_max == 64 * MEBIBYTE, "whoever computes with a limit reads this one"

    async def test_a_stream_that_is_not_append_only_is_refused(self, desk: Desk) -> None:
        """What was decided could be deleted."""
        await desk.bus()

        with pytest.raises(ConfigError, match=r"deny_delete is .+ on the broker, True is declared"):
            await desk.bus(desk.declared(stream=msgspec.structs.replace(desk.stream, is_append_only=True)))

    async def test_a_stream_that_need_not_be_append_only_is_used(self, desk: Desk) -> None:
        """What is stored and delivered is the same, and no server allows deletions again."""
        await desk.bus(desk.declared(stream=msgspec.structs.replace(desk.stream, is_append_only=True)))

        assert await (await desk.bus()).last_sequence(desk.stream.name) == 0

    async def test_messages_are_stored_where_a_time_to_live_is_not_allowed_yet(self, desk: Desk) -> None:
        """They live as long as the stream says, which was made by an earlier release."""
        await desk.bus(desk.declared(stream=msgspec.structs.replace(desk.stream, message_ttls=())))
        bus = await desk.bus()

        acks = [await bus.publish(desk.subject("sampled"), b"", message_id=str(number)) for number in range(2)]

        assert [ack.sequence for ack in acks] == [1, 2]

    async def test_a_consumer_with_another_filter_is_updated_in_place(self, desk: Desk) -> None:
        """Another release consumes other facts: nothing that was handled comes again, and the new subject comes."""
        bus = await desk.bus()
        await bus.publish(desk.subject(), b"", message_id="before")
        await only(await (await bus.effect_consumer(desk.consumer.durable)).fetch(10, SOON_SECONDS)).ack()
        wider = msgspec.structs.replace(desk.consumer, subjects=(desk.subject(), desk.subject("other")))

        later = await desk.bus(desk.declared(consumer=wider))
        await later.publish(desk.subject("other"), b"", message_id="after")
        consumer = await later.effect_consumer(desk.consumer.durable)

        assert only(await consumer.fetch(10, SOON_SECONDS)).message.message_id == "after"

    async def test_the_position_of_a_consumer_is_what_is_acknowledged_without_a_gap(self, desk: Desk) -> None:
        """Messages of other subjects count as passed only where none of its own is waiting."""
        bus = await desk.bus()
        consumer = await bus.effect_consumer(desk.consumer.durable)
        assert await consumer.acknowledged_sequence() == 0
        for number, word in enumerate(("asked", "asked", "asked", "other")):
            await bus.publish(desk.subject(word), b"", message_id=str(number))
        assert await consumer.acknowledged_sequence() == 0
        first, second, third = await consumer.fetch(10, SOON_SECONDS)
        await first.ack()
        await third.ack()
        assert await consumer.acknowledged_sequence() == 1
        await second.ack()
        assert await consumer.acknowledged_sequence() == 4

    async def test_a_lane_starts_where_its_origin_has_arrived(self, desk: Desk) -> None:
        """What was acknowledged without a gap does not come again; what was in hand does."""
        bus = await desk.bus()
        origin = await bus.effect_consumer(desk.consumer.durable)
        for number in range(3):
            await bus.publish(desk.subject(), b"", message_id=str(number))
        first, _, third = await origin.fetch(10, SOON_SECONDS)
        await first.ack()
        await third.ack()
        lane = msgspec.structs.replace(
            desk.consumer, durable=f"{desk.consumer.durable}-lane", split_from=desk.consumer.durable
        )

        later = await desk.bus(desk.declared(consumer=lane))
        deliveries = await (await later.effect_consumer(lane.durable)).fetch(10, SOON_SECONDS)
        await desk.bus(desk.declared(consumer=lane))

        assert [delivery.message.message_id for delivery in deliveries] == ["1", "2"]

    async def test_a_consumer_that_is_not_there_is_refused(self, desk: Desk) -> None:
        """An undeclared consumer and a missing one are different errors."""
        bus = await desk.connect(desk.declared())

        with pytest.raises(ConfigError, match="does not exist; create it with `ensure`"):
            await bus.effect_consumer(desk.consumer.durable)
        with pytest.raises(ConfigError, match="nobody-x-act is not declared"):
            await bus.effect_consumer("nobody-x-act")
