"""What GPU utilization may cause: by default nothing alone, with `direct` one node per cooldown, never on unreliable
data.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, bought, given, node, offer, on_sale, planned, pod, policy
from tests.support.telemetry import minutes

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand, UtilizationHigh
from gpu_autoscaler.model.reasons.defer import TelemetryFault, TelemetryUnreliable, UtilizationUnconfirmed
from gpu_autoscaler.model.reasons.defer_limits import Cooldown, NodesLimit
from gpu_autoscaler.model.reasons.drain import NodeUnderused

NOW = T0 + HOUR - MINUTE  # no node is old enough to be replaced
DIRECT = policy(utilization_trigger="direct")
SALE = on_sale(offer("big", gpus=8), offer("other", gpus=8, model="T4", usd_per_hour=1.0))


def made_of(state: ClusterState, rules: ScalingPolicy | None = None, as_of: datetime = NOW) -> Plan:
    """The plan, which the plan check finds nothing against."""
    return accepted_plan(state, rules, as_of)


def reason_of(made: Plan, subject: str = "cluster") -> list[object]:
    """Why the plan did nothing for it."""
    return [each.reason for each in made.deferred if each.subject == subject and each.step == "react_to_utilization"]


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


def test_high_utilization_alone_buys_no_node() -> None:
    """With the reason."""
    made = made_of(busy())

    assert made.decisions == ()
    assert reason_of(made) == [UtilizationUnconfirmed(utilization_ratio=0.9, utilization_ratio_max=0.8)]


def test_waiting_work_buys_a_node_at_high_utilization() -> None:
    """It is bought for the work, and nothing is deferred for utilization."""
    made = made_of(busy(pod("waits", gpus=8, at=NOW)))
    (one,) = made.decisions

    assert isinstance(one.reason, UnmetDemand)
    assert reason_of(made) == []


def test_direct_utilization_buys_one_node() -> None:
    """Of the most used model, though another one is cheaper; no second one while that boots."""
    (one,) = made_of(busy(), DIRECT).decisions
    assert isinstance(one, BuyNode)

    assert one.offer.instance_type == "big"
    assert one.reason == UtilizationHigh(utilization_ratio=0.9, utilization_ratio_max=0.8)
    assert made_of(busy(planned(one, at=NOW - MINUTE)), DIRECT).decisions == ()


def test_direct_utilization_buys_one_node_per_cooldown() -> None:
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


def test_limits_apply_to_utilization() -> None:
    """Two nodes are the policy's maximum."""
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
def test_unreliable_telemetry_causes_nothing(
    fault: TelemetryFault, figures: Mapping[str, Any], rules: ScalingPolicy
) -> None:
    """Each fault, under either trigger."""
    made = made_of(busy(**figures), rules)
    known = [TelemetryUnreliable(fault=fault, nodes_count=2, gpu_nodes_count=2)]

    assert made.decisions == ()
    # Where no exporter ever said anything, and no figure is asked for, there is nothing to tell.
    assert reason_of(made) == ([] if fault == "silent" and rules is not DIRECT else known)


def test_stale_telemetry_is_ignored() -> None:
    """It was high until half an hour ago."""
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
    found = made.drains
    return found[0] if found else None


def test_an_underutilized_node_is_removed_when_its_work_fits_elsewhere() -> None:
    """Its requests alone would not make it a candidate."""
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
def test_low_utilization_alone_removes_no_node(state: ClusterState, rules: ScalingPolicy) -> None:
    """It needs other capacity, enough time, and reliable telemetry."""
    assert drain(made_of(state, rules)) is None


def test_direct_utilization_removes_one_node_per_cooldown() -> None:
    """Regardless of the saving; its work still needs a place."""
    strict = {"consolidation_saving_ratio_min": 0.9}
    found = drain(made_of(little(KEEP_N2), policy(utilization_trigger="direct", **strict)))
    assert found is not None
    again = little(
        KEEP_N2, planned(msgspec.structs.replace(found, node_uid="uid-gone", node_name="gone"), at=NOW - MINUTE)
    )

    assert drain(made_of(little(KEEP_N2), policy(**strict))) is None
    assert drain(made_of(again, DIRECT)) is None


def test_direct_utilization_removes_a_node_of_unknown_price() -> None:
    """The saving is unknown, which is not zero; with the default trigger it stays for that."""
    unpriced = little(KEEP_N2, usd_per_hour=None)
    found = drain(made_of(unpriced, DIRECT))

    assert drain(made_of(unpriced)) is None
    assert found is not None
    assert isinstance(found.reason, NodeUnderused)
    assert found.reason.saving_micro_usd_per_hour is None
    assert "the saving is unknown" in found.reason.sentence()


# ---- the plan check


def test_the_plan_check_reads_the_telemetry_itself() -> None:
    """Plans for utilization are rejected on telemetry that does not justify them."""
    high, low = made_of(busy(), DIRECT), made_of(little(KEEP_N2))

    assert "nodes are bought for utilization alone, which the policy does not allow" in str(
        check(high, busy(), policy())
    )
    assert "no node's telemetry shows" in str(check(high, busy(busy=0.5), DIRECT))
    assert "which its telemetry does not show" in str(check(low, little(KEEP_N2, at_last=0.5), policy()))
