"""Invariant: a directive is obeyed while it is active, and not longer.

A plan is checked against the directives in its own cut, so faults excuse nothing.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted, PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.directives import FOR_GOOD, Freeze, Override, PausePool, Attribution
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.policies import Policies

PROMISE = "people are obeyed"
Said = PolicyDirectiveGiven | PolicyDirectiveLifted


class _Scope(NamedTuple):
    pool: str
    offer: Offer


class Obedience:
    """Tracks directives and policy documents in stream order."""

    def __init__(self, cloud: Cloud, policies: Policies, breaks: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._breaks = breaks
        self._stream = PolicyDirectiveGiven.stream()
        self._said: list[tuple[int, Said]] = []  # by sequence
        self._kept: list[tuple[int, PolicyDocumentsAccepted]] = []  # by sequence

    def lost(self) -> None:
        """Directives and documents are lost with their stream."""
        self._said.clear()
        self._kept.clear()

    def heard(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if isinstance(recorded.fact, PolicyDirectiveGiven | PolicyDirectiveLifted):
            self._said.append((recorded.sequence, recorded.fact))
        elif isinstance(recorded.fact, PolicyDocumentsAccepted):
            self._kept.append((recorded.sequence, recorded.fact))
        elif isinstance(recorded.fact, ScalingPlanMade):
            if self._said:
                self._planned(recorded.fact)
            if self._kept:
                self._documented(recorded.fact)

    def _documented(self, made: ScalingPlanMade) -> None:
        """The plan uses the policy documents of its cut, and leaves disabled pools alone."""
        known_to = dict(made.cut.last_sequences).get(self._stream, 0)
        known = [fact.documents for sequence, fact in self._kept if sequence <= known_to]
        documents = known[-1] if known else ()
        if made.policy_digest not in self._policies.digests_under(documents):
            names = ", ".join(f"{each.name}@{each.generation}" for each in documents)
            self._breaks(PROMISE, f"plan {made.plan_id} was made by another policy than with documents {names}")
        for pool in (pool.name for document in documents if not document.is_enabled for pool in document.pools):
            for what in self._on_pool(pool, made.plan):
                self._breaks(PROMISE, f"plan {made.plan_id} {what}, which its policy switches off")

    def _planned(self, made: ScalingPlanMade) -> None:
        known_to = dict(made.cut.last_sequences).get(self._stream, 0)
        standing: dict[str, PolicyDirectiveGiven] = {}
        for sequence, said in self._said:
            if sequence > known_to:
                break
            if isinstance(said, PolicyDirectiveGiven):
                standing[said.directive.key] = said
            else:
                standing.pop(said.key, None)
        for key, given in standing.items():
            if made.plan.as_of < given.until:
                for what in self._against(given, made.plan):
                    self._breaks(PROMISE, f"plan {made.plan_id} {what}, against {key} of {given.given_by}")
        for word, subject in _words(made.plan):
            held = standing.get(word.key)
            is_of_the_policy = word.until == FOR_GOOD
            if not is_of_the_policy and (held is None or held.until <= made.plan.as_of):
                self._breaks(
                    PROMISE, f"plan {made.plan_id} does for {word.key} what it does to {subject}: that is over"
                )

    def _against(self, given: PolicyDirectiveGiven, plan: Plan) -> Iterator[str]:
        bought = [_Scope(one.pool, one.offer) for one in plan.decisions if isinstance(one, BuyNode)]
        chosen = [one for one in plan.decisions if isinstance(one, DrainNode) and one.is_voluntary]
        match given.directive:
            case Freeze():
                released = [one for one in plan.decisions if isinstance(one, ReleaseInstance)]
                if bought or chosen or released:
                    yield f"buys {len(bought)} nodes, drains {len(chosen)} and gives {len(released)} back"
            case PausePool(pool=pool):
                yield from self._on_pool(pool, plan)
            case Override() as override:
                yield from self._beyond(override, bought)

    def _on_pool(self, pool: str, plan: Plan) -> Iterator[str]:
        """Yield each decision on a paused pool."""
        for one in plan.decisions:
            if isinstance(one, BuyNode) and one.pool == pool:
                yield f"buys {one.offer.key} for pool {pool}"
            elif isinstance(one, DrainNode) and one.is_voluntary:
                machine = self._cloud.of_node(one.node_name)
                if machine is not None and machine.order.pool == pool:
                    yield f"drains {one.node_name} of pool {pool}"

    def _beyond(self, override: Override, bought: list[_Scope]) -> Iterator[str]:
        """Yield purchases beyond the override's maximum; services count orders as well, so they stay below."""
        own = [one.offer for one in bought if _takes_in(override, one)]
        if not own:
            return
        standing = [
            one for one in self._cloud.machines if one.is_ordered and not one.was_held and one.state != "terminated"
        ]
        there = [one.offer for one in standing if _takes_in(override, _Scope(one.order.pool, one.offer))]
        gpu_counts = [offer.resources.gpu_count for offer in own]
        nodes_count, gpu_count = len(own) + len(there), sum(gpu_counts) + sum(o.resources.gpu_count for o in there)
        if override.nodes_count_max is not None and nodes_count > override.nodes_count_max:
            yield f"buys {len(own)} nodes, {nodes_count} with what stands"
        if override.gpu_count_max is not None and any(gpu_counts) and gpu_count > override.gpu_count_max:
            yield f"buys {sum(gpu_counts)} GPUs, {gpu_count} with what stands"


def _takes_in(override: Override, one: _Scope) -> bool:
    return override.pool in (None, one.pool) and override.gpu_model in (None, one.offer.gpu_model)


def _words(plan: Plan) -> Iterator[tuple[Attribution, str]]:
    """Yield every attribution in the plan's reasons, with its subject."""
    reasons = [(one.reason, str(one.action_id)) for one in plan.decisions]
    for reason, subject in (*reasons, *((held.reason, held.subject) for held in plan.deferred)):
        word = getattr(reason, "attribution", None)
        if isinstance(word, Attribution):
            yield word, subject
