"""What is said of work that waits for something to come, or to pass: why it waits, and when that is over.

A wait without words is an error of the type checker. Used by `core/words/sentences.py` and `core/words/remedies.py`.
"""

from typing import assert_never

from gpu_autoscaler.core.words.wording import counted, instant, named, percent, span, thing
from gpu_autoscaler.model.reasons import CapacityExpected
from gpu_autoscaler.model.waits import (
    BatchWindowOpen,
    GangBackoff,
    GangPending,
    GangIncomplete,
    GangTimedOut,
    SpotAwaited,
    SpotExcluded,
)

Waiting = CapacityExpected | BatchWindowOpen | GangIncomplete | GangPending | GangTimedOut | GangBackoff | SpotAwaited | SpotExcluded


def why_waiting(reason: Waiting) -> str:
    """Return why it waits, as a sentence."""
    match reason:
        case CapacityExpected():
            when = "soon" if reason.expected_at is None else f"about {instant(reason.expected_at)}"
            return f"Room on {reason.node} is expected {when}."
        case BatchWindowOpen():
            count = reason.members_count
            who = "the one that is here waits" if count == 1 else f"the {count} that are here wait"
            return (
                f"More work is just coming, and what is bought for all of it at once costs less: {who} for the rest, "
                f"until {instant(reason.until)} at most."
            )
        case GangIncomplete():
            placed = f"{reason.members_placed} of {counted(reason.members_count, 'member')}"
            return f"Only {placed} of job {reason.job_id} have a place; it starts whole or not at all."
        case GangPending():
            return f"Job {reason.job_id} starts without it, and those that it cannot start without have no place yet."
        case GangTimedOut():
            since, most = span(reason.bought_seconds), span(reason.complete_seconds_max)
            return f"Nodes of {thing(reason.gang)} were bought {since} ago and are not all usable; {most} are allowed."
        case GangBackoff():
            tries = "once" if reason.abandoned_count == 1 else f"{reason.abandoned_count} times in a row"
            return (
                f"Nodes for {thing(reason.gang)} were given back {tries}, as the rest could not be had; nothing is "
                f"bought for it before {instant(reason.retry_at)}."
            )
        case SpotAwaited():
            saving = percent(reason.saving_ratio)
            return (
                f"Spot ({named(reason.offers)}) is not to be had now and costs {saving} less than what is; work of low "
                f"priority waits for it until {instant(reason.until)}."
            )
        case SpotExcluded():
            times = counted(reason.interruptions_count, "time")
            return (
                f"It lost its place {times}, so its next one is on no spot before {instant(reason.until)}, be it free; "
                f"{counted(reason.pods_remaining_count, 'pod')} of it {'has' if reason.pods_remaining_count == 1 else 'have'} to stop "
                "first."
            )
        case _:
            assert_never(reason)


def over_when(reason: Waiting) -> str:
    """Return what has to happen, as the end of `it starts when ...`."""
    match reason:
        case CapacityExpected():
            when = "" if reason.expected_at is None else f", about {instant(reason.expected_at)}"
            return f"{reason.node} takes it{when}"
        case BatchWindowOpen():
            return f"nothing more comes, or at {instant(reason.until)}, and its node is there"
        case GangIncomplete():
            missing = reason.members_count - reason.members_placed
            return f"the other {counted(missing, 'member')} {'has' if missing == 1 else 'have'} a place as well"
        case GangPending():
            return f"job {reason.job_id} has its place, and there is room for more of it"
        case GangTimedOut():
            return f"all its nodes come within {span(reason.complete_seconds_max)}, or complete_seconds_max is raised"
        case GangBackoff():
            return f"its wait is over at {instant(reason.retry_at)} and all of its nodes can be had"
        case SpotAwaited():
            return f"spot can be had again, or at {instant(reason.until)} on what is dearer"
        case SpotExcluded():
            return "its pods are gone and there is room that nobody takes back"
        case _:
            assert_never(reason)
