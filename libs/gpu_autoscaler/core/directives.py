"""What people overrule for a while: whether it can be meant, how it is kept, and what of it is in force at an instant.

Called by `fold`, which keeps nothing that cannot be meant, by the gateway, which says what is wrong, and by the plan
(`core/buying/overriding.py`). The second opinion reads the records by itself (`core/checks/directives.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.folding.batch import Batch
from gpu_autoscaler.core.folding.pruning import is_past_retention
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.state import DirectiveRecord
from gpu_autoscaler.events.catalogue import PolicyFact
from gpu_autoscaler.events.policy import (
    PolicyChanged,
    PolicyDirectiveGiven,
    PolicyDirectiveLifted,
    PolicyDocumentsAccepted,
)
from gpu_autoscaler.model.directives import Freeze, Override, PausePool
from gpu_autoscaler.model.gpu import GPU_MODELS
from gpu_autoscaler.model.jobs import Mistake

# Our own. What is to hold for longer belongs into the policy, where others find it.
UNTIL_MAX = timedelta(days=30)
REASON_LENGTH_MAX = 500
# Our own. Scopes are few; the state stays small whatever is sent.
DIRECTIVES_COUNT_MAX = 256
_COUNT_MAX = 1_000_000


class ActiveDirectives(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What holds now. Overrides come by key."""

    freeze: PolicyDirectiveGiven | None = None
    paused: Mapping[str, PolicyDirectiveGiven] = {}  # by pool
    overrides: tuple[tuple[Override, PolicyDirectiveGiven], ...] = ()


NO_ACTIVE_DIRECTIVES = ActiveDirectives()


def active_facts(records: Iterable[DirectiveRecord], as_of: datetime) -> tuple[PolicyDirectiveGiven, ...]:
    """Return the directives that are neither lifted nor over, by key."""
    found = (each.given for each in records if each.lifted is None and as_of < each.given.until)
    return tuple(sorted(found, key=lambda given: given.directive.key))


def active_directives(records: Mapping[str, DirectiveRecord], as_of: datetime) -> ActiveDirectives:
    """Return what holds at this instant."""
    return _sorted_out(active_facts(records.values(), as_of)) if records else NO_ACTIVE_DIRECTIVES


@remembered(4)
def _sorted_out(given: tuple[PolicyDirectiveGiven, ...]) -> ActiveDirectives:
    return ActiveDirectives(
        freeze=next((each for each in given if isinstance(each.directive, Freeze)), None),
        paused={each.directive.pool: each for each in given if isinstance(each.directive, PausePool)},
        overrides=tuple((each.directive, each) for each in given if isinstance(each.directive, Override)),
    )


# ---- what can be meant


def mistakes_of(fact: PolicyDirectiveGiven, pools: Iterable[str] | None = None) -> tuple[Mistake, ...]:
    """Return everything that is wrong with a directive; empty: it can be meant. `pools` are the policy's; None: not
    known, and then nothing is said about them."""
    return (*_of_words(fact), *_of_scope(fact, None if pools is None else tuple(pools)), *_of_bounds(fact))


def _of_words(fact: PolicyDirectiveGiven) -> Iterator[Mistake]:
    if not fact.reason.strip():
        yield Mistake("reason", "is empty; say why, for those who find the cluster like that")
    elif len(fact.reason) > REASON_LENGTH_MAX:
        yield Mistake("reason", f"is longer than {REASON_LENGTH_MAX} characters; make it shorter")
    if fact.until <= fact.given_at:
        yield Mistake("until", "is over already; say an instant that is still to come")
    elif fact.until - fact.given_at > UNTIL_MAX:
        yield Mistake(
            "until", f"is more than {UNTIL_MAX.days} days ahead; what holds for longer belongs into the policy"
        )


def _of_scope(fact: PolicyDirectiveGiven, pools: tuple[str, ...] | None) -> Iterator[Mistake]:
    directive = fact.directive
    pool = None if isinstance(directive, Freeze) else directive.pool
    if pools is not None and pool is not None and pool not in pools:
        yield Mistake("directive.pool", f"there is no pool {pool!r}; there are {', '.join(sorted(pools))}")
    model = directive.gpu_model if isinstance(directive, Override) else None
    if model is not None and model not in GPU_MODELS:
        yield Mistake("directive.gpu_model", f"there is no {model!r}; there are {', '.join(GPU_MODELS)}")


def _of_bounds(fact: PolicyDirectiveGiven) -> Iterator[Mistake]:
    if not isinstance(fact.directive, Override):
        return
    one = fact.directive
    bounds = {
        "nodes_count_min": one.nodes_count_min,
        "nodes_count_max": one.nodes_count_max,
        "gpu_count_min": one.gpu_count_min,
        "gpu_count_max": one.gpu_count_max,
    }
    if all(value is None for value in bounds.values()):
        yield Mistake("directive", "bounds nothing; set nodes_count_min or _max, or gpu_count_min or _max")
    for name, value in bounds.items():
        if value is not None and not 0 <= value <= _COUNT_MAX:
            yield Mistake(f"directive.{name}", f"is {value}; say 0 to {_COUNT_MAX}")
    for unit in ("nodes_count", "gpu_count"):
        least, most = bounds[f"{unit}_min"], bounds[f"{unit}_max"]
        if least is not None and most is not None and least > most:
            yield Mistake(f"directive.{unit}_min", f"{least} is above {unit}_max {most}; lower it or raise the other")


# ---- keeping


def fold_directive(batch: Batch, fact: PolicyFact) -> None:
    """Put a word into the batch: of one key the newest counts; what is older, or cannot be meant, changes nothing."""
    records = batch.directives
    match fact:
        case PolicyDirectiveGiven():
            key = fact.directive.key
            known = records.get(key)
            is_news = known is None or fact.given_at > known.given.given_at
            if is_news and not mistakes_of(fact):
                records.set(key, DirectiveRecord(given=fact))
                _make_room(batch)
        case PolicyDirectiveLifted():
            known = records.get(fact.key)
            if known is not None and known.lifted is None and fact.lifted_at >= known.given.given_at:
                records.set(fact.key, DirectiveRecord(given=known.given, lifted=fact))
        case PolicyChanged():
            last = batch.policy_changed
            if last is None or fact.changed_at > last.changed_at:
                batch.policy_changed = fact
        case PolicyDocumentsAccepted():
            accepted = batch.policy_documents
            if accepted is None or fact.accepted_at > accepted.accepted_at:
                batch.policy_documents = fact
    _forget_old(batch)


def _make_room(batch: Batch) -> None:
    now = batch.directives.now
    if len(now) > DIRECTIVES_COUNT_MAX:
        batch.directives.remove(min(now, key=lambda key: (now[key].given.until, key)))


def _forget_old(batch: Batch) -> None:
    """Forget what was over so long ago that no repeat of it comes any more. They are few: all are looked at."""
    newest = batch.newest.get("policy")
    if newest is not None:
        batch.directives.forget(lambda record: is_past_retention(_over_at(record), newest))


def _over_at(record: DirectiveRecord) -> datetime:
    return record.given.until if record.lifted is None else min(record.given.until, record.lifted.lifted_at)
