"""Packing policies by name, for plan and job queue; ties are broken by the smallest name."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.gpu_packer import PodShares, Popular, Scores
from tests.support.stories import T0, given, job, node, offer, policy

from gpu_autoscaler.core.placement.gpu_packing import WHOLE, PackingPolicy
from gpu_autoscaler.core.placement.ranking import BY_NAME
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.model.ids import JobId

SMALL = offer("small", gpus=4, cpu=32, memory_gib=128)
LARGE = offer("large", gpus=8, cpu=96, memory_gib=512)


def placed(name: str, *members: int, nodes: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the nodes of one-GPU jobs with these member counts; nodes by name, True for a large one."""
    stories = [node(each, LARGE if is_large else SMALL) for each, is_large in nodes]
    stories += [job(f"j{number}", gpus=1, members=count) for number, count in enumerate(members)]
    made = schedule(given(*stories), policy(placement=name), T0)
    return [host for each in made.placements for host in each.node_names]


NODES = (("n1", True), ("n2", False), ("n3", True))


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("fragmentation-gradient", ["n2"] * 4 + ["n1", "n1"]),
        ("best-fit", ["n2"] * 4 + ["n1", "n1"]),
        ("spreading", ["n1", "n3", "n1", "n3", "n1", "n3"]),
        ("least-loaded", ["n1", "n3", "n1", "n3", "n2", "n1"]),
        ("round-robin", ["n1", "n2", "n3", "n1", "n2", "n3"]),
    ],
)
def test_each_policy_fills_nodes_in_its_order(name: str, hosts: list[str]) -> None:
    """Six members of one GPU on two large nodes and a small one."""
    assert placed(name, 6, nodes=NODES) == hosts


def test_packing_fills_used_nodes_before_idle_ones() -> None:
    """The second job follows the first."""
    hosts = placed("packing", 1, 1, nodes=NODES)
    assert len(set(hosts)) == 1


def test_random_is_deterministic() -> None:
    """Equal states are placed equally."""
    nodes = tuple((f"n{number}", True) for number in range(6))
    hosts = placed("random", 12, nodes=nodes)
    assert hosts == placed("random", 12, nodes=nodes)
    assert len(set(hosts)) >= 3


@pytest.mark.parametrize("name", list(BY_NAME))
def test_ties_are_broken_by_the_smallest_name(name: str) -> None:
    """Whatever the order of the nodes; except for random."""
    one, other = (("n1", True), ("n2", True)), (("n2", True), ("n1", True))
    assert placed(name, 1, nodes=one) == placed(name, 1, nodes=other)
    assert name == "random" or placed(name, 1, nodes=one) == ["n1"]


def test_usable_gpus_are_kept_free() -> None:
    """A job that needs CPU beside its GPU uses a node where it strands no GPU for common work."""
    thin = offer("thin", gpus=8, cpu=16, memory_gib=512)
    usual = [job(f"usual{number}", gpus=8, cpu=12, at=T0) for number in range(3)]
    state = given(
        node("a", thin), node("b", offer("wide", gpus=9, cpu=96)), job("odd", gpus=1, cpu=8, priority=900), *usual
    )
    made = schedule(state, policy(), T0)
    assert {each.job_id: each.node_names for each in made.placements}[JobId("odd")] == ("b",)


def test_whole_gpus_are_scored_like_full_shares() -> None:
    """The short computation of fragments equals the long one."""
    popular = Popular((PodShares(4000, 0, 1), PodShares(32_000, 0, 8), PodShares(1000, 0, 0)), (5, 3, 2))
    scores = Scores((), PackingPolicy.LEAST_FRAGMENTS, popular)
    cpu = np.array([0, 8000, 64_000, 3000], dtype=np.int64)
    for free in (0, 1, 7, 8):
        gpus = np.array([[WHOLE] * free + [0] * (8 - free)] * 4, dtype=np.int64)
        long_way = scores.fragments(cpu, gpus).tolist()
        assert scores.of_whole(cpu, np.full(4, free, dtype=np.int64)).tolist() == long_way
