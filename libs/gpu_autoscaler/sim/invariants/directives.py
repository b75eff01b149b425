"""Invariant: a directive is obeyed while it is active, and not longer.

A plan is checked against the directives in its own cut, so faults excuse nothing.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted, PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.directives import PERMANENT, Attribution, Freeze, Override, PausePool
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.invariants import DIRECTIVES_OBEYED

DirectiveFact = PolicyDirectiveGiven | PolicyDirectiveLifted


class _Purchase(NamedTuple):
    pool: str
    offer: Offer


class DirectivesInvariant:
    """Tracks directives and policy documents in stream order."""

    def __init__(self, cloud: Cloud, policies: Policies, report: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._report = report
        self._stream = PolicyDirectiveGiven.stream()
        self._directives: list[tuple[int, DirectiveFact]] = []  # by sequence
        self._documents: list[tuple[int, PolicyDocumentsAccepted]] = []  # by sequence

    def streams_lost(self) -> None:
        """Directives and documents are lost with their stream."""
        self._directives.clear()
        self._documents.clear()

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if isinstance(recorded.fact, PolicyDirectiveGiven | PolicyDirectiveLifted):
            self._directives.append((recorded.sequence, recorded.fact))
        elif isinstance(recorded.fact, PolicyDocumentsAccepted):
            self._documents.append((recorded.sequence, recorded.fact))
        elif isinstance(recorded.fact, ScalingPlanMade):
            if self._directives:
                self._check_directives(recorded.fact)
            if self._documents:
                self._check_documents(recorded.fact)

    def _check_documents(self, plan_made: ScalingPlanMade) -> None:
        """The plan uses the policy documents of its cut, and leaves disabled pools alone."""
        known_sequence = dict(plan_made.cut.last_sequences).get(self._stream, 0)
        known = [fact.documents for sequence, fact in self._documents if sequence <= known_sequence]
        documents = known[-1] if known else ()
        if plan_made.policy_digest not in self._policies.digests_under(documents):
            names = ", ".join(f"{document.name}@{document.generation}" for document in documents)
            self._report(DIRECTIVES_OBEYED, f"plan {plan_made.plan_id} does not use the policy documents {names}")
        for pool in (pool.name for document in documents if not document.is_enabled for pool in document.pools):
            for contradiction in self._decisions_on_pool(pool, plan_made.plan):
                self._report(
                    DIRECTIVES_OBEYED, f"plan {plan_made.plan_id} {contradiction}, which its policy document disables"
                )

    def _check_directives(self, plan_made: ScalingPlanMade) -> None:
        known_sequence = dict(plan_made.cut.last_sequences).get(self._stream, 0)
        active: dict[str, PolicyDirectiveGiven] = {}
        for sequence, fact in self._directives:
            if sequence > known_sequence:
                break
            if isinstance(fact, PolicyDirectiveGiven):
                active[fact.directive.key] = fact
            else:
                active.pop(fact.key, None)
        for key, given in active.items():
            if plan_made.plan.as_of < given.until:
                for contradiction in self._contradictions(given, plan_made.plan):
                    self._report(
                        DIRECTIVES_OBEYED,
                        f"plan {plan_made.plan_id} {contradiction}, against {key} of {given.given_by}",
                    )
        for attribution, subject in _attributions(plan_made.plan):
            directive = active.get(attribution.key)
            is_permanent = attribution.until == PERMANENT
            if not is_permanent and (directive is None or directive.until <= plan_made.plan.as_of):
                self._report(
                    DIRECTIVES_OBEYED,
                    f"plan {plan_made.plan_id} decides on {subject} for {attribution.key}, which has ended",
                )

    def _contradictions(self, given: PolicyDirectiveGiven, plan: Plan) -> Iterator[str]:
        bought = [_Purchase(decision.pool, decision.offer) for decision in plan.purchases]
        drains = [decision for decision in plan.drains if decision.is_voluntary]
        match given.directive:
            case Freeze():
                released = plan.releases
                if bought or drains or released:
                    yield f"buys {len(bought)} nodes, drains {len(drains)} and releases {len(released)}"
            case PausePool(pool=pool):
                yield from self._decisions_on_pool(pool, plan)
            case Override() as override:
                yield from self._beyond_maximum(override, bought)

    def _decisions_on_pool(self, pool: str, plan: Plan) -> Iterator[str]:
        """Yield each decision on a paused pool."""
        for decision in plan.decisions:
            if isinstance(decision, BuyNode) and decision.pool == pool:
                yield f"buys {decision.offer.key} for pool {pool}"
            elif isinstance(decision, DrainNode) and decision.is_voluntary:
                machine = self._cloud.of_node(decision.node_name)
                if machine is not None and machine.order.pool == pool:
                    yield f"drains {decision.node_name} of pool {pool}"

    def _beyond_maximum(self, override: Override, bought: list[_Purchase]) -> Iterator[str]:
        """Yield purchases beyond the override's maximum; services count orders as well, so they stay below."""
        bought_offers = [purchase.offer for purchase in bought if _covers(override, purchase)]
        if not bought_offers:
            return
        machines = [
            purchase
            for purchase in self._cloud.machines
            if purchase.is_ordered and not purchase.was_delayed and purchase.state != "terminated"
        ]
        existing_offers = [
            purchase.offer for purchase in machines if _covers(override, _Purchase(purchase.order.pool, purchase.offer))
        ]
        gpu_counts = [offer.resources.gpu_count for offer in bought_offers]
        nodes_count, gpu_count = (
            len(bought_offers) + len(existing_offers),
            sum(gpu_counts) + sum(o.resources.gpu_count for o in existing_offers),
        )
        if override.nodes_count_max is not None and nodes_count > override.nodes_count_max:
            yield f"buys {len(bought_offers)} nodes, {nodes_count} in all"
        if override.gpu_count_max is not None and any(gpu_counts) and gpu_count > override.gpu_count_max:
            yield f"buys {sum(gpu_counts)} GPUs, {gpu_count} in all"


def _covers(override: Override, purchase: _Purchase) -> bool:
    return override.pool in (None, purchase.pool) and override.gpu_model in (None, purchase.offer.gpu_model)


def _attributions(plan: Plan) -> Iterator[tuple[Attribution, str]]:
    """Yield every attribution in the plan's reasons, with its subject."""
    reasons = [(decision.reason, str(decision.action_id)) for decision in plan.decisions]
    for reason, subject in (*reasons, *((group.reason, ", ".join(group.subjects)) for group in plan.deferred_groups)):
        attribution = getattr(reason, "attribution", None)
        if isinstance(attribution, Attribution):
            yield attribution, subject
