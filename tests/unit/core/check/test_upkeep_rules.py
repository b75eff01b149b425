"""The plan check on upkeep: each act that the state does not justify is refused, and set aside alone."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import MINUTE, SECOND, node, policy
from tests.unit.core.test_upkeep import DUE, RULES, Plans, orphans

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, UpkeepRecord
from gpu_autoscaler.model.decisions import AnyUpkeep, RemoveOrphanedNode, Upkeep
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.reasons.upkeep import InstanceGone

ORPHANED = RemoveOrphanedNode(
    action_id=ActionId("act"),
    node_uid=NodeUid("uid-n000"),
    node_name="n000",
    provider_id=ProviderId("sim:///zone-a/i-buy-n000"),
    reason=InstanceGone(gone_since=DUE),
    retry_at=DUE + MINUTE,
)


def violations(state: ClusterState, *acts: AnyUpkeep, rules: ScalingPolicy = RULES) -> tuple[Violation, ...]:
    """Return what the check finds in the plan of this state with these acts in place of its own."""
    made = msgspec.structs.replace(plan(state, rules, DUE), upkeep=Upkeep(decisions=acts))
    return check(made, state, rules)


def replaced(state: ClusterState, **changes: Any) -> ClusterState:  # noqa: ANN401 - fields of NodeObserved
    """Return the state in which each node was observed with these changes."""
    nodes = {uid: msgspec.structs.replace(seen, **changes) for uid, seen in state.nodes.items()}
    return msgspec.structs.replace(state, nodes=nodes)


def test_a_justified_removal_passes() -> None:
    """The instance has ended, and the node is silent."""
    assert violations(Plans(orphans()).state, ORPHANED) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"is_ready": True},
        {"deleting_since": DUE},
        {"provider_id": ProviderId("another")},
        {"labels": (("karpenter.sh/registered", "true"),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_only_silent_nodes_of_ours_may_be_removed(changes: dict[str, Any]) -> None:
    """Whatever the planner believes."""
    found = violations(replaced(Plans(orphans()).state, **changes), ORPHANED)
    assert {"act"} in [violation.action_ids for violation in found]


def test_no_node_is_removed_whose_instance_may_run() -> None:
    """The lists have it, or lacked it only lately."""
    silent = Plans(orphans()).state
    running = msgspec.structs.replace(silent, instances={}, orders={}, drains={})
    assert violations(running, ORPHANED) != ()
    for lag, is_refused in ((9 * MINUTE, True), (11 * MINUTE, False)):
        listed = msgspec.structs.replace(running, instances_seen_at={ORPHANED.provider_id: DUE - lag})
        assert bool(violations(listed, ORPHANED)) is is_refused


def test_nothing_is_removed_under_a_freeze_or_on_old_lists() -> None:
    """As for drains."""
    state = Plans(orphans()).state
    assert violations(state, ORPHANED, rules=policy(is_frozen=True, watch_age_seconds_max=86_400.0)) != ()
    old = msgspec.structs.replace(state, instances_listed_at=DUE - timedelta(days=2))
    assert violations(old, ORPHANED) != ()


def test_an_attempt_waits_for_the_last_one() -> None:
    """And its own back-off is neither none nor longer than ten minutes."""
    state = Plans(orphans()).state
    known = {ORPHANED.key: UpkeepRecord(attempts_count=1, retry_at=DUE + SECOND)}
    assert violations(msgspec.structs.replace(state, upkeep=known), ORPHANED) != ()
    for retry_at in (DUE, DUE + 11 * MINUTE):
        assert violations(state, msgspec.structs.replace(ORPHANED, retry_at=retry_at)) != ()


def test_limits_and_repetitions_within_a_plan() -> None:
    """Eight removals; each act once."""
    acts = [
        msgspec.structs.replace(
            ORPHANED, action_id=ActionId(f"act-{n}"), node_uid=NodeUid(f"uid-n{n:03}"), node_name=f"n{n:03}",
            provider_id=ProviderId(f"sim:///zone-a/i-buy-n{n:03}"),
        )
        for n in range(9)
    ]  # fmt: skip
    state = Plans(orphans(9)).state
    assert violations(state, *acts[:8]) == ()
    (violation,) = violations(state, *acts)
    assert violation.action_ids == {"act-8"}
    twice = violations(state, ORPHANED, msgspec.structs.replace(ORPHANED, action_id=ActionId("other")))
    assert [violation.action_ids for violation in twice] == [{"other"}]


def test_an_unknown_node_is_not_removed() -> None:
    """Its object may be another one of the same name."""
    assert violations(Plans(node("n1")).state, ORPHANED) != ()
