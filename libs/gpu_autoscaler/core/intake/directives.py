"""Directives of users: freeze, pause of a pool, temporary overrides. Validation, folding, and what is active.

Used by `fold`, which ignores invalid directives, by the gateway, and by the plan (`core/limits/override_bounds.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.state.retention import is_past_retention
from gpu_autoscaler.core.state.state import DirectiveRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.events.catalog import PolicyFact
from gpu_autoscaler.events.policy import (
    PolicyChanged,
    PolicyDirectiveGiven,
    PolicyDirectiveLifted,
    PolicyDocumentsAccepted,
)
from gpu_autoscaler.model.directives import BRAKE, Freeze, Override, PausePool
from gpu_autoscaler.model.gpu import GPU_MODELS
from gpu_autoscaler.model.jobs import Violation

# Project default. Longer settings belong in the policy.
UNTIL_MAX = timedelta(days=30)
REASON_LENGTH_MAX = 500
# Project default. It bounds the state.
DIRECTIVES_COUNT_MAX = 256
# One trip is in force at a time; the others are kept for facts that arrive again.
BRAKE_RELEASES_COUNT_MAX = 16
COUNT_MAX = 1_000_000


class ActiveDirectives(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Active directives. Overrides are ordered by key."""

    freeze: PolicyDirectiveGiven | None = None
    paused: Mapping[str, PolicyDirectiveGiven] = {}  # by pool
    overrides: tuple[tuple[Override, PolicyDirectiveGiven], ...] = ()


NO_ACTIVE_DIRECTIVES = ActiveDirectives()


def active_facts(records: Iterable[DirectiveRecord], as_of: datetime) -> tuple[PolicyDirectiveGiven, ...]:
    """Return the directives that are neither withdrawn nor expired, by key."""
    active = (record.given for record in records if record.lifted is None and as_of < record.given.until)
    return tuple(sorted(active, key=lambda given: given.directive.key))


def active_directives(records: Mapping[str, DirectiveRecord], as_of: datetime) -> ActiveDirectives:
    """Return the directives that are active at this instant."""
    return _by_kind(active_facts(records.values(), as_of)) if records else NO_ACTIVE_DIRECTIVES


@cached_by_identity(4)
def _by_kind(given: tuple[PolicyDirectiveGiven, ...]) -> ActiveDirectives:
    return ActiveDirectives(
        freeze=next((fact for fact in given if isinstance(fact.directive, Freeze)), None),
        paused={fact.directive.pool: fact for fact in given if isinstance(fact.directive, PausePool)},
        overrides=tuple((fact.directive, fact) for fact in given if isinstance(fact.directive, Override)),
    )


# ---- validation


def violations_of(fact: PolicyDirectiveGiven, pools: Iterable[str] | None = None) -> tuple[Violation, ...]:
    """Return every violation of a directive; empty: it is valid. `pools` are those of the policy; None: unknown, and
    the pool is not checked."""
    return (
        *_text_violations(fact),
        *_scope_violations(fact, None if pools is None else tuple(pools)),
        *_bound_violations(fact),
    )


def _text_violations(fact: PolicyDirectiveGiven) -> Iterator[Violation]:
    if not fact.reason.strip():
        yield Violation("reason", "is empty; state the reason, it is shown to others")
    elif len(fact.reason) > REASON_LENGTH_MAX:
        yield Violation("reason", f"is longer than {REASON_LENGTH_MAX} characters; shorten it")
    if fact.until <= fact.given_at:
        yield Violation("until", "is in the past; set a time in the future")
    elif fact.until - fact.given_at > UNTIL_MAX:
        yield Violation("until", f"is more than {UNTIL_MAX.days} days ahead; use the policy for longer settings")


def _scope_violations(fact: PolicyDirectiveGiven, pools: tuple[str, ...] | None) -> Iterator[Violation]:
    directive = fact.directive
    pool = None if isinstance(directive, Freeze) else directive.pool
    if pools is not None and pool is not None and pool not in pools:
        yield Violation("directive.pool", f"unknown pool {pool!r}; known: {', '.join(sorted(pools))}")
    model = directive.gpu_model if isinstance(directive, Override) else None
    if model is not None and model not in GPU_MODELS:
        yield Violation("directive.gpu_model", f"unknown GPU model {model!r}; known: {', '.join(GPU_MODELS)}")


def _bound_violations(fact: PolicyDirectiveGiven) -> Iterator[Violation]:
    if not isinstance(fact.directive, Override):
        return
    override = fact.directive
    bounds = {
        "nodes_count_min": override.nodes_count_min,
        "nodes_count_max": override.nodes_count_max,
        "gpu_count_min": override.gpu_count_min,
        "gpu_count_max": override.gpu_count_max,
    }
    if all(value is None for value in bounds.values()):
        yield Violation(
            "directive", "has no bound; set nodes_count_min, nodes_count_max, gpu_count_min or gpu_count_max"
        )
    for name, value in bounds.items():
        if value is not None and not 0 <= value <= COUNT_MAX:
            yield Violation(f"directive.{name}", f"is {value}; must be 0 to {COUNT_MAX}")
    for unit in ("nodes_count", "gpu_count"):
        least, most = bounds[f"{unit}_min"], bounds[f"{unit}_max"]
        if least is not None and most is not None and least > most:
            yield Violation(f"directive.{unit}_min", f"{least} is above {unit}_max {most}; lower it or raise the other")


# ---- folding


def fold_directive(batch: Batch, fact: PolicyFact) -> None:
    """Fold a fact of the policy: of one key the newest wins; an older or invalid directive changes nothing."""
    records = batch.directives
    match fact:
        case PolicyDirectiveGiven():
            key = fact.directive.key
            known = records.get(key)
            if (known is None or fact.given_at > known.given.given_at) and not violations_of(fact):
                records.set(key, DirectiveRecord(given=fact))
                _limit_count(batch)
        case PolicyDirectiveLifted() if fact.key == BRAKE:
            _fold_release(batch, fact)
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
    newest = batch.newest.get("policy")
    if newest is not None:
        batch.directives.forget(lambda record: is_past_retention(_ended_at(record), newest))


def _fold_release(batch: Batch, fact: PolicyDirectiveLifted) -> None:
    """Keep by whom each trip of the brake was ended: the first one counts, in any order and whatever the clocks."""
    releases = batch.brake_releases
    if fact.tripped_at is None or releases.get(fact.tripped_at.isoformat()) is not None:
        return
    releases.set(fact.tripped_at.isoformat(), fact)
    if len(releases.now) > BRAKE_RELEASES_COUNT_MAX:
        releases.remove(min(releases.now))


def _limit_count(batch: Batch) -> None:
    now = batch.directives.now
    if len(now) > DIRECTIVES_COUNT_MAX:
        batch.directives.remove(min(now, key=lambda key: (now[key].given.until, key)))


def _ended_at(record: DirectiveRecord) -> datetime:
    return record.given.until if record.lifted is None else min(record.given.until, record.lifted.lifted_at)
