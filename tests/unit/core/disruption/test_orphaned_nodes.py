"""Nodes whose instance is gone: named once the cloud has said so and nobody took them away; never those of others."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, Told, given, node, policy, provider_id, synced

from gpu_autoscaler.core.disruption.orphaned_nodes import ORPHANED_SECONDS, orphaned_nodes
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodListed
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
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
        Told(msgspec.structs.replace(each.fact, **silent), at) for each in story if isinstance(each.fact, NodeObserved)
    ]
    return (*story, *seen)


def ended(name: str = "n1", at: datetime = ENDED) -> Story:
    """The cloud shows that the instance has ended."""
    seen = next(each.fact for each in node(name) if isinstance(each.fact, NodeInstanceObserved))
    return (Told(msgspec.structs.replace(seen, state="terminated", version=4, terminated_at=at), at),)


def confirmed(at: datetime = ENDED) -> Story:
    """The cloud confirmed the end that we asked for."""
    fact = ScalingNodeTerminated(
        action_id=ActionId("drain-n1"), plan_id=PlanId("p"), provider_id=PROVIDER_ID,
        order_action_id=ActionId("buy-n1"), node_name="n1", terminated_at=at,
    )  # fmt: skip
    return (Told(fact, at),)


def listed(at: datetime, *names: str) -> Story:
    """A whole list of our instances: those of these nodes."""
    ids = tuple(provider_id(f"buy-{name}") for name in names)
    return (Told(NodeInstanceListed(provider_ids=ids, listed_at=at), at),)


def seen(*stories: Story, at: datetime = DUE) -> ClusterState:
    """The state with fresh lists of nodes and pods; instances were listed as the stories have it alone."""
    told = [each for story in stories for each in story]
    others = tuple(each for each in synced(told, as_of=at) if not isinstance(each.fact, NodeInstanceListed))
    return given(tuple(told), others, as_of=at, is_synced=False)


def named(state: ClusterState, at: datetime = DUE, under: ScalingPolicy | None = None) -> list[str]:
    """Names of the nodes that are due."""
    return [one.node_name for one in orphaned_nodes(state, under or policy(), at)]


NOTHING_LISTED = listed(DUE)


@pytest.mark.parametrize("word", [ended(), confirmed(), (*ended(), *confirmed())])
def test_a_node_is_due_when_the_cloud_has_said_that_its_instance_is_gone(word: Story) -> None:
    """By its list, which shows the instance as ended, or by its answer to our own step."""
    (one,) = orphaned_nodes(seen(left(), word, NOTHING_LISTED), policy(), DUE)
    assert (one.node_name, one.node_uid, one.provider_id) == ("n1", "uid-n1", PROVIDER_ID)


@pytest.mark.parametrize("silent_at", [ENDED, ENDED + 30 * SECOND, ENDED - HOUR / 2])
def test_a_cloud_controller_goes_first(silent_at: datetime) -> None:
    """From when both are over, instance and node."""
    due = max(silent_at, ENDED) + timedelta(seconds=ORPHANED_SECONDS)
    for at, names in ((due - SECOND, []), (due, ["n1"])):
        assert named(seen(left(at=silent_at), ended(), listed(at), at=at), at) == names


def test_a_node_that_reports_stays_whatever_the_cloud_says() -> None:
    """Its kubelet knows better; also of one that was silent before."""
    assert named(seen(node("n1"), ended(), confirmed(), NOTHING_LISTED)) == []
    assert named(seen(left(), left(at=ENDED + MINUTE, is_ready=True, version=3)[-1:], ended(), NOTHING_LISTED)) == []


def test_one_that_spoke_again_is_counted_anew() -> None:
    """The time begins with the last silence."""
    back = left(at=ENDED + MINUTE, is_ready=True, version=3)[-1:]
    again = left(at=ENDED + 3 * MINUTE, version=4)[-1:]
    for at, names in ((ENDED + 4 * MINUTE, []), (ENDED + 5 * MINUTE, ["n1"])):
        assert named(seen(left(), back, again, ended(), listed(at), at=at), at) == names


@pytest.mark.parametrize("count", [1, 2, 12])
def test_lists_that_lack_an_instance_are_no_word_about_it(count: int) -> None:
    """Nothing was said of this one: a short list, or some of them, prove nothing."""
    lists = tuple(told for number in range(count) for told in listed(DUE - number * 10 * SECOND))
    assert named(seen(left(), lists)) == []


def test_an_instance_that_lists_have_left_out_for_long_is_asked_about() -> None:
    """The cloud shows no end any more, or we began anew: the executor asks for this very one before anything goes."""
    late = ENDED + 12 * MINUTE
    missing = tuple(told for minutes in range(13) for told in listed(ENDED + minutes * MINUTE))
    assert named(seen(left(), missing, at=late), late) == ["n1"]
    assert named(seen(left(), missing, listed(late, "n1"), at=late), late) == []


def test_an_instance_is_missed_from_its_nodes_silence_on() -> None:
    """An hour of lists without it while the node was well is none; nor do old lists say anything now."""
    lists = tuple(told for minutes in range(61) for told in listed(T0 + minutes * MINUTE))
    assert named(seen(left(), lists, NOTHING_LISTED)) == []


def test_an_instance_that_shows_after_all_is_not_gone() -> None:
    """Our step was told that there is none; a list since then has it alive."""
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
def test_nodes_that_are_not_ours_to_remove_stay(changes: dict[str, Any]) -> None:
    """Those of Karpenter, of no instance that anybody can be asked about, and those that somebody deletes."""
    assert named(seen(left(**changes), ended(), confirmed(), NOTHING_LISTED)) == []


def test_nodes_of_others_stay() -> None:
    """No decision of ours bought it; that our account shows its instance's end changes nothing."""
    theirs = left(action_id=None)[-1:]
    over = [each.fact for each in ended() if isinstance(each.fact, NodeInstanceObserved)]
    foreign = msgspec.structs.replace(over[0], action_id=None)
    assert named(seen(theirs, (Told(foreign, ENDED),), NOTHING_LISTED)) == []


def test_the_end_of_another_instance_of_the_same_order_is_none_of_this_node() -> None:
    """A cloud that forgot its token made two: the node stands on the one that lives."""
    other = left(provider_id="sim:///zone-a/i-second")
    assert named(seen(other, ended(), confirmed(), NOTHING_LISTED)) == []


@pytest.mark.parametrize("source", [NodeListed, PodListed, NodeInstanceListed])
def test_nothing_is_due_while_the_picture_is_old(source: type[Fact]) -> None:
    """The node may be back, or the instance was never gone."""
    late, story = DUE + HOUR, (*left(), *ended())
    fresh = tuple(each for each in synced(story, as_of=late) if not isinstance(each.fact, source))
    old = tuple(each for each in synced(story, as_of=DUE) if isinstance(each.fact, source))
    assert named(given(story, old, fresh, as_of=late, is_synced=False), late) == []
    assert named(given(story, as_of=late), late) == ["n1"]


def test_a_freeze_holds_them_too() -> None:
    """Somebody wants to look; by policy or by word."""
    word = PolicyDirectiveGiven(
        directive=Freeze(), given_by="ops", reason="looking", given_at=ENDED, until=ENDED + HOUR
    )
    state = seen(left(), ended(), NOTHING_LISTED)
    assert named(state) == ["n1"]
    assert named(state, under=policy(is_frozen=True)) == []
    assert named(seen(left(), ended(), (Told(word, ENDED),), NOTHING_LISTED)) == []
