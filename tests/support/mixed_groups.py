"""Groups of waiting pods whose members differ in size, zone, GPU model and capacity type."""

import random
from collections.abc import Callable
from datetime import timedelta

from tests.support.stories import T0, Story, offer, on_sale, pod

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import (
    AffinitySelector,
    LabelRequirement,
    NodeDemands,
    PodAffinitySpec,
    PodGroup,
    Spread,
)

ZONES = ("zone-a", "zone-b", "zone-c")
_TYPES = (  # name, GPUs, model, CPUs, GiB, USD/h on demand
    ("t4.small", 1, "T4", 4, 16, 0.5),
    ("t4.large", 4, "T4", 48, 192, 1.8),
    ("a10.small", 1, "A10G", 4, 16, 0.9),
    ("a10.large", 4, "A10G", 48, 192, 3.5),
)
OFFERS = tuple(
    offer(
        name,
        gpus=gpus,
        model=model,
        gpu_memory_gib=16,
        cpu=cpu,
        memory_gib=memory_gib,
        zone=zone,
        capacity_type=capacity_type,
        usd_per_hour=usd * (1.0 if capacity_type is CapacityType.ON_DEMAND else 0.4) * (1 + 0.05 * number),
    )
    for name, gpus, model, cpu, memory_gib, usd in _TYPES
    for number, zone in enumerate(ZONES)
    for capacity_type in (CapacityType.SPOT, CapacityType.ON_DEMAND)
)


def members_of(app: str) -> PodGroup:
    """The pods of this app."""
    return PodGroup(namespaces=("default",), requirements=(LabelRequirement("app", "In", (app,)),))


def spread(app: str, key: str = labels.ZONE, skew_count_max: int = 1, *, domains_count_min: int = 1) -> PodAffinitySpec:
    """Spread evenly."""
    rule = Spread(
        topology_key=key, group=members_of(app), skew_count_max=skew_count_max, domains_count_min=domains_count_min
    )
    return PodAffinitySpec(spreads=(rule,))


def apart(app: str) -> PodAffinitySpec:
    """One on each host."""
    return PodAffinitySpec(apart=(AffinitySelector(topology_key=labels.HOSTNAME, group=members_of(app)),))


def together(app: str) -> PodAffinitySpec:
    """All in one zone."""
    return PodAffinitySpec(together=(AffinitySelector(topology_key=labels.ZONE, group=members_of(app)),))


def mixed_pod(
    name: str,
    app: str,
    rng: random.Random,
    pod_affinity: PodAffinitySpec | None,
    *,
    has_zone: bool = True,
    priorities: tuple[int, ...] = (0,),
) -> Story:
    """A pod of any size, for any or one GPU model, in any zone or one, on spot or not."""
    selector = {labels.ZONE: rng.choice(ZONES)} if has_zone and rng.random() < 0.3 else {}
    if rng.random() < 0.25:
        selector[labels.CAPACITY_TYPE] = "on-demand"
    return pod(
        name,
        gpus=rng.choice((1, 1, 2, 4)),
        cpu=rng.choice((0.5, 1, 2)),
        model=rng.choice((None, None, None, "T4", "A10G")),
        demands=NodeDemands(node_selector=tuple(sorted(selector.items()))),
        labels={"app": app},
        pod_affinity=pod_affinity,
        priority=rng.choice(priorities),
        at=T0 + timedelta(seconds=rng.randrange(60)),
    )


def mixed_pods(
    count: int, seed: int = 1, *, spreads_count: int = 5, aparts_count: int = 12, is_grouped: bool = True
) -> Story:
    """A quarter of the pods in zone spreads, a quarter in host anti-affinities; without rules the same pods alone."""
    rng = random.Random(seed)  # noqa: S311 - a case, not a secret
    groups: tuple[Callable[[int], tuple[str, PodAffinitySpec | None]], ...] = (
        lambda number: (f"even-{number % spreads_count}", spread(f"even-{number % spreads_count}")),
        lambda number: (f"apart-{number % aparts_count}", apart(f"apart-{number % aparts_count}")),
        lambda _: ("free", None),
        lambda _: ("free", None),
    )
    story: Story = on_sale(*OFFERS)
    for number in range(count):
        app, pod_affinity = groups[number % 4](number // 4)
        story += mixed_pod(f"p{number:05}", app, rng, pod_affinity if is_grouped else None)
    return story
