"""The placement engine: constraints, amounts, and which of several bins is filled."""

import msgspec
import pytest
from tests.support.stories import resources

from gpu_autoscaler.core.placement.constraints import fits
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.label_matching import tolerates
from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm, PodConstraints, Tally
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness, Shape
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import (
    LabelRequirement,
    NodeDemands,
    NodeSelectorTerm,
    Operator,
    PodGroup,
    Taint,
    Toleration,
)

GPU_TAINT = Taint(key="nvidia.com/gpu", effect="NoSchedule", value="true")


def bin_(key: str, gpus: int = 8, **changes: object) -> Bin:
    """A node with this many free GPUs."""
    whole = Bin(
        key=key,
        name=key,
        free=resources(gpus=gpus, cpu=96, memory_gib=1000, pods=110),
        has_gpus=gpus > 0,
        readiness=BinReadiness.READY,
        gpu_model="A100" if gpus else None,
        capacity_type=CapacityType.ON_DEMAND,
    )
    return msgspec.structs.replace(whole, **changes)


def shape(gpus: int = 1, **changes: object) -> Shape:
    """A member that requests this many GPUs."""
    return msgspec.structs.replace(Shape(resources=resources(gpus=gpus, pods=1)), **changes)


def accepts_labels(demands: NodeDemands, labels: dict[str, str]) -> bool:
    """Whether a node with these labels is accepted."""
    return fits(shape(demands=demands), bin_("n1", labels=labels))


@pytest.mark.parametrize(
    ("operator", "values", "accepted"),
    [
        ("In", ("a", "b"), True),
        ("In", ("b",), False),
        ("NotIn", ("b",), True),
        ("NotIn", ("a",), False),
        ("Exists", (), True),
        ("DoesNotExist", (), False),
        ("Gt", ("1",), False),
        ("Lt", ("1",), False),
    ],
)
def test_operators_hold_as_in_kubernetes(operator: Operator, values: tuple[str, ...], *, accepted: bool) -> None:
    """An existing label satisfies each operator as in Kubernetes; words are no numbers."""
    term = NodeSelectorTerm(requirements=(LabelRequirement("zone", operator, values),))

    assert accepts_labels(NodeDemands(node_affinity=(term,)), {"zone": "a"}) is accepted


@pytest.mark.parametrize(("operator", "holds"), [("In", False), ("NotIn", True), ("Exists", False), ("Gt", False)])
def test_a_missing_label_satisfies_only_negative_operators(operator: Operator, *, holds: bool) -> None:
    """Only NotIn and DoesNotExist hold."""
    term = NodeSelectorTerm(requirements=(LabelRequirement("cards", operator, ("4",)),))

    assert accepts_labels(NodeDemands(node_affinity=(term,)), {}) is holds


def test_numbers_are_compared_as_numbers() -> None:
    """Ten is more than nine."""
    more = NodeSelectorTerm(requirements=(LabelRequirement("cards", "Gt", ("9",)),))
    less = NodeSelectorTerm(requirements=(LabelRequirement("cards", "Lt", ("9",)),))

    assert accepts_labels(NodeDemands(node_affinity=(more,)), {"cards": "10"})
    assert not accepts_labels(NodeDemands(node_affinity=(less,)), {"cards": "10"})


def test_affinity_terms_are_alternatives() -> None:
    """One term that holds is enough; a term without conditions matches no node."""
    wrong = NodeSelectorTerm(requirements=(LabelRequirement("zone", "In", ("b",)),))
    right = NodeSelectorTerm(requirements=(LabelRequirement("zone", "In", ("a",)),))

    assert accepts_labels(NodeDemands(node_affinity=(wrong, right)), {"zone": "a"})
    assert not accepts_labels(NodeDemands(node_affinity=(NodeSelectorTerm(requirements=()),)), {"zone": "a"})


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration(key="nvidia.com/gpu", operator="Exists"), True),
        (Toleration(key="nvidia.com/gpu", operator="Equal", value="true", effect="NoSchedule"), True),
        (Toleration(operator="Exists"), True),
        (Toleration(key="nvidia.com/gpu", operator="Equal", value="false"), False),
        (Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoExecute"), False),
        (Toleration(key="other", operator="Exists"), False),
    ],
)
def test_a_taint_excludes_pods_that_do_not_tolerate_it(toleration: Toleration, *, tolerated: bool) -> None:
    """Key, value and effect must match; empty ones match all."""
    assert tolerates((toleration,), (GPU_TAINT,)) is tolerated


def test_a_preference_excludes_no_pod() -> None:
    """PreferNoSchedule is a preference."""
    assert tolerates((), (Taint(key="busy", effect="PreferNoSchedule"),))


@pytest.mark.parametrize(
    "asked",
    [
        shape(gpus=9),
        shape(gpu_models=("H100",)),
        shape(gpu_memory_bytes_min=1),  # the node does not say how much its GPUs have
        shape(demands=NodeDemands(node_selector=(("disk", "ssd"),))),
        shape(resources=resources(gpus=1, cpu=97, pods=1)),
        shape(resources=resources(gpus=1, memory_gib=1001, pods=1)),
    ],
)
def test_each_requirement_alone_excludes_a_node(asked: Shape) -> None:
    """Each demand alone rules the node out."""
    assert fits(shape(), bin_("n1"))
    assert not fits(asked, bin_("n1"))


@pytest.mark.parametrize("capacity_type", [CapacityType.SPOT, None])
def test_non_interruptible_work_is_never_on_spot(capacity_type: CapacityType | None) -> None:
    """Unknown capacity may be spot, so it is excluded too."""
    assert not fits(shape(is_spot_allowed=False), bin_("n1", capacity_type=capacity_type))
    assert fits(shape(is_spot_allowed=False), bin_("n1"))


def test_members_are_counted_by_the_scarcest_amount() -> None:
    """Eight GPUs and CPU for three make three."""
    assert FreeCapacity([bin_("n1")]).count_places(shape(resources=resources(gpus=1, cpu=32, pods=1)), 9) == 3


def test_the_tightest_node_is_filled_first() -> None:
    """Best fit keeps whole nodes whole; ties are broken by the smallest name."""
    free_capacity = FreeCapacity([bin_("n3", 8), bin_("n2", 2), bin_("n1", 8)])

    assert free_capacity.place_gang(shape(gpus=2), 3) == ("n2", "n1", "n1")


def test_work_without_gpus_uses_gpu_nodes_last() -> None:
    """Even if the GPU node is the tighter one."""
    full = bin_("gpu", has_gpus=True, free=resources(cpu=1, pods=110))
    free_capacity = FreeCapacity([full, bin_("plain", 0, free=resources(cpu=2, memory_gib=4, pods=110))])

    assert free_capacity.place_gang(shape(gpus=0), 2) == ("plain", "gpu")


def test_spot_work_uses_on_demand_last() -> None:
    """Even if the on-demand node is fuller: it becomes empty. Non-interruptible work has no choice."""
    bins = (
        bin_("stand-in", gpus=1, capacity_type=CapacityType.ON_DEMAND),
        bin_("spot", gpus=8, capacity_type=CapacityType.SPOT),
    )

    assert FreeCapacity(bins).place_most(shape(gpus=1), 9) == ("spot",) * 8 + ("stand-in",)
    assert FreeCapacity(bins).place_most(shape(gpus=1, is_spot_allowed=False), 9) == ("stand-in",)


def test_readiness_precedes_capacity_type() -> None:
    """A coming spot node is no reason to wait."""
    bins = (
        bin_("stand-in", gpus=8, capacity_type=CapacityType.ON_DEMAND),
        bin_("spot", gpus=8, capacity_type=CapacityType.SPOT, readiness=BinReadiness.COMING),
    )

    assert FreeCapacity(bins).place_most(shape(gpus=8), 1) == ("stand-in",)


def test_ready_nodes_are_filled_before_coming_ones() -> None:
    """A tighter node that boots comes second."""
    free_capacity = FreeCapacity([bin_("coming", 1, readiness=BinReadiness.COMING), bin_("ready")])

    assert free_capacity.place_gang(shape(), 1) == ("ready",)


def test_a_gang_that_does_not_fit_changes_nothing() -> None:
    """All members or none: free capacity is as before."""
    free_capacity = FreeCapacity([bin_("n1", 8), bin_("n2", 4)])

    assert free_capacity.place_gang(shape(gpus=8), 2) is None
    assert free_capacity["n1"].free.gpu_count == 8
    assert free_capacity.place_gang(shape(gpus=4), 3) == ("n2", "n1", "n1")


def test_restored_capacity_is_used_again() -> None:
    """Rollback, removal and addition affect shapes that were ranked before."""
    free_capacity = FreeCapacity([bin_("n1", 2)])
    mark = free_capacity.mark()
    assert free_capacity.place_most(shape(), 5) == ("n1", "n1")
    free_capacity.rollback(mark)
    assert free_capacity.place_most(shape(), 5) == ("n1", "n1")
    free_capacity.put(bin_("n2", 1))
    assert free_capacity.place_most(shape(), 5) == ("n2",)
    free_capacity.rollback(mark)
    free_capacity.remove("n1")
    assert free_capacity.place_most(shape(), 5) == ()


def test_pods_on_a_bin_that_is_rolled_back_are_counted_nowhere() -> None:
    """The constraint that counts them is asked for only afterwards, when there are fewer bins."""
    web = Tally(PodGroup(namespaces=("default",), requirements=(LabelRequirement("app", "In", ("web",)),)))
    term = AffinityTerm(labels.HOSTNAME, web)
    counted = shape(pod_constraints=PodConstraints(tallies=(web,)))
    free_capacity = FreeCapacity([bin_("n1", 2)])
    mark = free_capacity.mark()
    free_capacity.put(bin_("n2", 4))
    assert free_capacity.place_most(counted, 9) == ("n1", "n1", "n2", "n2", "n2", "n2")
    free_capacity.rollback(mark)

    assert free_capacity.place_most(shape(pod_constraints=PodConstraints(apart=(term,))), 1) == ("n1",)


def test_a_shape_that_was_asked_before_finds_what_others_left() -> None:
    """Also when another shape was placed, rolled back or removed meanwhile."""
    free_capacity = FreeCapacity([bin_("n1", 4)])
    assert free_capacity.count_places(shape(), 9) == 4
    mark = free_capacity.mark()
    assert free_capacity.place_most(shape(gpus=3), 9) == ("n1",)
    assert free_capacity.count_places(shape(), 9) == 1
    inner = free_capacity.mark()
    assert free_capacity.place_most(shape(), 9) == ("n1",)
    assert free_capacity.count_places(shape(), 9) == 0
    free_capacity.rollback(inner)
    assert free_capacity.count_places(shape(), 9) == 1
    free_capacity.remove_members(("n1",), shape(gpus=3))
    assert free_capacity.count_places(shape(), 9) == 4
    free_capacity.put(bin_("n2", 2))
    assert free_capacity.count_places(shape(), 9) == 6
    free_capacity.rollback(mark)
    assert free_capacity.place_most(shape(), 9) == ("n1",) * 4


def test_a_preferred_node_is_filled_before_a_tighter_one() -> None:
    """Members of a released job use the nodes of its placement."""
    free_capacity = FreeCapacity([bin_("n1", 8), bin_("n2", 1)])

    assert free_capacity.place_most(shape(), 2, prefers=("n1",)) == ("n1", "n1")
