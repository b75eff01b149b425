"""Packing pods onto shareable GPUs: the choice of each policy, independent of caching."""

import random

import pytest
from tests.bench import packing
from tests.support.gpu_packer import Packer, PodShares, Popular, Scores

from gpu_autoscaler.core.placement.gpu_packing import PackingPolicy

GIB = 2**30
SHARE = PodShares(cpu_milli=1000, memory_bytes=GIB, gpu_count=1, gpu_milli=400)
ONE = PodShares(cpu_milli=1000, memory_bytes=GIB, gpu_count=1)
FOUR = PodShares(cpu_milli=4000, memory_bytes=GIB, gpu_count=4)
CPU = PodShares(cpu_milli=1000, memory_bytes=GIB)
NODES = {"a": (16_000, 64 * GIB, 4), "b": (16_000, 64 * GIB, 4), "c": (16_000, 64 * GIB, 1)}


def packed(policy: PackingPolicy, *pods: PodShares, nodes: dict[str, tuple[int, int, int]] = NODES) -> list[str | None]:
    """The node of each pod, placed one after the other."""
    shapes = tuple(dict.fromkeys(pods))
    packer = Packer(nodes, Scores(shapes, policy, Popular.of(pods)), policy)
    return [packer.place(shapes.index(pod), lambda below: below - 1) for pod in pods]


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        (PackingPolicy.BEST_FIT, ["c", "a", "a"]),
        (PackingPolicy.SPREADING, ["a", "b", "a"]),
        (PackingPolicy.LEAST_LOADED, ["a", "b", "a"]),
        (PackingPolicy.ROUND_ROBIN, ["a", "b", "c"]),
        (PackingPolicy.RANDOM, ["c", "b", "b"]),
        (PackingPolicy.PACKING, ["c", "a", "a"]),
    ],
)
def test_each_policy_places_whole_gpus(policy: PackingPolicy, nodes: list[str]) -> None:
    """Ties are broken by the smallest name; the random policy uses its caller's numbers."""
    assert packed(policy, ONE, ONE, ONE) == nodes


@pytest.mark.parametrize("policy", [PackingPolicy.FRAGMENTATION_GRADIENT, PackingPolicy.LEAST_FRAGMENTS])
def test_the_gradient_keeps_whole_nodes_for_pods_that_need_them(policy: PackingPolicy) -> None:
    """If pods of four GPUs are common, a pod of one uses a node they cannot use, and shares share one GPU."""
    common = Popular((FOUR, ONE, SHARE), (2, 1, 1))
    shapes = (FOUR, ONE, SHARE)
    packer = Packer(NODES, Scores(shapes, policy, common), policy)

    assert [packer.place(number, lambda _: 0) for number in (2, 2, 0, 0, 1)] == ["c", "c", "a", "b", None]


def test_of_nodes_equal_in_hundredths_the_fuller_one_is_used() -> None:
    """One CPU is less than a hundredth, and still a better tie-break than the name."""
    nodes = {"a": (16_000, 64 * GIB, 4), "b": (15_000, 64 * GIB, 4)}

    assert packed(PackingPolicy.LEAST_FRAGMENTS, ONE, nodes=nodes) == ["b"]
    assert packed(PackingPolicy.BEST_FIT, ONE, nodes=nodes) == ["a"]


def test_a_share_is_of_one_gpu_only() -> None:
    """Two GPUs with six tenths left each take no whole GPU, nor a share of seven tenths."""
    node = {"a": (16_000, 64 * GIB, 2)}
    seven = PodShares(cpu_milli=1000, memory_bytes=GIB, gpu_count=1, gpu_milli=700)

    assert packed(PackingPolicy.SPREADING, SHARE, seven, ONE, nodes=node) == ["a", "a", None]


def test_memory_and_cpu_limit_placement() -> None:
    """A pod without GPUs uses what is left of either."""
    node = {"a": (2000, 64 * GIB, 1), "b": (64_000, GIB, 1)}

    assert packed(PackingPolicy.BEST_FIT, CPU, CPU, CPU, CPU, nodes=node) == ["a", "a", "b", None]


def test_popular_pods_are_those_that_cover_most() -> None:
    """Nineteen of twenty are enough; memory is not distinguished."""
    bigger = PodShares(cpu_milli=1000, memory_bytes=2 * GIB, gpu_count=1)
    popular = Popular.of([ONE] * 10 + [bigger] * 9 + [FOUR])

    assert popular.counts == (19,)
    assert [(shape.cpu_milli, shape.gpu_count) for shape in popular.shapes] == [(1000, 1)]


@pytest.mark.parametrize("policy", list(PackingPolicy))
def test_cached_scores_equal_new_scores(policy: PackingPolicy) -> None:
    """A packer with the cache of another run selects the same nodes."""
    shapes = (FOUR, ONE, SHARE, CPU)
    chance = random.Random(7)  # noqa: S311 - nothing is secret here
    numbers = [chance.randrange(len(shapes)) for _ in range(40)]
    popular = Popular.of([shapes[number] for number in numbers])
    used = Scores(shapes, policy, popular)

    def run(scores: Scores) -> list[str | None]:
        packer = Packer(NODES, scores, policy)
        return [packer.place(number, lambda below: below // 2) for number in numbers]

    assert run(used) == run(used) == run(Scores(shapes, policy, popular))


@pytest.mark.skipif(not packing.FOLDER.is_dir(), reason=f"no trace {packing.FOLDER}; set GPU_AUTOSCALER_TRACES")
def test_fragments_are_avoided_on_a_real_trace() -> None:
    """On one seed of the smaller list the gradient leaves fewer GPUs idle than best fit, and the default no more."""
    left = {
        policy: packing.unallocated(packing.pods_of("multigpu50"), policy, [42])[1]
        for policy in (PackingPolicy.LEAST_FRAGMENTS, PackingPolicy.FRAGMENTATION_GRADIENT, PackingPolicy.BEST_FIT)
    }

    gradient = left[PackingPolicy.FRAGMENTATION_GRADIENT]
    assert gradient < left[PackingPolicy.BEST_FIT]
    assert left[PackingPolicy.LEAST_FRAGMENTS] < left[PackingPolicy.BEST_FIT]
    assert abs(gradient - 2.822) < 0.6 * 2
