"""Whom the chart's selectors find: a label that nobody carries guards, serves and watches nothing, silently."""

from collections.abc import Iterator

import pytest
from tests.chart.charting import VALUES, Json, of_kind, pods, rendered

EVERYWHERE = {"system-cluster-critical", "system-node-critical"}  # Kubernetes' own


def selected(found: list[Json], labels: Json) -> dict[str, Json]:
    """What runs pods that carry all of these labels, by name."""
    workloads = of_kind(found, "Deployment", "DaemonSet", "StatefulSet")
    carried = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in workloads.items()}
    return {name: workloads[name] for name, each in carried.items() if labels.items() <= each.items()}


def ports(workload: Json) -> Iterator[str | int]:
    """Ports of its pods, by name and number."""
    for container in workload["spec"]["template"]["spec"]["containers"]:
        for port in container["ports"]:
            yield from (port["name"], port["containerPort"])


@pytest.mark.parametrize("values", VALUES)
def test_a_budget_is_about_the_pods_of_one_that_has_several(values: str) -> None:
    """One of them away at most; of one alone there is none, as it would keep a node for ever."""
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
    """On every pod that it selects; else it leads nowhere, now and then."""
    found = rendered(values)
    for name, service in of_kind(found, "Service").items():
        behind = selected(found, service["spec"]["selector"])
        assert behind, name
        for port in service["spec"]["ports"]:
            open_there = [port.get("targetPort", port["port"]) in set(ports(one)) for one in behind.values()]
            assert all(open_there), (name, port)


def test_prometheus_finds_every_service() -> None:
    """The monitor selects a Service by its labels and port; behind it are all processes of ours."""
    found = rendered("cluster")
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    wanted, (endpoint,) = monitor["spec"]["selector"]["matchLabels"], monitor["spec"]["endpoints"]
    services = of_kind(found, "Service").values()
    (service,) = (one for one in services if wanted.items() <= one["metadata"]["labels"].items())
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    behind = selected(found, service["spec"]["selector"])
    assert behind.keys() >= of_kind(found, "Deployment", "DaemonSet").keys()


@pytest.mark.parametrize("values", VALUES)
def test_a_priority_that_is_named_is_there(values: str) -> None:
    """A pod of a class that nobody made is refused by the server."""
    found = rendered(values)
    named = {pod["priorityClassName"] for pod in pods(found).values() if "priorityClassName" in pod}
    assert named <= of_kind(found, "PriorityClass").keys() | EVERYWHERE
    assert named
