"""A publisher's clock that is ahead is corrected by the time at which the broker stored the message."""

from datetime import timedelta

import pytest
import structlog
from tests.support.runners import Place, Probe, running, until
from tests.support.stories import T0, notice

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.envelope import AHEAD_MAX, Envelope, Recorded, encode, recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.pod import PodWatched
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import FactId

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


def stored(fact: Fact, *, said_at_offset: timedelta, sequence: int = 1, after: timedelta = timedelta()) -> Recorded:
    """Return the fact as a publisher whose clock is off by this much published it."""
    stored_at = T0 + after
    envelope = Envelope(id=FactId(f"n{sequence}"), source="/node", time=stored_at + said_at_offset, fact=fact)
    return recorded(envelope, fact.stream(), sequence, stored_at)


def received(name: str, offset: timedelta) -> SpotNoticeReceived:
    """Return a notice, read by a clock that is off by this much."""
    fact = notice(name, reclaim_at=T0 + HOUR, at=T0 + offset)[0].fact
    assert isinstance(fact, SpotNoticeReceived)
    return fact


@pytest.mark.parametrize("offset", [-8 * HOUR, timedelta(), AHEAD_MAX])
def test_late_and_slightly_early_facts_keep_their_time(offset: timedelta) -> None:
    """A publisher that was cut off for hours publishes valid facts late."""
    entry = stored(received("n1", offset), said_at_offset=offset)
    assert (entry.envelope.time, entry.ahead_seconds) == (T0 + offset, 0.0)
    assert entry.fact == received("n1", offset)
    assert entry.stored_at == T0


def test_a_clock_that_is_ahead_is_corrected_in_the_fact_too() -> None:
    """The deadline is the cloud's and stays."""
    entry = stored(received("n1", 8 * HOUR), said_at_offset=8 * HOUR)
    fact = entry.fact
    assert isinstance(fact, SpotNoticeReceived)
    assert entry.envelope.time == fact.received_at == T0 + AHEAD_MAX
    assert fact.reclaim_at == T0 + HOUR
    assert entry.ahead_seconds == 8 * 3600


def test_one_clock_ahead_hides_no_notice_of_others() -> None:
    """The state measured ages by the newest fact: every true notice was outlived when it arrived, for hours."""
    ahead = stored(received("n1", 8 * HOUR), said_at_offset=8 * HOUR)
    true = stored(received("n2", MINUTE), said_at_offset=timedelta(), sequence=2, after=MINUTE)
    state = fold(EMPTY_STATE, [ahead, true])
    assert {record.notice.node_name for record in state.notices.values()} == {"n1", "n2"}


def test_a_watch_of_the_future_does_not_look_fresh_for_hours() -> None:
    """The heartbeat of a host that was stepped back later."""
    entry = stored(PodWatched(epoch=1, version=1, watched_at=T0 + 8 * HOUR), said_at_offset=8 * HOUR)
    assert isinstance(entry.fact, PodWatched)
    assert entry.fact.watched_at == T0 + AHEAD_MAX


class Reader(Probe):
    """Folds notices."""

    name = "reader"
    folds = (SpotNoticeReceived,)


async def test_a_reader_reports_the_publisher() -> None:
    """Counted for each fact; the notice is in the state."""
    place, reader = Place(), Reader()
    async with running(place, reader) as runner:
        said_at = place.now() + 8 * HOUR
        await place.say(notice("n1", reclaim_at=place.now() + HOUR, at=said_at)[0].fact, at=said_at)
        await until(lambda: bool(reader.view.state.notices))
        assert runner.metrics.facts_dated_ahead.labels("spot")._value.get() == 1.0


async def test_a_publisher_is_reported_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of publishers is remembered: with one too many, all are reported again."""
    monkeypatch.setattr("gpu_autoscaler.runtime.loop_context.CLOCK_SOURCES_COUNT_MAX", 2)
    place, reader = Place(), Reader()
    sources = ("/a", "/b", "/a", "/c", "/a")
    with structlog.testing.capture_logs() as lines:
        async with running(place, reader):
            for number, source in enumerate(sources):
                at = place.now() + 8 * HOUR
                fact = notice(f"n{number}", reclaim_at=at, at=at)[0].fact
                envelope = Envelope(id=FactId(f"{number}"), source=source, time=at, fact=fact)
                await place.send(fact.subject(), encode(envelope), envelope.id)
            await until(lambda: len(reader.view.state.notices) == len(sources))
    reported = [line["source"] for line in lines if line["event"].startswith("clock of a publisher")]
    assert reported == ["/a", "/b", "/c", "/a"]
