"""Settings and policy are read from file and environment, and all errors are reported at once."""

import re
from pathlib import Path

import pytest

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import PREFIX, Settings, load_settings, to_environment
from gpu_autoscaler.runtime.policies import load_policy


def file(tmp_path: Path, text: str) -> Path:
    """Return the path of a file with this text."""
    path = tmp_path / "file.toml"
    path.write_text(text)
    return path


def test_nothing_set_gives_the_defaults() -> None:
    """A process starts without a file and without variables, listening on loopback only."""
    assert load_settings(None, {"PATH": "/bin", "GPU_AUTOSCALER_CLOCK": "1@2026-01-01T00:00:00Z"}) == Settings()


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    """Each key comes from the environment if it is there, else from the file, else from the schema."""
    path = file(tmp_path, '[nats]\nurl = "nats://a:1"\n[gateway]\nport = 9000\n')
    settings = load_settings(
        path,
        {
            "GPU_AUTOSCALER_NATS_URL": "nats://b:2",
            "GPU_AUTOSCALER_GATEWAY_TOKENS": "one, two",
            "GPU_AUTOSCALER_KUBE_IS_IN_CLUSTER": "true",
            "GPU_AUTOSCALER_INSTANCE": "host-1",
        },
    )
    assert settings.nats.url == "nats://b:2"
    assert settings.gateway.port == 9000
    assert settings.gateway.tokens == ("one", "two")
    assert settings.kube.is_in_cluster
    assert settings.instance == "host-1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GATEWAY_HOST": "0.0.0.0"}, "gateway.host: 0.0.0.0 is reachable from other machines"),  # noqa: S104 - refused here
        (
            {"KUBE_URL": "http://a", "KUBE_IS_IN_CLUSTER": "true"},
            "kube: url and is_in_cluster exclude each other; keep one",
        ),
        ({"KUBE_URL": "a:1"}, "kube.url: 'a:1' must start with http"),
        ({"STORE_URL": "mysql://secret@db"}, "store.url: must start with sqlite:/// or postgresql:// (got 'mysql')"),
        ({"NATS_STREAM_LIMITS": "POD=1GiB, NODE=7"}, "nats.stream_limits: NODE: '7' is no size and age; write NAME="),
        ({"SENSING_ROLE": "node"}, "sensing.node_name: required"),
        ({"GATEWAY_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks: false"),
        ({"GATEWAY_PROJECT_NAMESPACES": "research=Team R"}, "'research=Team R' is not project=namespace"),
        ({"GATEWAY_PROJECT_NAMESPACES": "research"}, "'research' is not project=namespace"),
        ({"GATEWAY_CLIENT_PROJECTS": "anna"}, "'anna' is not client=project; example: anna=research"),
        ({"GATEWAY_TLS_KEY_PATH": "/key"}, "gateway.tls_certificate_path, gateway.tls_key_path: set both"),
        ({"GATEWAY_OIDC_ISSUER": "https://login.example"}, "gateway.oidc_issuer, gateway.oidc_audience: set both"),
        (
            {"GATEWAY_OIDC_ISSUER": "http://login.example", "GATEWAY_OIDC_AUDIENCE": "a"},
            "gateway.oidc_issuer: 'http://login.example' must start with https://",
        ),
    ],
)
def test_contradictions_are_refused(variables: dict[str, str], message: str) -> None:
    """Values that are valid alone and invalid together are refused with the next step."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_settings(None, {f"GPU_AUTOSCALER_{name}": value for name, value in variables.items()})


def test_variables_of_kubernetes_services_are_ignored() -> None:
    """A Service with our name must not keep a pod from starting."""
    assert load_settings(None, {"GPU_AUTOSCALER_GATEWAY_SERVICE_HOST": "10.0.0.1"}) == Settings()


def test_a_missing_or_invalid_file_is_named(tmp_path: Path) -> None:
    """The error names the file and the reason."""
    with pytest.raises(ConfigError, match=r"absent\.toml.*\n.*cannot be read"):
        load_settings(tmp_path / "absent.toml", {})
    with pytest.raises(ConfigError, match="invalid TOML"):
        load_settings(file(tmp_path, "= what"), {})


def test_settings_are_passed_to_another_process(tmp_path: Path) -> None:
    """The launcher passes its settings as environment variables."""
    text = """
    instance = "a"
    [gateway]
    tokens = ["a", "b"]
    [kube]
    is_in_cluster = true
    [nats]
    stream_limits = ["NODE=1GiB/14d", "POD=7d"]
    """
    settings = load_settings(file(tmp_path, text), {})
    assert load_settings(None, to_environment(settings)) == settings


def test_a_policy_is_read_from_toml(tmp_path: Path) -> None:
    """Omitted fields keep their defaults."""
    path = file(tmp_path, 'idle_seconds_max = 60\n[[pools]]\nname = "spot"\ncapacity_types = ["spot"]\n')
    policy = load_policy(path)
    assert policy.idle_seconds_max == 60
    assert policy.pools == (NodePool(name="spot", capacity_types=policy.pools[0].capacity_types),)
    assert policy.nodes_count_max == DEFAULT_POLICY.nodes_count_max
    assert load_policy(None) == DEFAULT_POLICY


def test_an_invalid_disruption_budget_is_refused(tmp_path: Path) -> None:
    """It would allow no removal; its author learns of it at the start."""
    path = file(
        tmp_path,
        '[[removal.disruption_budgets]]\nnodes_count_max = 1\nschedule = "0 25 * * *"\nduration_seconds = 60\n',
    )
    with pytest.raises(
        ConfigError, match=r"removal\.disruption_budgets\[0\]: schedule: hour '25': '25' is not within 0 to 23"
    ):
        load_policy(path)


def test_a_policy_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Minimum above maximum, default above the limit, a duplicate pool, an unknown GPU."""
    path = file(
        tmp_path,
        "nodes_count_min = 5\nnodes_count_max = 2\njob_duration_hours_default = 50\n"
        '[[pools]]\nname = "a"\ngpu_models = ["H10"]\n[[pools]]\nname = "a"\nnodes_count_max = 3\n',
    )
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    message = "\n".join(caught.value.violations)
    assert "nodes_count_min: 5 is above nodes_count_max 2" in message
    assert "job_duration_hours_default: 50 is above job_duration_hours_max 48" in message
    assert "pools: name 'a' is used 2 times" in message
    assert "pools[0].gpu_models: unknown GPU model 'H10'; did you mean 'H100'?" in message
    assert "pools[1].nodes_count_max: 3 is above" in message


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"NATS_REPLICAS_COUNT": "2"},
            "nats.replicas_count: 2 copies tolerate no more lost servers than 1; set 1, 3 or 5",
        ),
        ({"NATS_REPLICAS_COUNT": "6"}, "NATS_REPLICAS_COUNT: Expected `int` <= 5"),
        ({"NATS_TLS_CERTIFICATE_PATH": "a.pem"}, "nats.tls_key_path: required by nats.tls_certificate_path"),
        ({"NATS_TLS_KEY_PATH": "a.pem"}, "nats.tls_certificate_path: required by nats.tls_key_path"),
    ],
)
def test_settings_of_the_broker_are_validated(variables: dict[str, str], message: str) -> None:
    """With the name of the setting and the next step."""
    with pytest.raises(ConfigError) as raised:
        load_settings(None, {f"{PREFIX}{name}": value for name, value in variables.items()})
    assert message in str(raised.value)
