"""Plans for random groups of pods that are spread, kept apart or kept together, and whose members differ."""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.mixed_groups import OFFERS, ZONES, apart, mixed_pod, mixed_pods, spread, together
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    drained,
    given,
    node,
    notice,
    on_sale,
    pod,
    policy,
    provider_id,
)
from tests.support.timed_facts import TimedFact

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.provisioning.topology_domains import _ZoneAssigner
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.spot import SpotRebalanceRecommended
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.scheduling import PodAffinitySpec, Taint

NOON = T0 + HOUR
Rule = Callable[[str], PodAffinitySpec]


def _joined(*specs: PodAffinitySpec) -> PodAffinitySpec:
    return PodAffinitySpec(
        spreads=tuple(spread for spec in specs for spread in spec.spreads),
        apart=tuple(term for spec in specs for term in spec.apart),
        together=tuple(term for spec in specs for term in spec.together),
    )


# Always feasible: nodes of each kind are sold in every zone.
FEASIBLE: tuple[Rule, ...] = (
    spread,
    lambda app: spread(app, skew_count_max=2),
    lambda app: spread(app, skew_count_max=3),
    lambda app: spread(app, labels.HOSTNAME),
    lambda app: spread(app, labels.HOSTNAME, 3),
    apart,
    lambda app: _joined(spread(app), apart(app)),
    lambda app: _joined(spread(app), spread(app, labels.HOSTNAME, 2)),
)
# What one group asks for another may make impossible.
ANY: tuple[Rule, ...] = (
    *FEASIBLE,
    together,
    lambda app: spread(app, domains_count_min=3),  # a pod that may run in one zone only is not in three
    lambda app: spread(app, skew_count_max=2, domains_count_min=4),
    lambda app: spread({"g0": "g1", "g1": "g2", "g2": "g0"}[app]),
    lambda app: apart({"g0": "g1", "g1": "g2", "g2": "g0"}[app]),
    lambda app: _joined(together(app), spread(app, labels.HOSTNAME)),
)

# Of a node with running pods.
CONDITIONS: tuple[Callable[[str, Offer], Story], ...] = (
    node,
    lambda name, of: node(name, of, is_ours=False),
    lambda name, of: node(name, of, is_cordoned=True),
    lambda name, of: node(name, of, is_cordoned=True, is_ours=False),
    lambda name, of: (*node(name, of), *node(name, of, is_ready=False, version=2)[-1:]),
    lambda name, of: (*node(name, of, is_ours=False), *node(name, of, is_ours=False, is_ready=False, version=2)),
    lambda name, of: (*node(name, of), *node(name, of, gpus_allocatable=0, version=2)[-1:]),
    lambda name, of: node(name, of, taints=(Taint(key="team", effect="NoSchedule"),)),
    lambda name, of: node(name, of, deleting_since=NOON, has_finalizer=True),
    lambda name, of: (*node(name, of), *notice(name, reclaim_at=NOON + 2 * MINUTE, at=NOON)),
    lambda name, of: (*node(name, of), *drained(name, at=NOON)),
    lambda name, of: (*node(name, of), *drained(name, at=NOON - MINUTE, cancelled_at=NOON)),
    lambda name, of: (
        *node(name, of),
        TimedFact(SpotRebalanceRecommended(provider_id=provider_id(f"buy-{name}"), noticed_at=NOON), NOON),
    ),
)


@st.composite
def groups(draw: st.DrawFn, rules: tuple[Rule, ...], *, has_nodes: bool = False) -> Story:
    """Up to three groups of up to twelve pods, of which some have no rule, and of two priorities. With `has_nodes` some
    run on nodes in any condition, and not every zone may have offers."""
    rng = random.Random(draw(st.integers(0, 2**32)))  # noqa: S311 - a case, not a secret
    priorities = draw(st.sampled_from(((0,), (0, 10))))
    zones = draw(st.sets(st.sampled_from(ZONES), min_size=1)) if has_nodes else ZONES
    story: Story = on_sale(*(sold for sold in OFFERS if sold.zone in zones), at=NOON)
    names = [f"n{number}" for number in range(draw(st.integers(1, 5)))] if has_nodes else []
    for name in names:
        story += draw(st.sampled_from(CONDITIONS))(name, rng.choice(OFFERS))
    for number in range(draw(st.integers(1, 3))):
        rule = draw(st.sampled_from(rules))
        app = f"g{number}"
        for member in range(draw(st.integers(1, 12))):
            spec = None if rng.random() < 0.15 else rule(app)
            if names and rng.random() < 0.5:
                since = T0 + timedelta(seconds=member)
                running: dict[str, Any] = {
                    "gpus": 0,
                    "cpu": 0.1,
                    "memory_gib": 0.1,
                    "on": rng.choice(names),
                    "at": since,
                }
                story += pod(f"{app}-{member}", labels={"app": app}, pod_affinity=spec, **running)
            else:
                story += mixed_pod(f"{app}-{member}", app, rng, spec, priorities=priorities)
    return story


def _planned(state: ClusterState, nodes_count_max: int = 500) -> tuple[Plan, tuple[str, ...]]:
    rules = policy(nodes_count_max=nodes_count_max)
    made = plan(state, rules, NOON)
    return made, check(made, state, rules)


@settings(max_examples=150, deadline=None)
@for_all(groups(ANY))
def test_the_plan_check_accepts_plans_for_any_mix_of_groups(story: Story) -> None:
    """Whatever the groups ask for, and whichever members may not go where the others may."""
    assert _planned(given(story, as_of=NOON))[1] == ()


@settings(max_examples=300, deadline=None)
@for_all(groups(ANY, has_nodes=True))
def test_the_plan_check_accepts_plans_for_groups_that_run_already(story: Story) -> None:
    """On nodes that are ready, cordoned, not ready, leaving or advised to be left."""
    assert _planned(given(story, as_of=NOON))[1] == ()


@settings(max_examples=100, deadline=None)
@for_all(groups(ANY), st.integers(1, 8))
def test_the_plan_check_accepts_plans_for_groups_under_a_limit(story: Story, nodes_count_max: int) -> None:
    """A limit stops the purchase anywhere in a group."""
    assert _planned(given(story, as_of=NOON), nodes_count_max)[1] == ()


@settings(max_examples=100, deadline=None)
@for_all(groups(FEASIBLE))
def test_feasible_groups_are_served_at_once(story: Story) -> None:
    """Every pod is bought for by the first plan."""
    made, violations = _planned(given(story, as_of=NOON))

    assert violations == ()
    assert [each.subject for each in made.deferred] == []


@settings(max_examples=25, deadline=None)
@for_all(groups(FEASIBLE), st.integers())
def test_plans_for_groups_do_not_depend_on_the_order_of_pods(story: Story, seed: int) -> None:
    """Equal states give equal plans, byte for byte."""
    pods = list(given(story, as_of=NOON).pods.items())
    random.Random(seed).shuffle(pods)  # noqa: S311 - order, not secrets
    state = given(story, as_of=NOON)
    mixed = msgspec.structs.replace(state, pods=dict(pods))

    assert msgspec.json.encode(_planned(mixed)[0]) == msgspec.json.encode(_planned(state)[0])


@pytest.mark.parametrize("seed", range(12))
def test_sixty_pods_in_mixed_groups_are_served(seed: int) -> None:
    """Fifteen pods of one spread group differ in all else, and their zones are even for each of them."""
    state = given(mixed_pods(60, seed, spreads_count=1, aparts_count=2), as_of=NOON)
    made, violations = _planned(state)

    assert violations == ()
    assert made.deferred == ()


@pytest.mark.parametrize("seed", [1, 2])
def test_members_counted_only_in_their_turn_are_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: zones stay as each pod chose them when its turn came. The plan check refuses that plan."""
    monkeypatch.setattr(_ZoneAssigner, "_even_out", lambda *_, **__: None)
    state = given(mixed_pods(60, seed, spreads_count=1, aparts_count=2), as_of=NOON)

    assert any("would be uneven" in violation for violation in _planned(state)[1])
