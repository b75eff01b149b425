"""Plans for clusters with empty nodes in any condition, and any history of arrivals."""

from collections.abc import Callable
from datetime import timedelta

from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, drained, given, node, offer, pod, policy

from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType

NOW = T0 + 3 * HOUR
KINDS = (
    offer("g4dn.xlarge", gpus=1, model="T4", usd_per_hour=0.1),
    offer("g4dn.12xlarge", gpus=4, model="T4", usd_per_hour=1.9),
    offer("g5.12xlarge", gpus=4, model="A10G", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=5.7),
)
Condition = Callable[[str, Story], Story]
CONDITIONS: tuple[Condition, ...] = (
    lambda _, told: told,
    lambda _, told: told,
    lambda name, told: (*told, *pod(f"on-{name}", on=name, gpus=1, at=NOW - HOUR)),
    lambda name, told: (*told, *drained(name, at=NOW - MINUTE)),
    lambda name, told: (*told, *drained(name, at=NOW - 3 * MINUTE, cancelled_at=NOW - 2 * MINUTE)),
)


@st.composite
def idle_clusters(draw: st.DrawFn) -> Story:
    """One to six nodes, most of them empty for up to half an hour, and arrivals of the last two hours."""
    story: Story = ()
    for number in range(draw(st.integers(1, 6))):
        name, ready_at = f"n{number}", NOW - draw(st.integers(0, 30)) * MINUTE
        told = node(
            name,
            draw(st.sampled_from(KINDS)),
            at=ready_at,
            is_cordoned=draw(st.integers(0, 7)) == 0,
            annotations={labels.DO_NOT_DISRUPT: "true"} if draw(st.integers(0, 7)) == 0 else None,
        )
        story += draw(st.sampled_from(CONDITIONS))(name, told)
    every, gpus = draw(st.integers(2, 60)), draw(st.sampled_from((1, 1, 2, 4)))
    for ago in range(draw(st.integers(1, 10)), 120, every):
        story += pod(f"past-{ago}", on="gone", gpus=gpus, at=NOW - ago * MINUTE, phase="succeeded")
    return story


def policies() -> st.SearchStrategy[ScalingPolicy]:
    """Policies with other bounds on idle times and removals."""
    return st.builds(
        lambda idle, ratio, unneeded, cooldown: policy(
            idle_seconds_max=idle,
            disruption_ratio_max=ratio,
            scale_down_cooldown_seconds=cooldown,
            removal=RemovalPolicy(unneeded_idle_seconds=unneeded),
        ),
        st.sampled_from((120.0, 300.0, 600.0)),
        st.sampled_from((0.1, 0.5, 1.0)),
        st.sampled_from((30.0, 60.0, 600.0)),
        st.sampled_from((0.0, 300.0, 900.0)),
    )


@settings(max_examples=800, deadline=None)
@for_all(idle_clusters(), policies(), st.integers(0, 900))
def test_the_plan_check_accepts_what_becomes_of_idle_nodes(story: Story, rules: ScalingPolicy, seconds: int) -> None:
    """Of those too that leave in one plan: none counts on what another one leaves behind."""
    at = NOW + timedelta(seconds=seconds)
    accepted_plan(given(story, as_of=at), rules, at)
