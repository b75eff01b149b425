"""Each service is in the compose file, chart, architecture page and import contract as its ServiceSpec declares."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from gpu_autoscaler_services.registry import NAMES, specs
from gpu_autoscaler_services.service_spec import Adapter, Process, ServiceSpec

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ROOT / "services/gpu_autoscaler_services"
CHART = ROOT / "deploy/charts/gpu-autoscaler"
PROCESSES = [(spec, process) for spec in specs() for process in spec.processes]
BY_PROCESS = pytest.mark.parametrize(("spec", "process"), PROCESSES, ids=[process.name for _, process in PROCESSES])


def independent() -> list[str]:
    """Return the modules of the contract that services do not import each other."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = [item for item in document["tool"]["importlinter"]["contracts"] if item["type"] == "independence"]
    (contract,) = [item for item in contracts if "gpu_autoscaler_services.scaler" in item["modules"]]
    return [module.rpartition(".")[2] for module in contract["modules"]]


def chart_process(name: str) -> dict[str, str]:
    """Return the fields of a process in the chart's template; values may be template expressions."""
    text = (CHART / "templates/_pod.tpl").read_text(encoding="utf-8")
    found = re.search(rf"^{name}: \{{(.*)\}}$", text, re.MULTILINE)
    assert found is not None, f"process {name} is missing in _pod.tpl"
    return dict(re.findall(r"(\w+): (\{\{.*?\}\}|\w+)", found[1]))


def chart_values() -> dict[str, Any]:
    """Return the chart's default values."""
    document: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return document


def chart_schema() -> dict[str, Any]:
    """Return the schema of the chart's values."""
    document: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return document


def test_each_service_folder_is_registered() -> None:
    """A folder with a spec.py is one line of the registry, under the name of its class."""
    assert sorted(NAMES) == sorted(path.parent.name for path in SERVICES.glob("*/spec.py"))
    assert tuple(spec.name for spec in specs()) == NAMES


def test_all_services_are_in_the_independence_contract() -> None:
    """Services communicate only over NATS, so none imports another."""
    assert sorted(independent()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_architecture_names_each_service(name: str) -> None:
    """A reader finds it in the overview."""
    assert re.search(rf"\b{name}\b", (ROOT / "docs/DESIGN.md").read_text(encoding="utf-8"))


@BY_PROCESS
def test_compose_file_runs_each_process(spec: ServiceSpec, process: Process) -> None:
    """With the service's command and role; the shadow only in its profile."""
    containers = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    if process.condition == "node_watchers":  # there are no nodes to watch
        assert process.name not in containers
        return
    container = containers[process.name]
    assert container["command"] == ["python", "-m", "gpu_autoscaler_services.serve", spec.name]
    assert container["environment"].get("GPU_AUTOSCALER_SENSING_ROLE") == process.role
    assert container.get("profiles", []) == (["shadow"] if process.condition == "shadow_policy" else [])


@BY_PROCESS
def test_chart_runs_each_process(spec: ServiceSpec, process: Process) -> None:
    """With the adapters that it uses, and with the replicas that its values allow."""
    name = process.chart_name or process.name
    fields = chart_process(name)
    assert fields["service"] == spec.name
    assert ("role" in fields) == (process.role is not None)
    assert set(get_args(Adapter)) & fields.keys() == set(process.uses)
    definition = chart_schema()["properties"]["services"]["properties"][name]["$ref"].rpartition("/")[2]
    assert definition == ("single" if process.chart_replicas is None else "process")
    values = chart_values()
    replicas = values["services"][name].get("replicas", values["defaults"]["replicas"])
    assert replicas == (process.chart_replicas or 1)


def test_chart_runs_nothing_else() -> None:
    """Every process of the template belongs to a service; the values know it, and the programs that are no service."""
    text = (CHART / "templates/_pod.tpl").read_text(encoding="utf-8")
    names = {process.chart_name or process.name for _, process in PROCESSES}
    assert set(re.findall(r"^([\w-]+): \{service: ", text, re.MULTILINE)) == names
    assert set(chart_values()["services"]) == {*names, "simcluster", "migrate", "nvml-exporter"}
