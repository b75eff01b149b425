"""The shadow compares each real plan with a plan from the same facts, in any order of streams."""

import random
from collections.abc import Iterator

import msgspec
import pytest
from tests.replay.histories_data import DAYS, history_of

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.decisions import Difference
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.replay.recording import Recording, load
from gpu_autoscaler.replay.retrace import retrace
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.shadow import recent
from gpu_autoscaler_services.shadow.service import Digests, Shadow


@pytest.fixture(autouse=True)
def _small_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many generations in one day."""
    monkeypatch.setattr(recent, "GENERATION_COUNT", 60)


def _shuffled(recording: Recording, seed: int) -> Iterator[list[Recorded]]:
    """The day as it may arrive: each stream in its order, one up to twenty facts behind another."""
    chance = random.Random(seed)  # noqa: S311 - an order that comes again with its seed
    waiting = {stream: [] for stream in ("POD", "NODE", "GPU", "SPOT", "JOB", "SCALING")}  # type: dict[str, list[Recorded]]
    for item in recording.facts:
        waiting[item.recorded.stream].append(item.recorded)
        for stream, batch in waiting.items():
            if batch and (len(batch) >= 20 or chance.random() < 0.3):
                yield batch
                waiting[stream] = []
    yield from (batch for batch in waiting.values() if batch)


async def _published_during(recording: Recording, policy: ScalingPolicy, seed: int) -> list[ShadowPlanMade]:
    """All that the shadow says of the day."""
    real = recording.head.policy
    view = StateView()
    shadow = Shadow(view, real, policy, Digests(shadow=policy_digest(policy), real=policy_digest(real), core="core"))
    published: list[ShadowPlanMade] = []
    for batch in _shuffled(recording, seed):
        view.advance(fold(view.state, batch), {batch[-1].stream: batch[-1].sequence})
        shadow.on_folded(batch)
        while isinstance(outcome := await shadow.on_tick(batch[-1].envelope.time), Outcome):
            (fact,) = outcome.facts
            assert isinstance(fact, ShadowPlanMade)
            published.append(fact)
            envelope = Envelope(id=FactId(fact.plan_id), source="/shadow", time=fact.plan.as_of, fact=fact)
            shadow.on_folded([Recorded(envelope=envelope, stream="SHADOW", sequence=len(published))])
    return published


@pytest.mark.parametrize("name", DAYS)
async def test_same_policy_never_differs_from_real_plans(name: str) -> None:
    """Except where today's code differs from the recording: facts of the cut are awaited, later ones excluded."""
    recording = load(history_of(name))

    published = await _published_during(recording, recording.head.policy, seed=7)

    changed = {deviation.difference.subject for deviation in retrace(recording, recording.head.policy).deviations}
    differing = (
        difference.subject for fact in published if fact.real_plan_id is not None for difference in fact.differences
    )
    assert set(differing) <= changed


@pytest.mark.parametrize("seed", [4, 8, 11])
async def test_no_real_decision_is_missed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A purchase is found although it is executed at once, as in a replay of the day. Two generations are longer than
    the streams of the day are behind each other, so the state of every real plan is remembered."""
    monkeypatch.setattr(recent, "GENERATION_COUNT", 120)
    recording = load(history_of("burst"))
    narrow = msgspec.structs.replace(recording.head.policy, nodes_count_max=3)

    published = await _published_during(recording, narrow, seed=seed)

    wanted = {
        deviation.difference.subject
        for deviation in retrace(recording, narrow).decisions
        if _is_purchase(deviation.difference)
    }
    assert wanted
    assert wanted <= {
        difference.subject for fact in published for difference in fact.differences if _is_purchase(difference)
    }


def _is_purchase(difference: Difference) -> bool:
    return difference.made.what == "buy_node"
