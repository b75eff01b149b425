"""The second opinion on what the cloud would not sell lately. Called by `core/check.py` alone; `plan` reads the same
orders in `core/buying/refusals.py`, and waits longer where a refusal came again."""

import re

from gpu_autoscaler.core.state import ClusterState, OrderRecord
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import Offer


def is_refused(offer: Offer, plan: Plan, state: ClusterState) -> bool:
    """A refusal of an offer is about that type in that zone; of a zone, about all in it (regions: the plan's word)."""
    for order in state.orders.values():
        said = order.refused
        if said is None or said.retry_at <= plan.as_of or said.offer.zone != offer.zone:
            continue
        if said.scope == "zone":
            return True
        same = (said.offer.instance_type, said.offer.capacity_type) == (offer.instance_type, offer.capacity_type)
        if said.scope != "region" and same and not _is_sold_since(order, state):
            return True
        if said.scope == "region" and _quota(said.offer) == _quota(offer):
            ends = (
                one.terminated_at
                for one in state.instances.values()
                if one.terminated_at is not None and one.terminated_at > said.refused_at
            )
            return not any(ends)  # else something that counted against it may have ended
    return False


def _quota(offer: Offer) -> tuple[str, str]:
    """A region's quotas count families and capacity types for themselves; the zone is the same already."""
    return re.split(r"[.-]", offer.instance_type)[0], offer.capacity_type


def _is_sold_since(refused: OrderRecord, state: ClusterState) -> bool:
    """True where the cloud sold the same to a later plan: its answer to an earlier one may come after that."""
    said = refused.refused
    assert said is not None, "it is asked of what was refused"  # noqa: S101 - our bug
    tried_at = refused.planned_at or said.refused_at
    return any(
        one.decision.offer.key == said.offer.key and (one.planned_at or one.launched.launched_at) > tried_at
        for one in state.orders.values()
        if one.launched is not None and one.decision is not None
    )
