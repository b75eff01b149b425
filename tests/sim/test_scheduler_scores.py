"""The simulated scheduler chooses the node that kube-scheduler's default plugins would choose."""

import pytest

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.cluster.scheduler import free_capacity
from gpu_autoscaler.sim.cluster.scheduler_scores import best_node

SOFT = core.WireTaint(key="leaving", effect="PreferNoSchedule")
APP = {"app": "web"}


def node(
    name: str, *, cpu: str = "8", memory: str = "32Gi", zone: str = "a", taints: tuple[core.WireTaint, ...] = ()
) -> core.Node:
    """Return a node with one GPU more than any pod here requests."""
    node_labels = {labels.HOSTNAME: name, labels.ZONE: zone}
    allocatable = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": "4", "pods": "110"}
    return core.Node(
        metadata=core.Metadata(name=name, labels=node_labels),
        spec=core.NodeSpec(taints=taints),
        status=core.NodeStatus(allocatable=allocatable),
    )


def pod(
    name: str, on: str | None = None, *, cpu: str = "1", memory: str = "4Gi", kind: str = "Job", gpus: int = 1,
    affinity: core.Affinity | None = None,
) -> core.Pod:  # fmt: skip
    """Return a pod of this owner."""
    requests = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(gpus)}
    return core.Pod(
        metadata=core.Metadata(
            name=name, labels=APP, owner_references=(core.OwnerReference(kind=kind, name="o", uid="o"),)
        ),
        spec=core.PodSpec(
            containers=(core.Container(name="main", resources=core.ResourceList(requests=requests)),),
            node_name=on,
            affinity=affinity,
        ),
    )  # fmt: skip


def chosen(new: core.Pod, nodes: list[core.Node], *pods: core.Pod) -> str:
    """Return the name of the node for the new pod."""
    return best_node(new, nodes, free_capacity(nodes, pods), nodes, pods).metadata.name


def prefers(host: str, weight: int = 100) -> core.Affinity:
    """Return a preference for this host."""
    part = core.Requirement(key=labels.HOSTNAME, operator="In", values=(host,))
    term = core.PreferredTerm(weight=weight, preference=core.SelectorTerm(match_expressions=(part,)))
    return core.Affinity(node_affinity=core.NodeAffinity(preferred=(term,)))


def test_a_pod_goes_to_the_emptiest_node_by_cpu_and_memory() -> None:
    """GPUs do not count: the node with most GPUs in use is chosen, as its CPU and memory are free."""
    busy = pod("cpu", "a", cpu="4", memory="16Gi", gpus=0), pod("gpu", "b", cpu="100m", memory="100Mi", gpus=3)
    assert chosen(pod("new"), [node("a"), node("b")], *busy) == "b"


def test_of_equally_full_nodes_the_balanced_one_is_chosen() -> None:
    """Half of the CPU in use and nothing of the memory is worse than a quarter of both."""
    busy = pod("cpu", "a", cpu="4", memory="0"), pod("both", "b", cpu="2", memory="8Gi")
    assert chosen(pod("new"), [node("a"), node("b")], *busy) == "b"


def test_a_preferred_node_is_chosen_although_it_is_fuller() -> None:
    """A placement hint counts twice: as much as resources and balance together."""
    busy = pod("other", "a", cpu="3", memory="12Gi")
    assert chosen(pod("new", affinity=prefers("a")), [node("a"), node("b")], busy) == "a"
    assert chosen(pod("new"), [node("a"), node("b")], busy) == "b"


def test_a_node_with_an_untolerated_soft_taint_comes_last() -> None:
    """It counts three times: more than resources and balance."""
    nodes = [node("a", taints=(SOFT,)), node("b")]
    assert chosen(pod("new"), nodes, pod("other", "b", cpu="6", memory="24Gi")) == "b"


@pytest.mark.parametrize(("kind", "host"), [("ReplicaSet", "b"), ("Job", "a")])
def test_replicas_are_spread_over_nodes_and_zones(kind: str, host: str) -> None:
    """By default constraints, which pods of Jobs do not have: those go to the larger node."""
    nodes = [node("a", cpu="64", memory="256Gi"), node("b", zone="b")]
    placed = [pod(f"p{number}", "a", kind=kind) for number in range(3)]
    assert chosen(pod("new", kind=kind), nodes, *placed) == host


@pytest.mark.parametrize(("weight", "host"), [(50, "a"), (-50, "b")])
def test_preferred_pod_affinity_attracts_and_repels(weight: int, host: str) -> None:
    """Near pods of its own kind, or away from them; resources alone would choose the other node."""
    term = core.PodAffinityTerm(topology_key=labels.HOSTNAME, label_selector=core.LabelSelector(match_labels=APP))
    rule = core.PodAffinity(preferred=(core.WeightedPodAffinityTerm(weight=abs(weight), pod_affinity_term=term),))
    affinity = core.Affinity(pod_affinity=rule) if weight > 0 else core.Affinity(pod_anti_affinity=rule)
    sizes = ("8", "32Gi"), ("64", "256Gi")
    first, second = sizes if weight > 0 else sizes[::-1]
    nodes = [node("a", cpu=first[0], memory=first[1]), node("b", cpu=second[0], memory=second[1])]
    assert chosen(pod("new", affinity=affinity), nodes, pod("other", "a")) == host
