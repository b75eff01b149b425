"""The shadow stands beside each real plan with just what that plan was made from, in whichever order streams come."""

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
    for each in recording.facts:
        waiting[each.recorded.stream].append(each.recorded)
        for stream, batch in waiting.items():
            if batch and (len(batch) >= 20 or chance.random() < 0.3):
                yield batch
                waiting[stream] = []
    yield from (batch for batch in waiting.values() if batch)


async def _lived_through(recording: Recording, policy: ScalingPolicy, seed: int) -> list[ShadowPlanMade]:
    """All that the shadow says of the day."""
    real = recording.head.policy
    view = StateView()
    shadow = Shadow(view, real, policy, Digests(shadow=policy_digest(policy), real=policy_digest(real), core="core"))
    said: list[ShadowPlanMade] = []
    for batch in _shuffled(recording, seed):
        view.advance(fold(view.state, batch), {batch[-1].stream: batch[-1].sequence})
        shadow.on_folded(batch)
        while isinstance(outcome := await shadow.on_tick(batch[-1].envelope.time), Outcome):
            (fact,) = outcome.facts
            assert isinstance(fact, ShadowPlanMade)
            said.append(fact)
            envelope = Envelope(id=FactId(fact.plan_id), source="/shadow", time=fact.plan.as_of, fact=fact)
            shadow.on_folded([Recorded(envelope=envelope, stream="SHADOW", sequence=len(said))])
    return said


@pytest.mark.parametrize("name", DAYS)
async def test_the_same_policy_never_differs_from_a_real_plan(name: str) -> None:
    """But where today's code differs from the recorded day's anyway: what is on its way when a plan comes is waited
    for, and what came after it is not counted.
    """
    recording = load(history_of(name))

    said = await _lived_through(recording, recording.head.policy, seed=7)

    changed = {one.difference.subject for one in retrace(recording, recording.head.policy).found}
    beside = (one.subject for fact in said if fact.real_plan_id is not None for one in fact.differences)
    assert set(beside) <= changed


async def test_what_a_real_plan_does_and_the_shadow_would_not_is_never_missed() -> None:
    """A purchase is seen though it is carried out at once: as many as a replay of the day finds at its plans."""
    recording = load(history_of("burst"))
    narrow = msgspec.structs.replace(recording.head.policy, nodes_count_max=3)

    said = await _lived_through(recording, narrow, seed=11)

    wanted = {one.difference.subject for one in retrace(recording, narrow).decisions if _is_purchase(one.difference)}
    assert wanted
    assert wanted <= {one.subject for fact in said for one in fact.differences if _is_purchase(one)}


def _is_purchase(difference: Difference) -> bool:
    return difference.made.what == "buy_node"
