"""Nodes whose instance is gone: named once the cloud confirms it and nothing else removed them; never foreign ones."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, TimedFact, given, node, policy, provider_id, synced

from gpu_autoscaler.core.disruption.orphaned_nodes import ORPHANED_SECONDS, orphaned_nodes
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodListed
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.decisions import RemoveOrphanedNode
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.scheduling import Taint

ENDED = T0 + HOUR
DUE = ENDED + timedelta(seconds=ORPHANED_SECONDS)
PROVIDER_ID = provider_id("buy-n1")


def left(name: str = "n1", at: datetime = ENDED, **changes: Any) -> Story:  # noqa: ANN401 - fields of NodeObserved
    """A node of ours that fell silent at this instant: it was ready before."""
    silent = {"is_ready": False, "version": 2, **changes}
    story = node(name)
    seen = [
        TimedFact(msgspec.structs.replace(each.fact, **silent), at)
        for each in story
        if isinstance(each.fact, NodeObserved)
    ]
    return (*story, *seen)


def ended(name: str = "n1", at: datetime = ENDED) -> Story:
    """The cloud shows that the instance has ended."""
    seen = next(each.fact for each in node(name) if isinstance(each.fact, NodeInstanceObserved))
    return (TimedFact(msgspec.structs.replace(seen, state="terminated", version=4, terminated_at=at), at),)


def confirmed(at: datetime = ENDED) -> Story:
    """The cloud confirmed the end that we asked for."""
    fact = ScalingNodeTerminated(
        action_id=ActionId("drain-n1"), plan_id=PlanId("p"), provider_id=PROVIDER_ID,
        order_action_id=ActionId("buy-n1"), node_name="n1", terminated_at=at,
    )  # fmt: skip
    return (TimedFact(fact, at),)


def listed(at: datetime, *names: str) -> Story:
    """A whole list of our instances: those of these nodes."""
    ids = tuple(provider_id(f"buy-{name}") for name in names)
    return (TimedFact(NodeInstanceListed(provider_ids=ids, listed_at=at), at),)


def seen(*stories: Story, at: datetime = DUE) -> ClusterState:
    """The state with fresh lists of nodes and pods; instances were listed as the stories have it alone."""
    told = [each for story in stories for each in story]
    others = tuple(each for each in synced(told, as_of=at) if not isinstance(each.fact, NodeInstanceListed))
    return given(tuple(told), others, as_of=at, is_synced=False)


def named(state: ClusterState, at: datetime = DUE, under: ScalingPolicy | None = None) -> list[str]:
    """Names of the nodes whose removal the plan decides."""
    decisions = plan(state, under or policy(), at).upkeep_decisions
    return [one.node_name for one in decisions if isinstance(one, RemoveOrphanedNode)]


NOTHING_LISTED = listed(DUE)


@pytest.mark.parametrize("word", [ended(), confirmed(), (*ended(), *confirmed())])
def test_a_node_is_orphaned_once_the_end_of_its_instance_is_reported(word: Story) -> None:
    """By the cloud's list, or by its answer to our own step."""
    (one,) = orphaned_nodes(seen(left(), word, NOTHING_LISTED), DUE)
    assert (one.node_name, one.node_uid, one.provider_id) == ("n1", "uid-n1", PROVIDER_ID)


@pytest.mark.parametrize("silent_at", [ENDED, ENDED + 30 * SECOND, ENDED - HOUR / 2])
def test_a_cloud_controller_manager_acts_first(silent_at: datetime) -> None:
    """Counted from when instance and node are both over."""
    due = max(silent_at, ENDED) + timedelta(seconds=ORPHANED_SECONDS)
    for at, names in ((due - SECOND, []), (due, ["n1"])):
        assert named(seen(left(at=silent_at), ended(), listed(at), at=at), at) == names


def test_a_ready_node_stays() -> None:
    """Its kubelet reports, perhaps after an outage."""
    assert named(seen(node("n1"), ended(), confirmed(), NOTHING_LISTED)) == []
    assert named(seen(left(), left(at=ENDED + MINUTE, is_ready=True, version=3)[-1:], ended(), NOTHING_LISTED)) == []


def test_a_ready_report_resets_the_time() -> None:
    """The time begins with the last silence."""
    back = left(at=ENDED + MINUTE, is_ready=True, version=3)[-1:]
    again = left(at=ENDED + 3 * MINUTE, version=4)[-1:]
    for at, names in ((ENDED + 4 * MINUTE, []), (ENDED + 5 * MINUTE, ["n1"])):
        assert named(seen(left(), back, again, ended(), listed(at), at=at), at) == names


@pytest.mark.parametrize("count", [1, 2, 12])
def test_missing_from_a_list_is_no_proof(count: int) -> None:
    """One short list, or several, prove nothing."""
    lists = tuple(told for number in range(count) for told in listed(DUE - number * 10 * SECOND))
    assert named(seen(left(), lists)) == []


def test_an_instance_missing_for_long_is_queried() -> None:
    """The executor queries this instance before it deletes the node."""
    late = ENDED + 12 * MINUTE
    missing = tuple(told for minutes in range(13) for told in listed(ENDED + minutes * MINUTE))
    assert named(seen(left(), missing, at=late), late) == ["n1"]
    assert named(seen(left(), missing, listed(late, "n1"), at=late), late) == []


def test_an_instance_is_missing_from_when_its_node_is_unready() -> None:
    """Lists from before do not count."""
    lists = tuple(told for minutes in range(61) for told in listed(T0 + minutes * MINUTE))
    assert named(seen(left(), lists, NOTHING_LISTED)) == []


def test_an_instance_that_reappears_is_not_gone() -> None:
    """A later list has it alive."""
    assert named(seen(left(), confirmed(), NOTHING_LISTED)) == ["n1"]
    assert named(seen(left(), confirmed(), listed(ENDED + MINUTE, "n1"), NOTHING_LISTED)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": (("karpenter.sh/registered", "true"),)},
        {"taints": (Taint("karpenter.sh/unregistered", "NoExecute"),)},
        {"provider_id": None},
        {"deleting_since": ENDED},
        {"is_ready": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_excluded_nodes_stay(changes: dict[str, Any]) -> None:
    """Nodes of Karpenter, without an instance, or being deleted."""
    assert named(seen(left(**changes), ended(), confirmed(), NOTHING_LISTED)) == []


def test_foreign_nodes_stay() -> None:
    """Even if our account shows the end of the instance."""
    theirs = left(action_id=None)[-1:]
    over = [each.fact for each in ended() if isinstance(each.fact, NodeInstanceObserved)]
    foreign = msgspec.structs.replace(over[0], action_id=None)
    assert named(seen(theirs, (TimedFact(foreign, ENDED),), NOTHING_LISTED)) == []


def test_the_end_of_another_instance_of_the_order_does_not_count() -> None:
    """A cloud that ignored the token made two instances."""
    other = left(provider_id="sim:///zone-a/i-second")
    assert named(seen(other, ended(), confirmed(), NOTHING_LISTED)) == []


@pytest.mark.parametrize("source", [NodeListed, PodListed, NodeInstanceListed])
def test_nothing_is_orphaned_on_stale_data(source: type[Fact]) -> None:
    """The node may be back, or the instance was never gone."""
    late, story = DUE + HOUR, (*left(), *ended())
    fresh = tuple(each for each in synced(story, as_of=late) if not isinstance(each.fact, source))
    old = tuple(each for each in synced(story, as_of=DUE) if isinstance(each.fact, source))
    assert named(given(story, old, fresh, as_of=late, is_synced=False), late) == []
    assert named(given(story, as_of=late), late) == ["n1"]


def test_a_freeze_keeps_orphaned_nodes() -> None:
    """By policy or by directive."""
    word = PolicyDirectiveGiven(
        directive=Freeze(), given_by="ops", reason="looking", given_at=ENDED, until=ENDED + HOUR
    )
    state = seen(left(), ended(), NOTHING_LISTED)
    assert named(state) == ["n1"]
    assert named(state, under=policy(is_frozen=True)) == []
    assert named(seen(left(), ended(), (TimedFact(word, ENDED),), NOTHING_LISTED)) == []
