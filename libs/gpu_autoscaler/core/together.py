"""Which purchases of a plan are one for the cloud: nodes of one gang that are alike. Called by `core/draft.py`.

Whether they are made all at once or one by one is the cloud's to say (`providers/protocol.py: LaunchesGroups`); that
they belong together is decided here, so that whoever carries it out, or does so again, finds the same ones.
"""

from collections.abc import Hashable, Iterable

import msgspec

from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.labels import ACTION_ID


def assign_launch_groups(decisions: Iterable[BuyNode]) -> tuple[BuyNode, ...]:
    """Return the purchases, in their order; two or more of one gang that are alike name the first of them."""
    bought = tuple(decisions)
    alike: dict[Hashable, list[BuyNode]] = {}
    for decision in bought:
        if decision.gang is not None:
            alike.setdefault(_likeness(decision), []).append(decision)
    first = {one.action_id: each[0].action_id for each in alike.values() if len(each) > 1 for one in each}
    return tuple(
        msgspec.structs.replace(one, transaction=first[one.action_id]) if one.action_id in first else one
        for one in bought
    )


def _likeness(decision: BuyNode) -> Hashable:
    """What nodes of one call share: all that is ordered but the name of the order, which each node's labels have."""
    labels = tuple(pair for pair in decision.labels if pair[0] != ACTION_ID)
    return (
        decision.gang, decision.pool, decision.offer, labels, decision.taints, decision.startup_taints,
        decision.slices, decision.deadline_at,
    )  # fmt: skip
