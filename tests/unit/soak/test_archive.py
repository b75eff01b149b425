"""The oracle keeps what the stream has discarded, and its state is that of all facts."""

from pathlib import Path

import msgspec
from tests.soak.archive import ArchivedState, messages, state_at
from tests.support.stories import HOUR, T0, given, node, pod, synced
from tests.support.timed_facts import TimedFact

from gpu_autoscaler.bus.protocol import Message, microseconds_of
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.runtime.clock import Clock

STORY: tuple[TimedFact, ...] = (*node("n1"), *pod("a", on="n1"), *pod("b"))
FACTS = (*STORY, *synced(STORY, as_of=T0 + HOUR))


def _archived(folder: Path) -> dict[str, int]:
    """Write the story as an archive of each stream; return the last sequences."""
    last: dict[str, int] = {}
    for timed in FACTS:
        stream = timed.fact.stream()
        last[stream] = last.get(stream, 0) + 1
        fact_id = FactId(f"{stream}/{last[stream]}")
        message = Message(
            subject=timed.fact.subject(),
            payload=encode(Envelope(id=fact_id, source="/test", time=timed.at, fact=timed.fact)),
            message_id=fact_id,
            stream=stream,
            sequence=last[stream],
            stored_microseconds=microseconds_of(timed.at),
        )
        encoded = msgspec.msgpack.encode(message)
        with (folder / stream).open("ab") as file:
            file.write(len(encoded).to_bytes(4, "little") + encoded)
    return last


def test_the_state_of_the_archive_is_that_of_all_facts(tmp_path: Path) -> None:
    """Read at once or in two steps."""
    last, expected = _archived(tmp_path), given(STORY, as_of=T0 + HOUR)
    stepwise = ArchivedState(tmp_path, Clock())
    earlier = stepwise.advance(dict.fromkeys(last, 1))
    assert len(earlier.pods) == 1
    assert stepwise.advance(last).pods == state_at(tmp_path, Clock(), last).pods == expected.pods
    assert stepwise.state.nodes == expected.nodes


def test_a_message_that_is_being_written_is_read_later(tmp_path: Path) -> None:
    """The reader stops before it."""
    last = _archived(tmp_path)
    whole = (tmp_path / "POD").read_bytes()
    (tmp_path / "POD").write_bytes(whole[:-1])
    assert [message.sequence for message in messages(tmp_path, "POD")] == list(range(1, last["POD"]))
