"""What would have been under another policy: the recorded world played twice by `tools/rerun.py`, under the policy of
the time and under the other. What the record itself says stands beside both, so that everybody sees how far the model
is off before they believe the difference.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

import msgspec

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.words.wording import counted, instant
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.tools.history import Stored
from gpu_autoscaler.tools.outcome import Outcome, measure
from gpu_autoscaler.tools.recording import Recording
from gpu_autoscaler.tools.rerun import Rerun, rerun
from gpu_autoscaler.tools.script import Script, script_of

_Step = tuple[datetime, str]  # a decision, without the names that differ from run to run


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    from_at: Instant
    to_at: Instant
    recorded: Outcome
    modelled: Outcome  # under the policy of the time
    other: Outcome  # under the other policy
    parted_at: Instant | None  # from then on the other world is the model's alone; None: it never was
    parted_by: str  # the first decision that was another
    taken_over: tuple[str, ...]  # from the record, in sentences
    assumed: tuple[str, ...]  # where the recorded world would have answered otherwise, and how that was modelled


def what_if(recording: Recording, policy: ScalingPolicy, roles: Roles) -> WhatIf:
    """Return what would have been under this policy. Raises ConfigError where nothing was for sale in the record."""
    script = script_of(recording)
    if not script.prices:
        raise ConfigError("history", ["it has no price list (spot.offers_sampled): nobody knows what could be bought"])
    same, other = (rerun(script, one, roles) for one in (recording.head.policy, policy))
    parted = _parted(same.facts, other.facts)
    return WhatIf(
        from_at=script.from_at,
        to_at=script.to_at,
        recorded=measure(recording.facts, script.from_at, script.to_at, recording.head.state),
        modelled=measure(same.facts, script.from_at, script.to_at),
        other=measure(other.facts, script.from_at, script.to_at),
        parted_at=None if parted is None else parted[0],
        parted_by="" if parted is None else parted[1],
        taken_over=tuple(_taken_over(script)),
        assumed=tuple(_assumed(script, other)),
    )


def _parted(same: Sequence[Stored], other: Sequence[Stored]) -> tuple[datetime, str] | None:
    """The first decision of one of the two worlds that the other does not have."""
    steps, others = list(_steps(same)), list(_steps(other))
    number = next(
        (n for n, (a, b) in enumerate(zip(steps, others, strict=False)) if a != b), min(len(steps), len(others))
    )
    candidates = [
        (at, f"{whose} decides to {words}")
        for whose, made in (("the policy of the time", steps), ("the other policy", others))
        for at, words in made[number : number + 1]
    ]
    return min(candidates, default=None)


def _steps(facts: Sequence[Stored]) -> Iterator[_Step]:
    for each in facts:
        fact = each.recorded.fact
        if isinstance(fact, ScalingPlanMade):
            for decision in fact.plan.decisions:
                yield each.at, _words(decision)


def _words(decision: AnyDecision) -> str:
    match decision:
        case BuyNode():
            return f"buy {decision.offer.key} for pool {decision.pool}"
        case DrainNode():
            return f"drain {decision.node_name} ({decision.reason.tag()})"
        case CancelDrain():
            return f"keep {decision.node_name} ({decision.reason.tag()})"
        case ReleaseInstance():
            return f"give back an instance ({decision.reason.tag()})"


def _taken_over(script: Script) -> Iterator[str]:
    boots = sum(len(seconds) for seconds in script.boot_seconds.values())
    struck = len(script.reclaims)
    yield f"{counted(len(script.arrivals), 'job')}: when each was asked for, what it needs, how long it ran"
    if script.replicas:
        yield f"{counted(len(script.replicas), 'group')} of other pods with GPUs: the most that there were at a time"
    yield f"{counted(len(script.prices), 'price list')}; {counted(boots, 'boot time')}, by type, in their order"
    yield f"{counted(len(script.refusals), 'refusal')} of the cloud, each for as long as it said"
    yield f"{counted(struck, 'notice')} for spot machines, by type and zone"
    if script.documents:
        names = sorted({one.name for accepted in script.documents for one in accepted.documents})
        yield f"policies kept as objects, merged under both policy files: {', '.join(names) or 'none in the end'}"


def _assumed(script: Script, other: Rerun) -> Iterator[str]:
    yield "Kubernetes, boots, drains and ends of machines are the simulator's; it begins with no machine"
    if script.machines_before_count:
        yield f"{counted(script.machines_before_count, 'machine')} ran at the beginning; the model buys its own instead"
    if script.under_way_count:
        yield (
            f"{counted(script.under_way_count, 'job')} were under way at the beginning; the model asks for them then, "
            "for the time that they had left"
        )
    yield "offers that the record was never refused are taken to have been available, at the price of the list"
    if script.guessed_count:
        yield f"{counted(script.guessed_count, 'job')} never ran in the record; they take as long as half of the others"
    if script.never_up_count:
        yield f"{counted(script.never_up_count, 'machine')} never came up in the record; in the model all do"
    if script.demanding_count:
        yield f"selectors and affinities of {counted(script.demanding_count, 'group')} of other pods are left out"
    for what, count in sorted(other.modelled.items()):
        yield f"{count} x {what}"


def notice_of(found: WhatIf) -> str:
    """Return in a sentence from when on nothing is recorded any more."""
    if found.parted_at is None:
        return "the other policy decides the same: the two worlds never part"
    return f"the worlds part at {instant(found.parted_at)}: {found.parted_by}; from there on the other one is modelled"
