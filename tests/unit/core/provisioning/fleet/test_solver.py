"""The fleet solver: small problems whose optimum is known."""

from collections import Counter

import numpy as np
import pytest

from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP, Fleet, FleetProblem
from gpu_autoscaler.core.provisioning.fleet.solver import cheapest_fleet

# Amounts come as GPUs, CPU in thousandths, memory in MiB, storage, pods.
ONE_GPU = (1, 4_000, 16_000, 0, 1)
EIGHT_GPUS = (8, 32_000, 128_000, 0, 1)
CPU_ONLY = (0, 8_000, 16_000, 0, 1)
SMALL = (1, 8_000, 32_000, 0, 110)
LARGE = (8, 64_000, 256_000, 0, 110)
CPU_NODE = (0, 64_000, 256_000, 0, 110)

Row = tuple[int, int, int, int, int]


def problem(
    *classes: tuple[Row, int],
    offers: tuple[tuple[Row, float], ...],
    groups: tuple[int, ...] | None = None,
    accepts: tuple[tuple[bool, ...], ...] | None = None,
) -> FleetProblem:
    """Classes with these pod counts, and offers with their cost."""
    return FleetProblem(
        requests=np.array([row for row, _ in classes], dtype=np.int64),
        counts=np.array([count for _, count in classes], dtype=np.int64),
        groups=np.array(groups or [NO_GROUP] * len(classes), dtype=np.int64),
        accepts=np.array(accepts or [[True] * len(offers)] * len(classes), dtype=np.bool_),
        capacity=np.array([row for row, _ in offers], dtype=np.int64),
        cost=np.array([cost for _, cost in offers]),
    )


def bought(fleet: Fleet) -> dict[int, int]:
    """Nodes by offer."""
    return dict(Counter(node.offer for node in fleet.nodes))


def test_a_large_node_is_bought_when_it_is_cheaper_per_pod() -> None:
    """Sixteen pods fill two large nodes at 6 each; small ones would cost 16."""
    fleet = cheapest_fleet(problem((ONE_GPU, 16), offers=((SMALL, 1.0), (LARGE, 6.0))))

    assert bought(fleet) == {1: 2}
    assert fleet.floor <= 12.0


def test_a_large_node_is_not_bought_for_few_pods() -> None:
    """Three pods on small nodes cost 3, on the large one 6."""
    fleet = cheapest_fleet(problem((ONE_GPU, 3), offers=((SMALL, 1.0), (LARGE, 6.0))))

    assert bought(fleet) == {0: 3}


def test_pods_without_gpus_buy_no_gpu_nodes() -> None:
    """CPU pods use free capacity on GPU nodes, and CPU nodes are bought for the rest."""
    fleet = cheapest_fleet(problem((EIGHT_GPUS, 2), (CPU_ONLY, 40), offers=((LARGE, 8.0), (CPU_NODE, 1.0))))

    assert bought(fleet)[0] == 2
    assert bought(fleet)[1] <= 5


def test_an_offer_takes_only_classes_that_accept_it() -> None:
    """Pods that exclude the cheap offer buy the expensive one; the others stay cheap."""
    fleet = cheapest_fleet(
        problem((ONE_GPU, 8), (ONE_GPU, 8), offers=((LARGE, 2.0), (LARGE, 6.0)), accepts=((True, True), (False, True)))
    )

    assert bought(fleet) == {0: 1, 1: 1}


def test_a_node_takes_one_pod_of_a_group() -> None:
    """Four pods with anti-affinity need four nodes, though one would hold them."""
    fleet = cheapest_fleet(problem((ONE_GPU, 4), offers=((LARGE, 6.0), (SMALL, 1.0)), groups=(0,)))

    assert bought(fleet) == {1: 4}


def test_groups_share_nodes() -> None:
    """Two groups of four fill four nodes of two GPUs, one pod of each group on each."""
    two = (2, 8_000, 32_000, 0, 110)
    fleet = cheapest_fleet(problem((ONE_GPU, 4), (ONE_GPU, 4), offers=((two, 1.0),), groups=(0, 1)))

    assert bought(fleet) == {0: 4}
    assert all(node.pods == (0, 1) for node in fleet.nodes)


def test_pods_that_fit_no_offer_are_unserved() -> None:
    """A pod too large for any node is unserved; the others are served."""
    fleet = cheapest_fleet(problem(((16, 1, 1, 0, 1), 1), (ONE_GPU, 1), offers=((SMALL, 1.0),)))

    assert fleet.unserved == (0,)
    assert bought(fleet) == {0: 1}


def test_an_empty_problem_buys_nothing() -> None:
    """No pods, no nodes, no cost."""
    fleet = cheapest_fleet(problem((ONE_GPU, 0), offers=((SMALL, 1.0),)))

    assert fleet.nodes == ()
    assert fleet.floor == pytest.approx(0.0)


def test_cpu_and_memory_run_out_together() -> None:
    """CPU-heavy and memory-heavy pods share nodes: half as many as apart."""
    node = (0, 16_000, 64_000, 0, 110)
    fleet = cheapest_fleet(
        problem(((0, 7_000, 4_000, 0, 1), 20), ((0, 1_000, 28_000, 0, 1), 20), offers=((node, 1.0),))
    )

    assert bought(fleet) == {0: 10}
