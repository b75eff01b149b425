"""A violation: a sentence, and what it blames. What it blames is set aside, and the rest of the plan is published."""

from collections.abc import Iterable
from typing import Self

from gpu_autoscaler.model.decisions import AnyDecision, AnyUpkeep
from gpu_autoscaler.model.ids import ActionId


class Violation(str):
    """What is wrong with a plan, in one sentence, with the decisions and the demand that cause it.

    Without either it cannot be attributed: it may concern the whole plan.
    """

    __slots__ = ("action_ids", "demand")

    action_ids: frozenset[ActionId]
    demand: tuple[str, ...]  # keys of work: job/<id>, pod/<uid>, group/<namespace>/<name>

    def __new__(cls, sentence: str, *decisions: AnyDecision | AnyUpkeep, demand: Iterable[str] = ()) -> Self:
        """Return the violation of these decisions, or of the plan's handling of this demand."""
        violation = super().__new__(cls, sentence)
        violation.action_ids = frozenset(decision.action_id for decision in decisions)
        violation.demand = tuple(demand)
        return violation

    @property
    def is_attributed(self) -> bool:
        """True if the violation names its cause."""
        return bool(self.action_ids or self.demand)


def attributed(sentence: str) -> Violation:
    """Return the sentence of a rule as a violation; one that names nothing is not attributed."""
    return sentence if isinstance(sentence, Violation) else Violation(sentence)
