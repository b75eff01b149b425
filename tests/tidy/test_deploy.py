"""What is in `deploy/` and `docker-compose.yml` fits the code: commands, settings, files, policies. Needs no engine."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_autoscaler.bus.permissions import password_variable
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.contracts.policy_crd import policy_crd
from gpu_autoscaler.contracts.policy_file import default_policy_file
from gpu_autoscaler.contracts.schemas import to_yaml
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler_services.chart_files import chart_files
from gpu_autoscaler_services.chart_settings import values_schema
from gpu_autoscaler_services.local.system import PROCESSES
from gpu_autoscaler_services.permissions import users, users_file

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ROOT / "deploy" / "policies"
OURS = "GPU_AUTOSCALER_"

# The keys that we use, so that a misspelt one is found. Source: Compose Specification, "Services top-level elements"
# (read 2026-11-21).
KEYS = {
    "image", "build", "command", "environment", "restart", "stop_grace_period", "read_only", "tmpfs", "cap_drop",
    "security_opt", "volumes", "depends_on", "healthcheck", "ports", "profiles",
}  # fmt: skip


def _compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return document


COMPOSE_SERVICES: dict[str, dict[str, Any]] = _compose()["services"]


def _environment(name: str) -> dict[str, str]:
    """What a container is given; what the reader is to set stands for itself."""
    environment = COMPOSE_SERVICES[name].get("environment", {})
    return {key: re.sub(r"\$\{(\w+)[^}]*\}", r"\1", value) for key, value in environment.items()}


def _settings(name: str) -> Settings:
    return load_settings(None, _environment(name))


def test_every_process_has_a_container() -> None:
    """The launcher and the compose file run the same processes."""
    assert set(COMPOSE_SERVICES) == {*PROCESSES, "nats", "simcluster", "migrate"}


def test_services_start_on_what_is_migrated() -> None:
    """The container that migrates is a user of its own and ends; services wait for it."""
    migrate = COMPOSE_SERVICES["migrate"]
    assert migrate["restart"].startswith("on-failure")
    assert _settings("migrate").nats.url == f"nats://migrator:{password_variable('migrator')}@nats:4222"
    assert _settings("migrate").store == _settings("gateway").store
    needed = {COMPOSE_SERVICES[name]["depends_on"]["migrate"]["condition"] for name in PROCESSES}
    assert needed == {"service_completed_successfully"}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_container_runs_what_the_launcher_runs(name: str) -> None:
    """In the same role, in its own container, healthy when it is ready, with settings that load."""
    service, process = PROCESSES[name]
    settings = _settings(name)
    assert settings.sensing.role == (process.role or Settings().sensing.role)
    assert f"127.0.0.1:{settings.http.port}/readyz" in COMPOSE_SERVICES[name]["healthcheck"]["test"][-1]
    assert settings.nats.url == f"nats://{service}:{password_variable(service)}@nats:4222"
    assert settings.kube.url == settings.provider.url == "http://simcluster:8001"


@pytest.mark.parametrize("name", [name for name in COMPOSE_SERVICES if name != "nats"])
def test_a_container_cannot_do_more_than_it_must(name: str) -> None:
    """No rights, nothing to write but the store, and a module that is there."""
    container = COMPOSE_SERVICES[name]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["command"][:2] == ["python", "-m"]
    assert importlib.util.find_spec(container["command"][2]) is not None
    assert all(key.startswith(OURS) for key in container.get("environment", {}))


@pytest.mark.parametrize("name", COMPOSE_SERVICES)
def test_what_a_container_names_is_there(name: str) -> None:
    """Known keys, declared volumes, files of this tree, services that say when they are healthy; loopback ports."""
    container = COMPOSE_SERVICES[name]
    assert set(container) <= KEYS
    for volume in container.get("volumes", []):
        source = volume.partition(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in _compose()["volumes"], volume
    for needed, wait in container.get("depends_on", {}).items():
        assert wait["condition"] == "service_completed_successfully" or "healthcheck" in COMPOSE_SERVICES[needed]
    assert all(port.startswith("127.0.0.1:") for port in container.get("ports", []))


def test_everybody_shares_one_store() -> None:
    """It is one file on a volume that every service mounts."""
    urls = {_settings(name).store.url for name in PROCESSES}
    assert urls == {"sqlite:////var/lib/gpu-autoscaler/store.db"}
    assert all("store:/var/lib/gpu-autoscaler" in COMPOSE_SERVICES[name]["volumes"] for name in PROCESSES)


def test_the_gateway_asks_who_is_there() -> None:
    """A gateway that listens beyond its container has a token, which the reader must set."""
    assert _settings("gateway").gateway.tokens == ("GPU_AUTOSCALER_TOKEN",)
    assert ":?" in COMPOSE_SERVICES["gateway"]["environment"]["GPU_AUTOSCALER_GATEWAY_TOKENS"]


def test_the_broker_takes_what_we_send() -> None:
    """The largest message in the mounted file is the one in the code."""
    words = (ROOT / "deploy/nats/nats.conf").read_text(encoding="utf-8").split()
    assert words[words.index("max_payload:") + 1] == str(SERVER_PAYLOAD_BYTES_MAX)


def test_the_broker_knows_the_users_of_the_code() -> None:
    """`make schemas` leaves no difference, the server includes the file, and is given each password from outside."""
    assert (ROOT / "deploy/nats/users.conf").read_text(encoding="utf-8") == users_file(), "run `make schemas`"
    assert 'include "users.conf"' in (ROOT / "deploy/nats/nats.conf").read_text(encoding="utf-8")
    given = COMPOSE_SERVICES["nats"]["environment"]
    assert list(given) == [password_variable(user) for user in users()]
    assert all(value == f"${{{name}:?run make secrets}}" for name, value in given.items())


def test_the_chart_knows_what_the_code_knows() -> None:
    """`make schemas` leaves no difference in the chart files that are generated from the code."""
    folder = ROOT / "deploy/charts/gpu-autoscaler/files"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == chart_files()
    schema = (folder.parent / "values.schema.json").read_text(encoding="utf-8")
    assert values_schema(schema) == schema, "run `make schemas`"


def _copied() -> Iterator[str]:
    for line in (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            yield from line.split()[1:-1]


def test_the_image_is_made_of_what_is_here() -> None:
    """Each file that it copies exists, packages come by hash, and nothing in it runs as root."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert [path for path in _copied() if not (ROOT / path).exists()] == []
    assert text.count("--require-hashes") == text.count("-r requirements/")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]


def test_the_default_policy_is_written_as_the_code_has_it() -> None:
    """`make schemas` leaves no difference, and loading the file gives the defaults."""
    path = POLICIES / "default.toml"
    assert path.read_text(encoding="utf-8") == default_policy_file(), "run `make schemas`"
    assert load_policy(path) == DEFAULT_POLICY


def test_the_definition_of_policies_is_written_as_the_code_has_it() -> None:
    """`make schemas` leaves no difference."""
    path = ROOT / "deploy/charts/gpu-autoscaler/crds/autoscalingpolicies.yaml"
    assert path.read_text(encoding="utf-8") == to_yaml(policy_crd()), "run `make schemas`"
