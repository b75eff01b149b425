"""What how busy GPUs are may do: alone nothing by default, one node a cooldown by choice, and nothing in the dark."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    bought,
    given,
    node,
    offer,
    on_sale,
    planned,
    pod,
    policy,
)
from tests.support.telemetry import minutes

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand, UtilizationHigh
from gpu_autoscaler.model.reasons.defer import TelemetryFault, TelemetryUnreliable, UtilizationUnconfirmed
from gpu_autoscaler.model.reasons.defer_limits import Cooldown, NodesLimit
from gpu_autoscaler.model.reasons.drain import NodeUnderused

NOW = T0 + HOUR
DIRECT = policy(utilization_trigger="direct")
SALE = on_sale(offer("big", gpus=8), offer("other", gpus=8, model="T4", usd_per_hour=1.0))


def made_of(state: ClusterState, rules: ScalingPolicy | None = None, as_of: datetime = NOW) -> Plan:
    """The plan, which the second opinion finds nothing against."""
    rules = rules or policy()
    made = plan(state, rules, as_of)
    assert check(made, state, rules) == ()
    return made


def reason_of(made: Plan, subject: str = "cluster") -> list[object]:
    """Why the plan did nothing for it."""
    return [each.reason for each in made.deferred if each.subject == subject and each.step == "answer_use"]


def busy(*more: Story, **figures: Any) -> ClusterState:  # noqa: ANN401 - those of `minutes`
    """Two nodes full of work, which are used like this for the last hour."""
    used = {"busy": 0.9} | figures
    full = [
        each
        for name in ("n1", "n2")
        for each in (node(name), pod(f"p-{name}", on=name, gpus=8), minutes(name, 60, **used))
    ]
    return given(*full, SALE, *more, as_of=NOW)


# ---- high use


def test_a_high_figure_alone_buys_no_node_and_the_plan_says_so() -> None:
    """Nobody waits, and nobody knows that somebody will."""
    made = made_of(busy())

    assert made.decisions == ()
    assert reason_of(made) == [UtilizationUnconfirmed(utilization_ratio=0.9, utilization_ratio_max=0.8)]


def test_together_with_work_that_waits_a_node_comes() -> None:
    """It is bought for the work, and nothing is held back for the figure."""
    made = made_of(busy(pod("waits", gpus=8, at=NOW)))
    (one,) = made.decisions

    assert isinstance(one.reason, UnmetDemand)
    assert reason_of(made) == []


def test_by_choice_one_node_comes_for_the_figure_alone() -> None:
    """Of the model that is used most, though another one is cheaper; and not a second one while that boots."""
    (one,) = made_of(busy(), DIRECT).decisions
    assert isinstance(one, BuyNode)

    assert one.offer.instance_type == "big"
    assert one.reason == UtilizationHigh(utilization_ratio=0.9, utilization_ratio_max=0.8)
    assert made_of(busy(planned(one, at=NOW - MINUTE)), DIRECT).decisions == ()


def test_by_choice_too_one_node_a_cooldown() -> None:
    """The last one was refused a minute ago, say, or is used already."""
    (one,) = made_of(busy(), DIRECT).decisions
    assert isinstance(one, BuyNode)
    came = (bought(one, at=NOW - 2 * MINUTE), node("n3", at=NOW - MINUTE)[-1:], pod("more", on="n3", gpus=8, at=NOW))
    fact = msgspec.structs.replace(came[1][0].fact, action_id=one.action_id)
    story = (*came[0], msgspec.structs.replace(came[1][0], fact=fact), *came[2])
    (held,) = reason_of(
        made_of(busy(story), policy(utilization_trigger="direct", utilization={"telemetry_coverage_ratio_min": 0}))
    )

    assert held == Cooldown(remaining_seconds=60.0)


def test_a_limit_holds_for_the_figure_as_for_everybody() -> None:
    """Two nodes are all that the policy wants."""
    made = made_of(busy(), policy(utilization_trigger="direct", nodes_count_max=2))

    assert made.decisions == ()
    assert [type(each) for each in reason_of(made)] == [NodesLimit]


@pytest.mark.parametrize("rules", [policy(), DIRECT])
@pytest.mark.parametrize(
    ("fault", "figures"),
    [
        ("silent", {"is_silent": True}),
        ("frozen", {"watts": 100.0}),
        ("corrupt", {"busy": None}),
        ("all_zero", {"busy": 0.0}),
    ],
)
def test_what_cannot_be_trusted_moves_nothing_and_says_so(
    fault: TelemetryFault, figures: Mapping[str, Any], rules: ScalingPolicy
) -> None:
    """Silence and its like, under either trigger."""
    made = made_of(busy(**figures), rules)
    known = [TelemetryUnreliable(fault=fault, nodes_count=2, gpu_nodes_count=2)]

    assert made.decisions == ()
    # Where no exporter ever said anything, and no figure is asked for, there is nothing to tell.
    assert reason_of(made) == ([] if fault == "silent" and rules is not DIRECT else known)


def test_telemetry_that_stopped_is_no_telemetry() -> None:
    """It was high for long, until half an hour ago."""
    full = [
        each
        for name in ("n1", "n2")
        for each in (node(name), pod(f"p-{name}", on=name, gpus=8), minutes(name, 30, busy=0.95))
    ]

    assert reason_of(made_of(given(*full, SALE, as_of=NOW), DIRECT)) == [
        TelemetryUnreliable(fault="silent", nodes_count=2, gpu_nodes_count=2)
    ]


# ---- low use


def little(
    *more: Story,
    lasting: int = 30,
    requested: int = 6,
    at_last: float = 0.05,
    usd_per_hour: float | None = 10.0,
    **figures: Any,  # noqa: ANN401 - those of `minutes`
) -> ClusterState:
    """n1 is asked for much and used little; n2 has room for its work."""
    before = 60 - lasting
    n1 = (
        node("n1", offer(usd_per_hour=usd_per_hour)), pod("a", on="n1", gpus=requested), minutes("n1", before),
        minutes("n1", lasting, start=T0 + before * MINUTE, busy=at_last, **figures),
    )  # fmt: skip
    return given(
        *n1, node("n2"), pod("b", on="n2", gpus=1), pod("c", on="n2", gpus=1), minutes("n2", 60), SALE, *more, as_of=NOW
    )


KEEP_N2 = pod("kept", on="n2", gpus=0, annotations={"karpenter.sh/do-not-disrupt": "true"})


def drain(made: Plan) -> DrainNode | None:
    """The one that the plan drains, if any."""
    found = [each for each in made.decisions if isinstance(each, DrainNode)]
    return found[0] if found else None


def test_a_node_that_is_used_little_goes_when_its_work_fits_elsewhere() -> None:
    """It is asked for too much to be looked at without the figure."""
    found = drain(made_of(little(KEEP_N2)))

    assert found is not None
    assert isinstance(found.reason, NodeUnderused)
    assert (found.node_name, found.reason.utilization_ratio) == ("n1", 0.05)


@pytest.mark.parametrize(
    "state",
    [
        little(KEEP_N2, requested=7),
        little(KEEP_N2, lasting=5),
        little(KEEP_N2, at_last=0.25),
        little(KEEP_N2, at_last=0.0),
        little(KEEP_N2, watts=100.0),
        little(KEEP_N2, is_silent=True),
    ],
    ids=["no room", "not for long", "not little", "a sensor that reads zero", "frozen", "silent"],
)
@pytest.mark.parametrize("rules", [policy(), DIRECT])
def test_a_low_figure_alone_removes_no_node(state: ClusterState, rules: ScalingPolicy) -> None:
    """Without room for its work, for long enough, and from a sensor that can be trusted, nothing goes."""
    assert drain(made_of(state, rules)) is None


def test_by_choice_the_saving_is_not_asked_for_and_one_goes_a_cooldown() -> None:
    """The plain trigger wants little used nodes gone; work keeps its place all the same."""
    strict = {"consolidation_saving_ratio_min": 0.9}
    found = drain(made_of(little(KEEP_N2), policy(utilization_trigger="direct", **strict)))
    assert found is not None
    again = little(
        KEEP_N2, planned(msgspec.structs.replace(found, node_uid="uid-gone", node_name="gone"), at=NOW - MINUTE)
    )

    assert drain(made_of(little(KEEP_N2), policy(**strict))) is None
    assert drain(made_of(again, DIRECT)) is None


def test_by_choice_a_node_of_unknown_price_goes_and_no_saving_is_made_up() -> None:
    """Nobody knows what its going saves, which is not nothing; gated, it stays for that."""
    unpriced = little(KEEP_N2, usd_per_hour=None)
    found = drain(made_of(unpriced, DIRECT))

    assert drain(made_of(unpriced)) is None
    assert found is not None
    assert isinstance(found.reason, NodeUnderused)
    assert found.reason.saving_micro_usd_per_hour is None
    assert "nobody knows" in found.reason.sentence()


# ---- the second opinion


def test_the_second_opinion_reads_the_figures_itself() -> None:
    """Plans for use are refused on telemetry that does not bear them out."""
    high, low = made_of(busy(), DIRECT), made_of(little(KEEP_N2))

    assert "nodes are bought for their use alone, which the policy does not want" in str(check(high, busy(), policy()))
    assert "no node's telemetry says so" in str(check(high, busy(busy=0.5), DIRECT))
    assert "which its telemetry does not say" in str(check(low, little(KEEP_N2, at_last=0.5), policy()))
