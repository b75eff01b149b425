"""Plans that the plan check accepts."""

from datetime import datetime

from tests.support.stories import policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Plan


def accepted_plan(state: ClusterState, rules: ScalingPolicy | None, as_of: datetime) -> Plan:
    """Return the plan; the plan check has to accept it. Without rules those of the stories hold."""
    rules = rules or policy()
    made = plan(state, rules, as_of)
    assert check(made, state, rules) == ()
    return made
