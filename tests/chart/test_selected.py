"""Selectors of the chart match pods: a selector without a match fails silently."""

from collections.abc import Iterator

import pytest
from tests.chart.charting import VALUES, Json, of_kind, pods, rendered

EVERYWHERE = {"system-cluster-critical", "system-node-critical"}  # Kubernetes' own


def selected(found: list[Json], labels: Json) -> dict[str, Json]:
    """Return workloads whose pods have all of these labels, by name."""
    workloads = of_kind(found, "Deployment", "DaemonSet", "StatefulSet")
    carried = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in workloads.items()}
    return {name: workloads[name] for name, each in carried.items() if labels.items() <= each.items()}


def ports(workload: Json) -> Iterator[str | int]:
    """Yield ports of its pods by name and number."""
    for container in workload["spec"]["template"]["spec"]["containers"]:
        for port in container["ports"]:
            yield from (port["name"], port["containerPort"])


@pytest.mark.parametrize("values", VALUES)
def test_each_pod_disruption_budget_selects_a_replicated_workload(values: str) -> None:
    """At most one pod unavailable; single-replica workloads have none, because it would block node drains."""
    found = rendered(values)
    guarded = set()
    for name, budget in of_kind(found, "PodDisruptionBudget").items():
        (workload,) = selected(found, budget["spec"]["selector"]["matchLabels"]).values()
        assert workload["spec"]["replicas"] > 1, name
        assert budget["spec"]["maxUnavailable"] == 1
        guarded.add(workload["metadata"]["name"])
    several = of_kind(found, "Deployment", "StatefulSet").items()
    assert guarded == {name for name, one in several if one["spec"]["replicas"] > 1}


@pytest.mark.parametrize("values", VALUES)
def test_a_service_reaches_a_port_that_is_open(values: str) -> None:
    """On every selected pod."""
    found = rendered(values)
    for name, service in of_kind(found, "Service").items():
        behind = selected(found, service["spec"]["selector"])
        assert behind, name
        for port in service["spec"]["ports"]:
            open_there = [port.get("targetPort", port["port"]) in set(ports(one)) for one in behind.values()]
            assert all(open_there), (name, port)


def test_prometheus_finds_every_service() -> None:
    """The ServiceMonitor selects a Service that covers all our processes."""
    found = rendered("cluster")
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    wanted, (endpoint,) = monitor["spec"]["selector"]["matchLabels"], monitor["spec"]["endpoints"]
    services = of_kind(found, "Service").values()
    (service,) = (one for one in services if wanted.items() <= one["metadata"]["labels"].items())
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    behind = selected(found, service["spec"]["selector"])
    assert behind.keys() >= of_kind(found, "Deployment", "DaemonSet").keys()


@pytest.mark.parametrize("values", VALUES)
def test_each_named_priority_class_exists(values: str) -> None:
    """The server refuses pods with an unknown class."""
    found = rendered(values)
    named = {pod["priorityClassName"] for pod in pods(found).values() if "priorityClassName" in pod}
    assert named <= of_kind(found, "PriorityClass").keys() | EVERYWHERE
    assert named
