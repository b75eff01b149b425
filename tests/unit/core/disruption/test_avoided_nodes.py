"""Nodes that new pods avoid: which they are, and that some node stays open to every pod."""

import pytest
from msgspec.structs import replace
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, T0, Story, drained, given, job, node, offer, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.disruption.avoided_nodes import TaintChange, taint_changes
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AvoidNode, OpenNode, Upkeep
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import NodeDemands, Taint, Toleration

NOW = T0 + HOUR
CHEAP = offer("g4dn", gpus=4, usd_per_hour=1.2)
EXPENSIVE = offer("g4dn", gpus=4, usd_per_hour=3.9, capacity_type=CapacityType.ON_DEMAND)
A10 = offer("g5", gpus=4, model="A10G", usd_per_hour=5.0)
AVOIDED = (Taint(key=labels.AVOID_TAINT, effect="PreferNoSchedule"),)
OFF = policy(removal=RemovalPolicy(is_avoid_taint_on=False))
TOLERANT = NodeDemands(tolerations=(Toleration(key=labels.AVOID_TAINT, operator="Exists"),))


def on(name: str, count: int = 1, **more: object) -> Story:
    """This many pods with one GPU run there."""
    return tuple(fact for n in range(count) for fact in pod(f"{name}-{n}", gpus=1, on=name, **more))  # type: ignore[arg-type]


def changes(*stories: Story, under: ScalingPolicy | None = None) -> dict[str, str]:
    """What becomes of nodes, by name: avoided, or open and why. The plan decides it, and the plan check accepts it."""
    state, rules = given(*stories, as_of=NOW), under or policy()
    acts = accepted_plan(state, rules, NOW).upkeep_decisions
    decided = {act.node_name for act in acts if isinstance(act, AvoidNode | OpenNode)}
    found: dict[str, str] = {}
    for change in taint_changes(state, rules, NOW):
        found[change.node_name] = change.cause or "avoided"
    assert decided == found.keys()
    return found


def test_the_node_that_costs_most_for_each_workload_is_avoided() -> None:
    """A second pod makes an expensive node cheap, a third free node makes it one too many."""
    assert changes(node("a", CHEAP), on("a"), node("b", EXPENSIVE), on("b")) == {"b": "avoided"}
    assert changes(node("a", CHEAP), on("a"), node("b", CHEAP), on("b", 3)) == {"a": "avoided"}
    assert changes(node("a", CHEAP), on("a")) == {}


def test_it_is_said_what_each_workload_costs() -> None:
    """With one more on the node."""
    state = given(node("a", CHEAP), on("a"), node("b", EXPENSIVE), on("b"), as_of=NOW)
    (act,) = [act for act in plan(state, policy(), NOW).upkeep_decisions if isinstance(act, AvoidNode)]

    assert act.sentence() == (
        "Let new pods avoid node b where they can. With one more workload, each costs $2.00/h here, and at most "
        "$0.65/h on the nodes that stay open."
    )


def test_as_many_stay_open_as_the_largest_pod_needs() -> None:
    """Whether on one node or on several; for each GPU model that pods ask for."""
    three = (node("a", CHEAP), on("a", 3), node("b", CHEAP), on("b", 2), node("c", EXPENSIVE), on("c"))
    assert changes(*three) == {"b": "avoided", "c": "avoided"}
    assert changes(*three, node("d", A10), pod("large", gpus=2, on="d")) == {"c": "avoided", "d": "avoided"}
    assert changes(*three, node("d", A10), pod("a10", gpus=1, on="d", model="A10G")) == {"b": "avoided", "c": "avoided"}


def test_an_avoided_node_is_opened_when_it_is_among_the_cheapest() -> None:
    """One that costs as much as the open one is not: taints do not change back and forth."""
    story = (node("a", CHEAP, taints=AVOIDED), node("b", CHEAP), on("b"))
    assert changes(*story, on("a")) == {}
    assert changes(*story, on("a", 2)) == {"a": "cheapest"}


def test_a_node_is_avoided_only_while_another_is_open_in_fact() -> None:
    """Not before the taint of the node that takes its place is gone."""
    story = (node("a", CHEAP), node("b", CHEAP), on("b"), on("a", 2))
    assert changes(*story) == {"b": "avoided"}
    assert changes(node("a", CHEAP, taints=AVOIDED), *story[1:]) == {"a": "cheapest"}


def test_nothing_is_avoided_where_every_pod_tolerates_it() -> None:
    """Jobs of the queue have their nodes from the scheduler. Without other pods, or by the policy, the taint goes."""
    nodes = (node("a", CHEAP), node("b", EXPENSIVE, taints=AVOIDED), node("c", EXPENSIVE))
    jobs = (on("a", demands=TOLERANT), on("b", demands=TOLERANT), on("c", demands=TOLERANT))
    assert changes(*nodes, *jobs) == {"b": "no_pods"}
    assert changes(*nodes, *jobs, on("a")[:0], pod("cpu", gpus=0, on="c")) == {"b": "no_pods"}
    assert changes(*nodes, on("a"), on("b"), on("c"), under=OFF) == {"b": "policy"}
    assert changes(*nodes, on("a"), on("b"), on("c")) == {"c": "avoided"}


def test_nodes_that_are_not_ours_leave_or_wait_for_their_first_work_are_left_alone() -> None:
    """So are full nodes: they take no pod."""
    cheap = (node("a", CHEAP), on("a", 3))
    assert changes(*cheap, node("b", EXPENSIVE, is_ours=False), on("b")) == {}
    assert changes(*cheap, node("b", EXPENSIVE), on("b"), drained("b", at=NOW)) == {}
    assert changes(*cheap, node("b", EXPENSIVE), on("b", 4)) == {}
    assert changes(*cheap, node("b", EXPENSIVE, at=NOW), job("next", gpus=4, priority=1000)) == {}


def test_work_is_planned_for_avoided_nodes_as_for_others() -> None:
    """Kubernetes uses them when the others are full, so nothing is bought."""
    state = given(
        node("a", CHEAP), on("a", 4), node("b", CHEAP, taints=AVOIDED), on("b"), pod("new", gpus=1), as_of=NOW
    )

    assert accepted_plan(state, policy(), NOW).purchases == []


def test_one_plan_changes_ten_taints() -> None:
    """The others wait for the next one; the most expensive come first."""
    many = [node(f"n{number:02}", EXPENSIVE) + on(f"n{number:02}") for number in range(14)]
    state = given(node("a", CHEAP), on("a", 3), *many, as_of=NOW)
    made = accepted_plan(state, policy(), NOW)
    assert made.upkeep is not None

    assert sum(isinstance(act, AvoidNode) for act in made.upkeep_decisions) == 10
    (held,) = [each for each in made.upkeep.deferred if each.decision == "avoid_node"]
    assert (held.objects_count, held.reason.tag()) == (4, "plan_full")


def test_equal_changes_are_found_after_each_pod() -> None:
    """What follows the changed pods agrees with what is counted anew."""
    facts: list[Story] = [node("a", CHEAP), node("b", EXPENSIVE), on("a"), on("b"), pod("c", gpus=2)]
    for number in range(len(facts) + 1):
        state = given(*facts[:number], as_of=NOW)
        fresh = replace(state)
        assert taint_changes(state, policy(), NOW) == taint_changes(fresh, policy(), NOW)


def avoiding(state: ClusterState, *names: str, under: ScalingPolicy | None = None) -> tuple[str, ...]:
    """What the plan check says of a plan that lets new pods avoid these nodes."""
    rules = under or policy()
    made = plan(state, rules, NOW)
    (act,) = [act for act in made.upkeep_decisions if isinstance(act, AvoidNode)]
    acts = tuple(
        replace(act, action_id=f"avoid-{name}", node_name=name, node_uid=NodeUid(f"uid-{name}")) for name in names
    )
    return check(replace(made, upkeep=Upkeep(decisions=acts)), state, rules)


def test_the_plan_check_knows_when_a_node_may_be_avoided() -> None:
    """Not the last one that is open, nor one of others, nor against policy or pods."""
    stories = (node("a", CHEAP), on("a"), node("b", EXPENSIVE), on("b"), node("c", EXPENSIVE, is_ours=False), on("c"))
    state = given(*stories, as_of=NOW)
    assert avoiding(state, "b") == ()
    assert avoiding(state, "a") == ()  # which of them is a matter of cost
    assert "no such node of ours" in avoiding(state, "c")[0]
    assert "no such node of ours" in avoiding(state, "x")[0]
    two = given(*stories[:4], as_of=NOW)
    assert avoiding(two, "a", "b") == ("new pods avoid every node with free GPUs",)


@pytest.mark.parametrize(
    ("story", "under", "what"),
    [
        ((node("b", EXPENSIVE, taints=AVOIDED), on("b")), policy(), "the node has the taint"),
        ((node("b", EXPENSIVE), on("b", demands=TOLERANT)), policy(), "every pod with GPUs tolerates the taint"),
        ((node("b", EXPENSIVE), on("b")), OFF, "the policy forbids it"),
        ((node("b", EXPENSIVE), on("b")), policy(is_frozen=True), "scaling is frozen"),
    ],
)
def test_the_plan_check_refuses_taints_without_cause(story: tuple[Story, ...], under: ScalingPolicy, what: str) -> None:
    """As the state and the policy show it."""
    good = given(node("a", CHEAP), on("a"), node("b", EXPENSIVE), on("b"), as_of=NOW)
    made = plan(good, policy(), NOW)
    (act,) = [act for act in made.upkeep_decisions if isinstance(act, AvoidNode)]
    state = given(node("a", CHEAP), on("a", demands=TOLERANT), *story, as_of=NOW)
    violations = check(replace(plan(state, under, NOW), upkeep=Upkeep(decisions=(act,))), state, under)

    assert [violation for violation in violations if what in violation], violations


def test_the_plan_check_refuses_to_open_what_is_open() -> None:
    """The taint must be there."""
    story = (node("a", CHEAP, taints=AVOIDED), node("b", CHEAP), on("b"), on("a", 2))
    state = given(*story, as_of=NOW)
    made = plan(state, policy(), NOW)
    (act,) = [act for act in made.upkeep_decisions if isinstance(act, OpenNode)]
    wrong = replace(act, node_name="b", node_uid=NodeUid("uid-b"))

    assert check(replace(made, upkeep=Upkeep(decisions=(act,))), state, policy()) == ()
    assert (
        "the node does not have the taint"
        in check(replace(made, upkeep=Upkeep(decisions=(wrong,))), state, policy())[0]
    )


def test_the_change_names_node_and_price() -> None:
    """In micro-dollars an hour, with the overhead of a node."""
    state = given(node("a", CHEAP), on("a"), node("b", EXPENSIVE), on("b"), as_of=NOW)

    assert taint_changes(state, policy(), NOW) == (TaintChange(NodeUid("uid-b"), "b", None, 2_000_000, 650_000),)
