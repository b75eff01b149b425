"""The window keeps the latest facts and folds older ones into a state, in bounded memory."""

import tracemalloc
from collections.abc import Iterable, Iterator
from datetime import datetime

from tests.support.stories import EPOCH, HOUR, MINUTE, SECOND, T0, TimedFact, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import FactId, PodUid
from gpu_autoscaler.replay.observation import Window


def recorded(stories: Iterable[TimedFact]) -> Iterator[tuple[Recorded, datetime]]:
    """Yield the facts as stored in their streams."""
    for number, each in enumerate(stories, start=1):
        envelope = Envelope(id=FactId(str(number)), source="/test", time=each.at, fact=each.fact)
        yield Recorded(envelope=envelope, stream=each.fact.stream(), sequence=number), each.at


def pod_facts(count: int) -> Iterator[TimedFact]:
    """Yield one node, then pods one after the other."""
    yield from node("n1", is_ours=False)
    for number in range(count):
        yield from pod(f"p{number}", on="n1", gpus=1, at=T0 + number * SECOND)


def test_older_facts_are_folded_into_the_state() -> None:
    """State and kept facts fold to the same as all facts; the recording starts after the last dropped fact."""
    facts = list(recorded(pod_facts(95)))
    window = Window(T0, facts_count_max=20)
    dropped = [window.add(each, at) for each, at in facts]

    kept = window.recording(policy(), T0 + HOUR)
    assert any(dropped)
    assert len(kept.facts) == window.facts_count <= 20
    assert fold(kept.head.state, [each.recorded for each in kept.facts]) == fold(
        EMPTY_STATE, [each for each, _ in facts]
    )
    assert kept.head.from_at == window.from_at <= kept.facts[0].at
    assert kept.head.sequences["POD"] == kept.facts[0].recorded.sequence - 1


def test_the_oldest_facts_of_all_streams_are_dropped() -> None:
    """A stream that is read late does not displace newer facts of another."""
    pods, nodes = list(recorded(pod_facts(30)))[1:], [TimedFact(node(f"n{number}")[-1].fact, T0) for number in range(5)]
    window = Window(T0, facts_count_max=34)
    for each, at in (*pods, *recorded(nodes)):
        window.add(each, at)

    kept = {each.recorded.stream for each in window.recording(policy(), T0 + HOUR).facts}
    assert kept == {"POD"}
    assert set(window.recording(policy(), T0 + HOUR).head.state.nodes) == {f"uid-n{number}" for number in range(5)}


def test_an_unchanged_price_list_counts_and_costs_once() -> None:
    """Lists are frequent and long; a changed list counts in full."""
    window = Window(T0, facts_count_max=1000)
    for number in range(50):
        sale = on_sale(*(offer(f"t{kind}") for kind in range(10)), at=T0 + number * MINUTE)
        (first,) = recorded(sale)
        window.add(*first)
    assert window.facts_count == 50 + 10
    kept = [each.recorded.fact for each in window.recording(policy(), T0 + HOUR).facts]
    assert all(isinstance(fact, SpotOffersSampled) for fact in kept)
    assert len({id(fact.offers) for fact in kept if isinstance(fact, SpotOffersSampled)}) == 1


def test_memory_does_not_grow_with_time() -> None:
    """Ten times the facts, most of deleted pods, take about the same memory."""

    def traced_bytes(count: int) -> int:
        window = Window(T0, facts_count_max=500)
        tracemalloc.start()
        try:
            for each, at in recorded(_churn(count)):
                window.add(each, at)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert traced_bytes(10_000) < 2 * traced_bytes(1_000)


def _churn(pods_count: int) -> Iterator[TimedFact]:
    """Yield one pod per minute, deleted with the next one."""
    for number in range(pods_count):
        at = T0 + number * MINUTE
        yield from pod(f"p{number}", on="n1", gpus=1, at=at)
        uid = PodUid(f"uid-p{number}")
        gone = PodGone(epoch=EPOCH, version=2, pod_uid=uid, namespace="default", name=f"p{number}")
        yield TimedFact(gone, at + MINUTE)
