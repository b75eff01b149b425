"""Which telemetry makes a node unhealthy, for how long it must last, and what proves nothing."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, given, node, on_sale, pod, policy
from tests.support.telemetry import minute, minutes

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.defer import PodProtected, TooManyUnhealthy
from gpu_autoscaler.model.reasons.drain import NodeUnhealthy

NOW = T0 + HOUR
# What the exporter says of a GPU when this has happened.
XID_79 = {"xid_last": 79, "xids": (79,)}
FATAL: dict[str, Mapping[str, Any]] = {
    "GPU 3 reported XID 79": XID_79,
    "GPU 3 reported XID 48": {"xid_last": 45, "xids": (48, 45)},
    "GPU 3 failed to remap memory rows": {"is_row_remap_failed": True},
    "GPU 3 counted uncorrectable memory errors": {"ecc_double_bit_count": 1},
}


def story(sick: Mapping[str, Any], *more: Story, lasting: int = 15) -> Plan:
    """Two nodes with capacity for each other's work; GPU 3 of n1 has been unhealthy for `lasting` minutes."""
    well = 60 - lasting
    told = (
        node("n1"), node("n2"), on_sale(), minutes("n2", 60),
        minutes("n1", well), minutes("n1", lasting, start=T0 + well * MINUTE, sick={3: sick}),
    )  # fmt: skip
    state = given(*told, *more, as_of=NOW)
    return accepted_plan(state, RULES, NOW)


RULES = policy(
    is_consolidation_on=False,
    idle_seconds_max=1e6,
    removal={"waiting_micro_usd_per_hour": 10**15},
    disruption_ratio_max=1.0,
)
WORK = pod("a", on="n1", gpus=4)


@pytest.mark.parametrize("words", FATAL)
def test_a_broken_gpu_drains_its_node(words: str) -> None:
    """Regardless of protection: the work runs on a broken GPU."""
    protected = pod("a", on="n1", gpus=4, annotations={"karpenter.sh/do-not-disrupt": "true"})
    (drain,) = story(FATAL[words], protected).drains

    assert (drain.node_name, drain.is_voluntary) == ("n1", False)
    assert isinstance(drain.reason, NodeUnhealthy)
    assert words in drain.reason.sentence()


@pytest.mark.parametrize("sick", [{"temperature_celsius_min": 91.0}, {"xid_last": 94, "xids": (94,)}])
def test_a_degraded_gpu_respects_protection(sick: Mapping[str, Any]) -> None:
    """Hot, or due for a reset: its work moves when it may."""
    protected = pod("a", on="n1", gpus=4, annotations={"karpenter.sh/do-not-disrupt": "true"})
    (drain,) = story(sick, WORK).drains
    (held,) = [each.reason for each in story(sick, protected).deferred if each.step == "replace_drifted"]

    assert drain.is_voluntary
    assert isinstance(held, PodProtected)


@pytest.mark.parametrize("xid", [13, 31, 43, 45])
def test_an_application_error_is_no_gpu_fault(xid: int) -> None:
    """Whoever wrote it has to look."""
    assert story({"xid_last": xid, "xids": (xid,)}, WORK, lasting=50).decisions == ()


def test_a_fault_has_to_last() -> None:
    """Five minutes of heat, or a fault just now, are not enough."""
    assert story(XID_79, WORK, lasting=5).decisions == ()
    assert story({"temperature_celsius_min": 95.0}, WORK, lasting=5).decisions == ()


def test_eighty_five_degrees_are_allowed() -> None:
    """One cool minute ends the heat."""
    hot = {"temperature_celsius_min": 95.0}
    cooled = minute("n1", T0 + 59 * MINUTE, sick={3: {"temperature_celsius_min": 80.0}})

    assert story({"temperature_celsius_min": 85.0}, WORK, lasting=50).decisions == ()
    state = given(node("n1"), node("n2"), WORK, on_sale(), minutes("n1", 59, sick={3: hot}), cooled, as_of=NOW)
    assert plan(state, RULES, NOW).decisions == ()


def test_an_idle_gpu_is_not_unhealthy() -> None:
    """The job may wait for its data."""
    idle = {"utilization_ratio_min": 0.0, "utilization_ratio_mean": 0.0, "utilization_ratio_max": 0.0}

    assert story({**idle, "pod": "default/a"}, WORK, lasting=60).decisions == ()


def test_stale_telemetry_proves_nothing() -> None:
    """Its last sample is an hour old."""
    state = given(node("n1"), node("n2"), WORK, on_sale(), minutes("n1", 20, sick={3: XID_79}), as_of=NOW)

    assert plan(state, RULES, NOW).decisions == ()


def test_too_many_unhealthy_nodes_are_not_drained() -> None:
    """Ten nodes at once: telemetry, a driver, or the data center is at fault."""
    names = [f"n{number}" for number in range(10)]
    told = [each for name in names for each in (node(name), minutes(name, 60, sick={0: XID_79}))]
    state = given(*told, on_sale(), as_of=NOW)
    made = plan(state, RULES, NOW)

    assert made.drains == []
    assert TooManyUnhealthy(unhealthy_count=10, nodes_count=10, unhealthy_ratio_max=0.45) in [
        h.reason for h in made.deferred
    ]


def test_the_plan_check_finds_a_healthy_node() -> None:
    """The same plan on telemetry without the error."""
    made = story(XID_79, WORK)
    well = given(node("n1"), node("n2"), WORK, on_sale(), minutes("n1", 60), as_of=NOW)

    assert "node n1 is drained as unhealthy, and was healthy recently" in check(made, well, RULES)
