"""What a walk through a recorded history found, in lines for people. Equal walks give equal lines."""

from collections import defaultdict
from collections.abc import Iterator

from gpu_autoscaler.core.words.wording import counted, instant, span
from gpu_autoscaler.tools.retrace import Found, Retraced

EXAMPLES_COUNT_MAX = 5  # of one kind of difference


def told(retraced: Retraced, examples_count_max: int = EXAMPLES_COUNT_MAX) -> Iterator[str]:
    """Yield the sum, then each kind of difference with its first examples: decisions first, then what was held back."""
    yield summary(retraced)
    by_kind: defaultdict[tuple[bool, str], list[Found]] = defaultdict(list)
    for each in retraced.found:
        by_kind[not each.difference.is_decision, each.difference.kind].append(each)
    for (_, kind), found in sorted(by_kind.items()):
        yield ""
        yield f"{len(found)} x {kind}"
        for each in found[:examples_count_max]:
            yield from _example(each)
        if (more := len(found) - examples_count_max) > 0:
            yield f"  and {more} more"


def summary(retraced: Retraced) -> str:
    """Return the figures in one sentence."""
    decided = len(retraced.decisions)
    held = len(retraced.found) - decided
    return (
        f"{counted(retraced.plans_count, 'recorded plan')} and "
        f"{counted(retraced.ticks_count, 'tick')} between them, from {counted(retraced.facts_count, 'fact')}: "
        f"{counted(decided, 'decision')} otherwise, {held} held back for another reason"
    )


def notes(retraced: Retraced) -> Iterator[str]:
    """Yield what is to be known before the differences are believed."""
    yield f"{retraced.equal_count} of {counted(retraced.plans_count, 'plan')} made again byte for byte"
    if retraced.silent_seconds:
        silent = span(retraced.silent_seconds)
        yield f"for {silent} the scaler gave no sign of life; ticks of that time were not asked about"
    if retraced.other_policy_count:
        others = f"{retraced.other_policy_count} of {counted(retraced.plans_count, 'plan')}"
        yield f"{others} were recorded under another policy than they are replayed with; differences may come of that"


def _example(each: Found) -> Iterator[str]:
    where = f"plan {each.plan_id}" if each.plan_id else "between two plans"
    more = f", at {each.plans_count} plans" if each.plans_count > 1 else ""
    seconds = (each.until - each.at).total_seconds()
    lasting = f", for {span(seconds)}" if seconds >= 1 else ""
    yield f"  {instant(each.at)}  {each.difference.name}  ({where}{more}{lasting})"
    yield f"    recorded: {each.difference.made.sentence or 'nothing'}"
    yield f"    today:    {each.difference.other.sentence or 'nothing'}"
