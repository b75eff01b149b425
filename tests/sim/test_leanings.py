"""What the swarm's replicas would like: each kind occurs, binds nobody, and is read as a preference."""

import random

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.neighbours import neighbour_demands, preferences
from gpu_autoscaler.sim.leanings import with_likes


def test_every_kind_occurs_and_none_binds() -> None:
    """Of two hundred services some like a zone or model, to be near, far or even; none is bound by it."""
    chance = random.Random("leanings")  # noqa: S311 - nothing is secret here
    pods = [
        wire.Pod(metadata=wire.Metadata(name="a", namespace="serving"), spec=with_likes(wire.PodSpec(), "a", chance))
        for _ in range(200)
    ]
    said = [preferences(pod) for pod in pods]

    assert all(neighbour_demands(pod) is None for pod in pods)
    assert None in said
    for kind in ("nodes", "spreads", "apart", "together"):
        assert any(each is not None and getattr(each, kind) for each in said)


def test_what_a_service_insists_on_stays() -> None:
    """Likes are added to rules, never in their place."""
    term = wire.PodAffinityTerm(topology_key="kubernetes.io/hostname", label_selector=wire.LabelSelector())
    strict = wire.PodSpec(affinity=wire.Affinity(pod_anti_affinity=wire.PodAffinity(required=(term,))))
    chance = random.Random("strict")  # noqa: S311 - nothing is secret here

    for _ in range(50):
        affinity = with_likes(strict, "a", chance).affinity
        assert affinity is not None
        assert affinity.pod_anti_affinity is not None
        assert affinity.pod_anti_affinity.required == (term,)
