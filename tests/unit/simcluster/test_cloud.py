"""The simulated cloud: boot stages, refusals, notices, terminations and billing."""

from datetime import timedelta

import pytest
from tests.support.kube_objects import pod
from tests.unit.simcluster.conftest import NOON, Cluster

from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.simcluster.cloud import Cloud, NotOurs, RefusalRule
from gpu_autoscaler.simcluster.instances import Machine, invoice
from gpu_autoscaler.simcluster.kinds import LEASES, NODES, PODS
from gpu_autoscaler.simcluster.objects import Json, is_true

TYPE = "g4dn.12xlarge"
TAINT = Taint("nvidia.com/gpu", "NoSchedule", "true")
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists"}


@pytest.fixture
def cloud(cluster: Cluster) -> Cloud:
    """A cloud that sells nodes to the cluster."""
    made = Cloud(cluster.api, seed=1)
    cluster.world.add_controller(made)
    return made


def order(cloud: Cloud, action: str = "a1", key: str = f"{TYPE}/sim-a/spot", installation: str = "ours") -> Order:
    """An order for one node."""
    offer = next(offer for offer in cloud.offers() if offer.key == key)
    return Order(
        action_id=ActionId(action),
        installation=installation,
        pool="training",
        offer=offer,
        labels=(("team", "vision"),),
        taints=(TAINT,),
    )


def bought(cloud: Cloud, action: str = "a1", **more: str) -> Machine:
    """The machine of a launch that worked."""
    cloud.launch(order(cloud, action, **more))
    return next(machine for machine in cloud.machines if machine.action_id == action)


def node_of(cluster: Cluster, machine: Machine) -> Json | None:
    """The machine's node, None where there is none."""
    return cluster.api.find(NODES, machine.node_name)


def steps_seen(cluster: Cluster, machine: Machine, seconds: float) -> list[tuple[str, bool, bool, int]]:
    """What changes while time passes: instance state, registered, ready, GPUs allocatable."""
    seen: list[tuple[str, bool, bool, int]] = []
    for _ in range(int(seconds)):
        cluster.settle(1, step_seconds=1)
        node = node_of(cluster, machine)
        gpus = int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) if node else 0
        now = (machine.state, node is not None, bool(node and is_true(node, "Ready")), gpus)
        if not seen or seen[-1] != now:
            seen.append(now)
    return seen


def test_a_node_boots_in_stages(cluster: Cluster, cloud: Cloud) -> None:
    """Pending, running, registered, ready, and GPUs allocatable last."""
    machine = bought(cloud)
    assert steps_seen(cluster, machine, 140) == [
        ("pending", False, False, 0),
        ("running", False, False, 0),
        ("running", True, False, 0),
        ("running", True, True, 0),
        ("running", True, True, 4),
    ]
    assert machine.boot_seconds == pytest.approx(machine.offer.boot_seconds, rel=0.1)


def test_a_node_has_the_labels_of_its_order_and_machine(cluster: Cluster, cloud: Cloud) -> None:
    """Labels and taints of the order, token, installation, zone and instance ID."""
    machine = bought(cloud)
    cluster.settle(140, step_seconds=5)
    node = node_of(cluster, machine)

    assert node is not None
    assert node["spec"]["providerID"] == f"sim:///sim-a/{machine.instance_id}"
    assert node["spec"]["taints"] == [{"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"}]
    assert (
        node["metadata"]["labels"]
        | {
            "team": "vision",
            "gpu-autoscaler.io/action-id": "a1",
            "gpu-autoscaler.io/installation": "ours",
            "gpu-autoscaler.io/pool": "training",
            "gpu-autoscaler.io/capacity-type": "spot",
            "gpu-autoscaler.io/gpu-model": "T4",
            "node.kubernetes.io/instance-type": TYPE,
            "topology.kubernetes.io/zone": "sim-a",
            "topology.kubernetes.io/region": "sim",
        }
        == node["metadata"]["labels"]
    )
    assert {"type": "InternalIP", "address": machine.internal_ip} in node["status"]["addresses"]


def test_pods_run_on_a_launched_node(cluster: Cluster, cloud: Cloud) -> None:
    """The scheduler waits for the GPUs, and heartbeats keep the node ready beyond one lease."""
    machine = bought(cloud)
    cluster.make(PODS, pod("train", gpus=4, tolerations=[TOLERATION]))
    cluster.settle(80, step_seconds=2)
    assert cluster.where() == {"train": None}
    cluster.settle(120, step_seconds=2)
    assert cluster.where() == {"train": machine.node_name}
    assert cluster.phases() == {"train": "Running"}


def test_a_token_launches_one_machine(cloud: Cloud) -> None:
    """The same order again returns the same instance; another offer with that token is an error."""
    assert cloud.launch(order(cloud)) == cloud.launch(order(cloud))
    assert len(cloud.machines) == 1
    with pytest.raises(PermanentError, match="IdempotentParameterMismatch"):
        cloud.launch(order(cloud, key=f"{TYPE}/sim-b/spot"))


def test_refusals_apply_to_their_offers_for_their_count(cloud: Cloud) -> None:
    """A zone refuses once; other zones launch meanwhile."""
    cloud.refuse(RefusalRule(pattern="*/sim-a/*", code="InsufficientInstanceCapacity", left_count=1, until=None))
    with pytest.raises(LaunchRefused) as refused:
        cloud.launch(order(cloud, "a1"))
    cloud.launch(order(cloud, "a2", key=f"{TYPE}/sim-b/spot"))
    cloud.launch(order(cloud, "a1"))

    assert (refused.value.code, refused.value.scope) == ("InsufficientInstanceCapacity", "offer")
    assert len(cloud.machines) == 2


def test_a_refusal_expires(cluster: Cluster, cloud: Cloud) -> None:
    """A quota applies to its region until it is raised."""
    until = NOON + timedelta(seconds=60)
    cloud.refuse(RefusalRule(pattern="*", code="VcpuLimitExceeded", left_count=None, until=until))
    with pytest.raises(LaunchRefused) as refused:
        cloud.launch(order(cloud))
    cluster.settle(61, step_seconds=10)
    cloud.launch(order(cloud))
    assert refused.value.scope == "region"


def test_a_terminated_machine_is_billed_and_its_node_deleted(cluster: Cluster, cloud: Cloud) -> None:
    """Terminating, then terminated; then node and lease are deleted, and the bill is final."""
    machine = bought(cloud)
    cluster.settle(150, step_seconds=5)
    shown = cloud.terminate(machine.instance_id, "ours")
    assert shown is not None
    assert (shown.state, shown.terminated_at) == ("terminating", None)
    cluster.settle(20)

    assert machine.state == "terminated"
    assert machine.terminated_at is not None
    assert node_of(cluster, machine) is None
    assert cluster.api.find(LEASES, f"kube-node-lease/{machine.node_name}") is None
    price = machine.offer.price_micro_usd_per_hour
    assert price is not None
    bill = invoice(cloud.machines, cluster.clock.now())
    assert bill.total_micro_usd == cost_micro_usd(price, machine.terminated_at - machine.launched_at) > 0
    cluster.settle(600, step_seconds=60)
    assert invoice(cloud.machines, cluster.clock.now()).total_micro_usd == bill.total_micro_usd


def test_a_machine_terminated_at_boot_never_becomes_a_node(cluster: Cluster, cloud: Cloud) -> None:
    """Its boot stops."""
    machine = bought(cloud)
    cluster.settle(5)
    cloud.terminate(machine.instance_id, "ours")
    cluster.settle(200, step_seconds=5)
    assert (machine.state, node_of(cluster, machine)) == ("terminated", None)


def test_machines_of_others_are_left_untouched(cloud: Cloud) -> None:
    """Neither terminated nor listed."""
    machine = bought(cloud, installation="theirs")
    with pytest.raises(NotOurs):
        cloud.terminate(machine.instance_id, "ours")
    assert machine.is_alive
    assert cloud.instances("ours") == []
    assert cloud.terminate("i-never", "ours") is None


def test_a_machine_with_a_notice_is_reclaimed_at_its_deadline(cluster: Cluster, cloud: Cloud) -> None:
    """Not earlier; its node stays until its heartbeats are missed, then it is deleted."""
    machine = bought(cloud)
    cluster.settle(150, step_seconds=5)
    reclaim_at = cloud.give_notice(machine, seconds=120)
    cluster.settle((reclaim_at - cluster.clock.now()).total_seconds() - 1)
    assert machine.is_alive
    cluster.settle(8)
    assert machine.shown().state == "terminated"
    assert node_of(cluster, machine) is not None
    cluster.settle(60, step_seconds=5)
    assert node_of(cluster, machine) is None


def test_a_withdrawn_notice_reclaims_nothing(cluster: Cluster, cloud: Cloud) -> None:
    """The machine keeps running after the deadline."""
    machine = bought(cloud)
    cluster.settle(60, step_seconds=5)
    cloud.give_notice(machine, seconds=30)
    cloud.withdraw_notice(machine)
    cluster.settle(60, step_seconds=5)
    assert machine.state == "running"


def test_the_first_busy_spot_machine_has_a_running_pod(cluster: Cluster, cloud: Cloud) -> None:
    """On-demand and empty machines are skipped, and machines that have a notice."""
    bought(cloud, "on-demand", key="m5.xlarge/sim-a/on-demand")
    bought(cloud, "empty", key="m5.xlarge/sim-a/spot")
    machine = bought(cloud, "busy")
    cluster.make(PODS, pod("train", gpus=1, tolerations=[TOLERATION]))
    cluster.settle(150, step_seconds=5)
    assert cloud.first_busy_spot() is machine
    cloud.give_notice(machine)
    assert cloud.first_busy_spot() is None


def test_terminated_machines_are_listed_for_an_hour(cluster: Cluster, cloud: Cloud) -> None:
    """And no longer."""
    machine = bought(cloud)
    cloud.terminate(machine.instance_id, "ours")
    cluster.settle(3000, step_seconds=100)
    assert [shown.state for shown in cloud.instances("ours")] == ["terminated"]
    cluster.settle(800, step_seconds=100)
    assert cloud.instances("ours") == []


def test_boots_are_reproducible(cluster: Cluster) -> None:
    """Two clouds with the same seed boot alike."""
    first, second = Cloud(cluster.api, seed=7), Cloud(cluster.api, seed=7)
    assert bought(first).boot_seconds == bought(second).boot_seconds
    assert bought(first).node_name == bought(second).node_name
