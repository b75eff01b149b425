"""The default scheduler: node selection, order and messages for unschedulable pods."""

import time

from tests.support.kube_objects import Json, node, pod
from tests.unit.simcluster.conftest import Cluster

from gpu_autoscaler.simcluster.kinds import EVENTS, NODES, PODS, PRIORITY_CLASSES
from gpu_autoscaler.simcluster.objects import condition


def required(*expressions: Json) -> Json:
    """Required node affinity with these expressions in one term."""
    terms = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def preferred(**weights: int) -> Json:
    """Preferred zones by weight; keys are zone letters."""
    terms = [
        {
            "weight": weight,
            "preference": {
                "matchExpressions": [
                    {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [f"us-west-2{letter}"]}
                ]
            },
        }
        for letter, weight in weights.items()
    ]
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}


def message(cluster: Cluster, name: str) -> str:
    """Why the pod is not scheduled."""
    found = condition(cluster.pod(name), "PodScheduled")
    return "" if found is None else str(found.get("message", ""))


def test_pods_fill_a_node_before_the_next(cluster: Cluster) -> None:
    """Most allocated first, so that empty nodes can be removed."""
    cluster.node("n1")
    cluster.node("n2")
    cluster.make(PODS, *(pod(f"p{index}", gpus=2) for index in range(4)))
    cluster.settle()

    assert len(set(cluster.where().values())) == 1


def test_preferred_affinity_outweighs_allocation(cluster: Cluster) -> None:
    """The preferred zone with the higher weight wins over the fuller node."""
    cluster.node("a", zone="us-west-2a")
    cluster.node("b", zone="us-west-2b")
    cluster.make(PODS, pod("first", gpus=4, affinity=preferred(a=1)))
    cluster.settle()
    cluster.make(PODS, pod("second", gpus=1, affinity=preferred(a=10, b=50)))
    cluster.settle()

    assert cluster.where() == {"first": "a", "second": "b"}


def test_required_affinity_supports_every_operator(cluster: Cluster) -> None:
    """In, NotIn, Exists, DoesNotExist, Gt and Lt work as documented."""
    cluster.node("n", labels={"gpu.memory": "80", "tier": "spot"})
    expressions: dict[str, tuple[bool, Json]] = {
        "in": (True, {"key": "tier", "operator": "In", "values": ["spot", "reserved"]}),
        "not-in": (False, {"key": "tier", "operator": "NotIn", "values": ["spot"]}),
        "exists": (True, {"key": "tier", "operator": "Exists"}),
        "absent": (False, {"key": "tier", "operator": "DoesNotExist"}),
        "greater": (True, {"key": "gpu.memory", "operator": "Gt", "values": ["40"]}),
        "less": (False, {"key": "gpu.memory", "operator": "Lt", "values": ["40"]}),
    }
    cluster.make(PODS, *(pod(name, affinity=required(entry)) for name, (_, entry) in expressions.items()))
    cluster.settle()

    placed = {name: node_name is not None for name, node_name in cluster.where().items()}
    assert placed == {name: fits for name, (fits, _) in expressions.items()}


def test_untolerated_taints_exclude_a_node(cluster: Cluster) -> None:
    """The message names the taint; a toleration admits the pod."""
    cluster.node("n")
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    cluster.api.modify(NODES, "n", lambda new: new["spec"].update(taints=[taint]))
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    cluster.make(PODS, pod("out"), pod("in", tolerations=tolerations))
    cluster.settle()

    assert cluster.where() == {"in": "n", "out": None}
    assert "1 node(s) had untolerated taint {nvidia.com/gpu: present}" in message(cluster, "out")


def test_every_missing_resource_is_named_and_counted(cluster: Cluster) -> None:
    """Reasons are counted over nodes and sorted, as the real scheduler writes them."""
    for name in ("n1", "n2"):
        cluster.node(name, gpus=4)
    cluster.api.modify(NODES, "n2", lambda new: new["spec"].update(unschedulable=True))
    cluster.make(PODS, pod("p", gpus=8))
    cluster.settle()

    wanted = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) were unschedulable. preemption: "
    assert message(cluster, "p").startswith(wanted)


def test_the_pod_limit_of_a_node_is_respected(cluster: Cluster) -> None:
    """`pods` is a resource too."""
    cluster.node("n")
    cluster.api.modify(NODES, "n", lambda new: new["status"]["allocatable"].update(pods="1"))
    cluster.make(PODS, pod("a"), pod("b"))
    cluster.settle()

    assert "1 Too many pods" in message(cluster, "b")


def test_higher_priority_is_scheduled_first_then_older(cluster: Cluster) -> None:
    """With capacity for two, the two with the highest priority run; of equals, the older first."""
    cluster.make(PRIORITY_CLASSES, {"metadata": {"name": "urgent"}, "value": 1000})
    cluster.make(PODS, pod("low", gpus=4), pod("lower", gpus=4), pod("high", gpus=4, priorityClassName="urgent"))
    cluster.node("n", gpus=8)

    assert cluster.where() == {"high": "n", "low": "n", "lower": None}
    assert cluster.pod("high")["spec"]["priority"] == 1000


def test_a_pending_pod_uses_freed_capacity(cluster: Cluster) -> None:
    """After the other pod is deleted, not earlier."""
    cluster.node("n")
    cluster.make(PODS, pod("first", gpus=8), pod("second", gpus=8))
    cluster.settle(2)
    cluster.api.delete(PODS, "default/first")
    cluster.settle()
    waiting = cluster.where()
    cluster.settle(2)

    assert waiting == {"first": "n", "second": None}
    assert cluster.where() == {"second": "n"}


def test_pods_of_other_schedulers_are_ignored(cluster: Cluster) -> None:
    """They get no node and no condition."""
    cluster.node("n")
    cluster.make(PODS, pod("own", schedulerName="own"))
    cluster.settle()

    assert cluster.where() == {"own": None}
    assert condition(cluster.pod("own"), "PodScheduled") is None


def test_an_unchanged_message_is_written_once(cluster: Cluster) -> None:
    """A pod that stays pending for the same reason gets no new versions and one event."""
    cluster.make(PODS, pod("p", gpus=8))
    cluster.settle(5)
    version = cluster.pod("p")["metadata"]["resourceVersion"]
    cluster.settle(60)

    assert cluster.pod("p")["metadata"]["resourceVersion"] == version
    assert [event["reason"] for event in cluster.api.objects(EVENTS, "default")] == ["FailedScheduling"]


def test_a_large_cluster_is_scheduled_incrementally(cluster: Cluster) -> None:
    """1,000 nodes and 10,000 pods: all placed, and a later change rescans nothing."""
    for index in range(1000):
        body = node(f"n{index}")
        body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        cluster.make(NODES, body)
    cluster.make(PODS, *(pod(f"p{index}", gpus=1) for index in range(8000)))
    cluster.make(PODS, *(pod(f"w{index}", gpus=8) for index in range(2000)))
    began = time.process_time()
    for _ in range(200):
        cluster.world.step()
    filled_seconds = time.process_time() - began
    began = time.process_time()
    for _ in range(20):
        cluster.world.step()
    idle_seconds = time.process_time() - began

    placed = sum(node_name is not None for node_name in cluster.where().values())
    assert placed == 8000
    assert filled_seconds < 20
    assert idle_seconds < filled_seconds / 20
