"""The chart on a real API server: schemas, a strict dry run, installation, upgrade and removal."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chart.charting import CHART, NAMESPACE, RELEASE, ROOT, VALUES, helm, objects, template, tool
from tests.chart.published import write_schemas
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.support.kube_objects import node

from gpu_autoscaler_services.permissions import fresh_secret, users

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

NAMESPACES = (NAMESPACE, "gpu-jobs", "monitoring", "gpu-operator")
INSTALL_SECONDS_MAX = "120s"
# The machines run no container: the jobs of the chart end after a second.
ENDING = ("--set-string", r"services.migrate.podAnnotations.simcluster\.gpu-autoscaler\.io/run-seconds=1")
SIMULATED = ("--values", str(VALUES["simulated"]))
FURTHER = {"cluster": ["sensing.nvmlExporter.enabled=true"]}  # what is off by default
EARLIER = ROOT / "tests" / "upgrade" / "2026-11-23-chart.tgz"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster of three small machines with disks, and the CRDs of the Prometheus operator."""
    tool("helm")
    with running_plane(tmp_path_factory.mktemp("plane"), EVERYTHING, with_service_accounts=True) as plane:
        for name in NAMESPACES:
            plane.kubectl("create", "namespace", name)
        for kinds in ("servicemonitors.yaml", "prometheusrules.yaml"):
            plane.kubectl("apply", "--server-side", "--filename", str(tool(kinds)))
        for number in range(3):
            plane.kubectl("create", "--filename", "-", text=json.dumps(node(f"machine-{number}", gpus=0)))
        for number in range(5):
            plane.kubectl("create", "--filename", "-", text=json.dumps(disk(f"disk-{number}")))
        yield plane


def disk(name: str) -> dict[str, object]:
    """A volume for any claim."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "20Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": f"/disks/{name}"},
        },
    }


def on(plane: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm against this cluster; it must succeed."""
    told = helm(*arguments, "--kubeconfig", str(plane.kubeconfig()), "--namespace", NAMESPACE)
    assert told.returncode == 0, f"{told.stderr}\n{plane.kubectl('get', 'pods,pvc', '--all-namespaces')}"
    return told


def upgrade(plane: ControlPlane, *arguments: str, chart: Path = CHART) -> str:
    """Install or upgrade the chart and wait until it is ready."""
    wait = ("--wait", "--timeout", INSTALL_SECONDS_MAX)
    jobs = ENDING if chart == CHART else ()
    return on(plane, "upgrade", "--install", RELEASE, str(chart), *wait, *jobs, *arguments).stdout


@pytest.mark.parametrize("values", VALUES)
def test_rendered_objects_match_the_servers_schemas(plane: ControlPlane, tmp_path: Path, values: str) -> None:
    """Checked by kubeconform against the schemas of the running server; nothing is skipped."""
    status, document = plane.ask("/openapi/v2")
    assert status == 200
    location = write_schemas(json.loads(document), tmp_path)
    told = subprocess.run(
        [str(tool("kubeconform")), "-strict", "-summary", "-schema-location", location],
        input=template(values, *FURTHER.get(values, ())).stdout,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert "Invalid: 0, Errors: 0, Skipped: 0" in told.stdout


def test_a_wrong_field_is_found(plane: ControlPlane, tmp_path: Path) -> None:
    """The check fails for an unknown field and for a text instead of a number."""
    location = write_schemas(json.loads(plane.ask("/openapi/v2")[1]), tmp_path)
    wrong = template().stdout.replace("replicas: 3", "replicas: three", 1).replace("hostNetwork:", "hostNet:")
    told = subprocess.run(
        [str(tool("kubeconform")), "-strict", "-schema-location", location],
        input=wrong, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode != 0
    assert "replicas" in told.stdout


@pytest.mark.parametrize("values", VALUES)
def test_the_server_accepts_a_dry_run(plane: ControlPlane, values: str) -> None:
    """Admission, defaults and validation of the server, with unknown fields refused; nothing is stored."""
    text = template(values, *FURTHER.get(values, ())).stdout
    strict = ("--dry-run=server", "--validate=strict", "--server-side", "--field-manager=test")
    told = plane.kubectl("apply", *strict, "--filename", "-", text=text)
    assert len(told.splitlines()) == len(objects(text))


def documented_command() -> list[str]:
    """Return the arguments of Helm in the README of the chart, with the path of the chart."""
    lines = (CHART / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.strip().startswith("helm upgrade --install")]
    return [str(CHART) if word == "deploy/charts/gpu-autoscaler" else word for word in line.split()[1:]]


def test_it_is_installed_upgraded_and_removed(plane: ControlPlane) -> None:
    """It becomes ready on real controllers; an upgrade keeps passwords; accepted jobs are kept after removal."""
    command = documented_command()
    refused = helm(*command[: command.index("-f")], "--kubeconfig", str(plane.kubeconfig()))
    assert "autoscaling.provider, image.repository: required" in refused.stderr
    assert json.loads(on(plane, "list", "--all", "--output", "json").stdout) == [], "nothing was installed"
    command[command.index("-f") + 1] = str(VALUES["simulated"])
    notes = on(plane, *command, *ENDING, "--wait", "--timeout", INSTALL_SECONDS_MAX).stdout
    assert "SIMULATED" in notes
    assert "uninstall` does not remove the nodes" in notes
    scoped = ("--namespace", NAMESPACE, "--output", "json")
    pods = json.loads(plane.kubectl("get", "pods", *scoped))["items"]
    store = {pod["spec"]["nodeName"] for pod in pods if "gpu-autoscaler.io/store" in pod["metadata"]["labels"]}
    assert len(store) == 1, "who opens the store runs on one node"
    before = json.loads(plane.kubectl("get", "secret", "gpu-autoscaler-nats-users", *scoped))["data"]
    assert set(before) == {*users(), "route"}
    assert len(set(before.values())) == len(before), "a random password for each user"
    own = (*SIMULATED, "--set", "nats.passwordsSecret=gpu-autoscaler-nats-users")
    deleting = helm("upgrade", RELEASE, str(CHART), *own, "--kubeconfig", str(plane.kubeconfig()), *scoped[:2])
    assert "belongs to this release, which would delete it" in deleting.stderr

    file = "nats.replicas=1,store.postgresql.url=,store.sqlite.enabled=true"
    upgrade(plane, "--values", str(VALUES["cluster"]), "--set", file)
    assert json.loads(plane.kubectl("get", "secret", "gpu-autoscaler-nats-users", *scoped))["data"] == before
    ready = json.loads(plane.kubectl("get", "deployments", *scoped))["items"]
    assert {one["metadata"]["name"] for one in ready} >= {"gpu-autoscaler-announcer", "gpu-autoscaler-shadow"}
    assert all(one["status"]["readyReplicas"] == one["spec"]["replicas"] for one in ready)

    on(plane, "rollback", RELEASE, "1", "--wait", "--timeout", INSTALL_SECONDS_MAX)
    on(plane, "uninstall", RELEASE, "--wait", "--timeout", INSTALL_SECONDS_MAX)
    left = json.loads(plane.kubectl("get", "deployments,statefulsets,secrets,clusterroles", *scoped))["items"]
    assert [one["metadata"]["name"] for one in left if "gpu-autoscaler" in one["metadata"]["name"]] == []
    claims = json.loads(plane.kubectl("get", "persistentvolumeclaims", *scoped))["items"]
    kept = {one["metadata"]["name"] for one in claims}
    assert kept == {"gpu-autoscaler-store", "data-gpu-autoscaler-nats-0"}
    assert plane.kubectl("get", "nodes", "--output", "name").count("machine-") == 3
    upgrade(plane, *SIMULATED)  # uses the kept data again
    on(plane, "uninstall", RELEASE, "--wait", "--timeout", INSTALL_SECONDS_MAX)


@pytest.mark.sweep
def test_an_earlier_chart_is_upgraded_and_rolled_back(plane: ControlPlane) -> None:
    """An installation of an earlier version is upgraded with the same values, and rolled back."""
    values = ("--values", str(VALUES["cluster"]), "--set", "nats.replicas=1")
    upgrade(plane, *values, chart=EARLIER)
    secret = ("get", "secret", "gpu-autoscaler-nats-users", "--namespace", NAMESPACE, "--output", "json")
    assert "migrator" not in json.loads(plane.kubectl(*secret))["data"]
    upgrade(plane, *values)
    assert "migrator" in json.loads(plane.kubectl(*secret))["data"]
    told = helm(
        *("upgrade", RELEASE, str(CHART), *values, "--set", "nats.replicas=3"),
        *("--kubeconfig", str(plane.kubeconfig()), "--namespace", NAMESPACE),
    )
    assert "a single server that joins a cluster deletes its streams" in told.stderr
    upgrade(plane, *values, "--set", "migration.to=0.2")  # before the rollback
    on(plane, "rollback", RELEASE, "--wait", "--timeout", INSTALL_SECONDS_MAX)
    on(plane, "uninstall", RELEASE, "--wait", "--timeout", INSTALL_SECONDS_MAX)


def test_it_is_installed_with_three_brokers_and_a_database(plane: ControlPlane) -> None:
    """A machine per broker server, services on several machines, passwords of our own; only the broker has volumes."""
    secret = "gpu-autoscaler-passwords"
    plane.kubectl("create", "--namespace", NAMESPACE, "--filename", "-", text=json.dumps(fresh_secret(secret)))
    upgrade(plane, "--values", str(VALUES["cluster"]), "--set", f"nats.passwordsSecret={secret}")
    names = plane.kubectl("get", "secrets", "--namespace", NAMESPACE, "--output", "name").split()
    assert f"secret/{secret}" in names
    assert "secret/gpu-autoscaler-nats-users" not in names
    pods = json.loads(plane.kubectl("get", "pods", "--namespace", NAMESPACE, "--output", "json"))["items"]
    where: dict[str, set[str]] = {}
    for pod in pods:
        where.setdefault(pod["metadata"]["labels"]["app.kubernetes.io/component"], set()).add(pod["spec"]["nodeName"])
    assert len(where["nats"]) == 3
    assert len(where["controller"]) == 3
    on(plane, "uninstall", RELEASE, "--wait", "--timeout", INSTALL_SECONDS_MAX)
