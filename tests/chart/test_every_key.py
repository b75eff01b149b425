"""Every setting of the services and every key of the policy can be set by values of the chart."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import inspect
from tests.chart.charting import CHART, Json, of_kind, rendered, template
from tests.chart.test_rendering import environment, policy_of, processes

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.runtime.config import Settings
from gpu_autoscaler_services.chart_settings import REFUSED_SETTINGS

# Values of fields of which the type alone says too little, by the name of the field.
SAMPLES: dict[str, Any] = {
    "admitted_namespaces": ["monitoring"],
    "capacity_types": ["spot", "on-demand"],
    "client_projects": ["anna=research", "bob=*"],
    "cost_center": "cc-42",
    "duration_seconds": 3600.0,
    "format": "text",  # json is the chart's own
    "gpu_model": "H100",
    "gpu_models": ["H100"],
    "mig_profiles": ["1g.10gb"],
    "mix": {"spot_ratio": 0.5, "on_demand_ratio": 0.3, "reserved_ratio": 0.2},
    "namespace": "team-r",
    "namespace_template": "team-{project}",
    "quota": {"requests.nvidia.com/gpu": "16"},
    "schedule": "0 22 * * mon-fri",
    "startup_taints": [{"key": "startup-taint.gpu-autoscaler.io/agent", "value": "a", "effect": "NoExecute"}],
    "time_zone": "Europe/Berlin",
}


def sample(kind: inspect.Type, default: Any, name: str = "") -> Any:  # noqa: ANN401 - of any type
    """Return a value of the type other than the default; of a struct with all its fields."""
    if name in SAMPLES:
        return SAMPLES[name]
    default = None if default is msgspec.NODEFAULT else default
    match kind:
        case inspect.Metadata():
            return sample(kind.type, default)
        case inspect.UnionType():
            (variant,) = (variant for variant in kind.types if not isinstance(variant, inspect.NoneType))
            return sample(variant, default)
        case inspect.StructType():
            return {
                field.name: sample(field.type, getattr(default, field.name, field.default), field.name)
                for field in kind.fields
            }
        case inspect.BoolType():
            return not default
        case inspect.LiteralType():
            return next(value for value in kind.values if value != default)
        case inspect.EnumType():
            return next(member.value for member in kind.cls if member != default)
        case inspect.IntType() | inspect.FloatType():
            return near(kind, kind.ge or 0 if default is None else default)
        case inspect.StrType():
            return 'https://sample.example/"a" #b'
        case inspect.VarTupleType():
            return [sample(kind.item_type, None)]
        case inspect.DictType():
            return {"a.b/c": sample(kind.value_type, None)}
    raise AssertionError(f"{name}: no sample of {kind}")


def near(kind: inspect.IntType | inspect.FloatType, default: float) -> float:
    """Return a number beside the default, within the range of the type."""
    step = 1 if isinstance(kind, inspect.IntType) else 0.01
    value = default + step
    return value if (kind.le is None or value <= kind.le) and (kind.lt is None or value < kind.lt) else default - step


def leaves(document: Json) -> dict[str, Any]:
    """Return the values of a document of settings by path."""
    return {
        f"{section}.{key}" if key else section: value
        for section, fields in document.items()
        for key, value in (fields.items() if isinstance(fields, dict) else (("", fields),))
    }


def written(folder: Path, values: Json) -> Path:
    """Write a file of values; return its path."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def value_at(document: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value at the path; KeyError without one."""
    for key in path.split("."):
        document = document[key]
    return document


SETTINGS = leaves(sample(inspect.type_info(Settings), Settings()))
OPEN = {path: value for path, value in SETTINGS.items() if path not in REFUSED_SETTINGS}
CLOUD = {"provider": "aws", "aws": {"region": "eu-west-1", "autoScalingGroups": {"a": "g"}}}


def test_every_other_setting_is_set_under_settings(tmp_path: Path) -> None:
    """With its name in the settings file; each process loads it."""
    given: Json = {}
    for path, value in OPEN.items():
        section, _, key = path.partition(".")
        given.setdefault(section, {})[key] = value
    values = {"autoscaling": CLOUD, "nats": {"passwordsSecret": ""}, "settings": given}
    loaded = list(processes(rendered("outside", files=[written(tmp_path, values)])))
    assert "gpu-autoscaler-controller" in [name for name, _, _ in loaded]
    for name, _, settings in loaded:
        document = msgspec.json.decode(msgspec.json.encode(settings))
        assert {path: value_at(document, path) for path in OPEN} == OPEN, name


POOLS = {"near": "p"}
PRICES = {"a/*/on-demand": 1.5}
# Values that set what `settings` refuses, by the file of `tests/chart/values` that they are added to.
FURTHER: list[tuple[str, Json]] = [
    ("simulated", {"jobs": {"watchQuotas": True}}),
    ("simulated", {"jobs": {"serveProvisioningRequests": True}}),
    ("aws", {"autoscaling": {"aws": {
        "queueUrl": "https://queue", "autoScalingGroups": {"a": "g"}, "sharedAutoScalingGroups": ["g"],
        "desiredCapacityGroups": {"b": "h"}, "placementGroups": POOLS, "capacityReservations": ["cr-1"],
    }}}),
    ("karpenter", {"autoscaling": {"karpenter": {"mode": "limits", "nodePools": ["gpu"]}}}),
    ("outside", {"autoscaling": {"provider": "gcp", "gcp": {
        "projectID": "p", "region": "europe-west4", "instanceGroups": {"a": "europe-west4-a/g"},
        "sharedInstanceGroups": ["europe-west4-a/g"], "prices": PRICES,
    }}}),
    ("outside", {"autoscaling": {"provider": "azure", "azure": {
        "subscriptionID": "s", "resourceGroup": "g", "region": "westeurope", "vmScaleSets": {"a": "v"},
        "flexibleScaleSet": "f", "machine": {"storageProfile": {}}, "instanceTypes": ["Standard_NC*"],
        "spotCeilings": {"Standard_NC*": 1}, "userData": "{labels}", "prices": PRICES,
    }}}),
    ("cluster", {
        "defaults": {
            "logLevel": "debug",
            "extraEnv": [
                {"name": "GPU_AUTOSCALER_PROVIDER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "cloud", "key": "a"}}}
            ],
        },
        "nats": {
            "streamLimits": {"NODE": "1GiB"},
            "tls": {"secretName": "tls", "clientSecretName": "tls", "serverName": "nats.example"},
        },
        "fullnameOverride": "gpu",
        "gateway": {"clusterTokens": False, "singleRight": False, "projectNamespaces": {"research": "team-r"},
            "tls": {"secretName": "tls"},
            "oidc": {
                "issuer": "https://login.example", "audience": "gpu", "userClaim": "email", "userPrefix": "u:",
                "groupsClaim": "roles", "groupsPrefix": "r:", "caConfigMap": "ca",
            }},
        "policy": {"shadow": "nodes_count_max = 1"},
        "sensing": {"dcgmUrl": "http://{node_name}:9400", "scrapeSeconds": 5},
        "store": {
            "snapshotSeconds": 60, "spanDays": 2, "ledgerDays": 63, "planDays": 2, "jobDays": 63, "snapshotDays": 2,
            "auditDays": 2, "requestDays": 2,
        },
    }),
]  # fmt: skip
# Of another cluster than that of the pods; the port behind the Service.
FIXED = {"kube.token", "kube.kubeconfig_path", "kube.context", "gateway.port"}


def test_every_refused_setting_is_set_by_another_value(tmp_path: Path) -> None:
    """All but a few that have no use in a pod."""
    defaults = leaves(msgspec.to_builtins(Settings()))
    reached = set(OPEN)
    for values, further in FURTHER:
        for _, _, settings in processes(rendered(values, files=[written(tmp_path, further)])):
            document = msgspec.to_builtins(settings)
            reached |= {path for path in SETTINGS if value_at(document, path) != defaults[path]}
    assert set(SETTINGS) - reached == FIXED


def test_a_refused_setting_names_the_value_to_set() -> None:
    """The value exists, and the chart fails with its name."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert REFUSED_SETTINGS.keys() <= SETTINGS.keys()
    for step in REFUSED_SETTINGS.values():
        for value in re.findall(r"\bset ([\w.]+)", step):
            value_at(defaults, value)
    for path, value in (("aws.region", "r"), ("store.plan_days", "1"), ("instance", "a"), ("nats.url", "nats://a:1")):
        result = template("cluster", f"settings.{path}={value}")
        assert f"settings.{path}: refused: {REFUSED_SETTINGS[path]}" in result.stderr


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        ("settings.aws.fleet=true", "at '/settings/aws': additional properties 'fleet' not allowed"),
        ("settings.aws.fleets=1", "at '/settings/aws/fleets': got number, want boolean"),
        ("settings.aws.group_max_sizes={a\\,b}", "at '/settings/aws/group_max_sizes/0'"),
        ("settings.gcp.resize_request_run_seconds=1", "minimum: got 1, want 600"),
        ("settings.cloud.name=aws", "additional properties 'cloud' not allowed"),
        ("settings.provider.url=http://b", "settings.provider.url: the chart sets it in pods of controller"),
        ("settings.nats.credentials_path=/a", "settings.nats.credentials_path: requires nats.enabled=false"),
        ("services.gateway.extraEnv[0].name=POD_NAME", "services.gateway.extraEnv: POD_NAME is set by the chart"),
        ("defaults.extraEnv[0].name=GPU_AUTOSCALER_LOG_FORMAT", "GPU_AUTOSCALER_LOG_FORMAT is set by settings"),
        ("defaults.extraEnv[0].value=a", "/defaults/extraEnv/0"),
        ("policy.idle_jobs.is_of=true", "at '/policy/idle_jobs': additional properties 'is_of' not allowed"),
        ("policy.idle_job.is_on=true", "at '/policy': additional properties 'idle_job' not allowed"),
        ("policy.utilization_trigger=plain", "/policy/utilization_trigger"),
        ("policy.spot.mix.spot_ratio=60", "/policy/spot/mix/spot_ratio"),
        ("policy.pools[0].name=a", "policy.pools: replaces autoscaling.nodePools, but both are set; remove one"),
    ],
)
def test_a_wrong_key_is_refused(value: str, phrase: str) -> None:
    """Before anything is installed, with its path."""
    result = template("cluster", value)
    assert result.returncode != 0
    assert phrase in result.stderr


def test_every_key_of_the_policy_is_set_under_policy(tmp_path: Path) -> None:
    """With its name in the policy file, over the value under `autoscaling`; the loaded policy has them all."""
    keys = sample(inspect.type_info(ScalingPolicy), DEFAULT_POLICY)
    (pool,) = keys["pools"]
    shared = pool.pop("sharing")
    mig, replicas = ({"mig_profiles": shared.pop("mig_profiles")}, shared)
    keys["pools"] = [pool | {"sharing": replicas}, {"name": "slices", "sharing": mig}]
    (project,) = keys["tenancy"]["projects"]
    made = {"name": "made", "quota": project.pop("quota")}
    keys["tenancy"]["projects"] = [project, made]
    found = rendered(None, "autoscaling.predictive.lookbackDays=3", files=[written(tmp_path, {"policy": keys})])
    assert policy_of(found, tmp_path) == msgspec.convert(keys, ScalingPolicy)


def test_a_key_of_the_policy_leaves_its_neighbors(tmp_path: Path) -> None:
    """The other values of the same table are those under `autoscaling`, and a disabled autoscaler stays frozen."""
    pools = [{"name": "a", "sharing": {"replicas_count": 4}}]
    values = {"policy": {"spot": {"is_test_annotation_on": True}, "is_frozen": False, "pools": pools}}
    sets = ("autoscaling.enabled=false", "autoscaling.limits.maxNodes=7", "autoscaling.spot.diversify=false")
    policy = policy_of(rendered(None, *sets, files=[written(tmp_path, values)]), tmp_path)
    assert (policy.is_frozen, policy.nodes_count_max) == (True, 7)
    assert (policy.spot.is_test_annotation_on, policy.spot.capacity_pool_gpu_ratio_max) == (True, 1)
    assert policy.spot.mix == DEFAULT_POLICY.spot.mix
    assert [pool.sharing and pool.sharing.replicas_count for pool in policy.pools] == [4]
    result = template("outside", "policy.gpu_count_max=1")
    assert "policy.text: replaces all keys of the policy, but policy.gpu_count_max is set as well" in result.stderr


def test_services_log_in_with_a_mounted_credentials_file(tmp_path: Path) -> None:
    """Without password and user in the address; each service has a Secret of its own."""
    volume = {"name": "nats", "secret": {"secretName": "scaler-creds"}}
    path = "/etc/nats-credentials/service.creds"
    values = {
        "nats": {"passwordsSecret": ""},
        "settings": {"nats": {"credentials_path": path}},
        "defaults": {"extraVolumeMounts": [{"name": "nats", "mountPath": "/etc/nats-credentials", "readOnly": True}]},
        "services": {"controller": {"extraVolumes": [volume]}},
    }
    found = rendered("outside", files=[written(tmp_path, values)])
    for name, pod, settings in processes(found):
        (container,) = pod["containers"]
        assert (settings.nats.credentials_path, settings.nats.url.count("@")) == (path, 0)
        assert "NATS_PASSWORD" not in environment(container)
        assert container["volumeMounts"][-1]["mountPath"] == "/etc/nats-credentials"
        assert (volume in pod["volumes"]) == (name == "gpu-autoscaler-controller")


def test_every_pod_takes_what_is_added_to_it(tmp_path: Path) -> None:
    """Labels, annotations, variables, volumes and mounts of `defaults`; the broker is not one of these services."""
    added: Json = {
        "podLabels": {"team": "research"},
        "podAnnotations": {"example.com/scrape": "true"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs", "readOnly": True}],
    }
    found = of_kind(rendered(None, files=[written(tmp_path, {"defaults": added})]), "Deployment", "DaemonSet", "Job")
    assert {"gpu-autoscaler-simcluster", "gpu-autoscaler-controller", "gpu-autoscaler-migrate"} <= set(found)
    for name, workload in found.items():
        metadata, pod = workload["spec"]["template"]["metadata"], workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert added["podLabels"].items() <= metadata["labels"].items(), name
        assert (metadata["annotations"], pod["nodeSelector"]) == (added["podAnnotations"], added["nodeSelector"])
        assert container["env"][-1] == added["extraEnv"][0]
        assert pod["volumes"][-1] == added["extraVolumes"][0]
        assert container["volumeMounts"][-1] == added["extraVolumeMounts"][0]
