"""Rendering of the chart: settings that the services load, their permissions, restricted pods."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.charting import CHART, NAMESPACE, VALUES, Json, helm, of_kind, pods, rendered, template
from tests.support.certificates import Authority

from gpu_autoscaler.bus.server import find_binary
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.karpenter.catalog import offers_in
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler_services.api_rights import ROLES, role_rules
from gpu_autoscaler_services.node_gateway.admission import AUDIENCE
from gpu_autoscaler_services.permissions import fresh_secret, users, users_file
from gpu_autoscaler_services.registry import services

SERVE = ["python", "-m", "gpu_autoscaler_services.serve"]
FIELDS = {"metadata.name": "pod-0", "spec.nodeName": "node-1", "status.hostIP": "192.0.2.7"}


def environment(container: Json) -> dict[str, str]:
    """Return the environment of the process, with pod fields and secrets substituted."""
    variables: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = FIELDS[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = f"{source['secretKeyRef']['name']}.{source['secretKeyRef']['key']}"
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], variable["value"])
        variables[variable["name"]] = value
    return variables


def processes(found: list[Json]) -> Iterator[tuple[str, Json, Settings]]:
    """Yield name, pod and settings of every process."""
    for name, pod in pods(found).items():
        (container,) = pod["containers"]
        if container.get("command", [])[:3] == SERVE:
            ours = {key: text for key, text in environment(container).items() if key.startswith("GPU_")}
            yield name, pod, load_settings(None, ours)


def policy_of(found: list[Json], folder: Path, name: str = "policy.toml") -> ScalingPolicy:
    """Return the mounted policy; it must be valid."""
    path = folder / name
    path.write_text(of_kind(found, "ConfigMap")["gpu-autoscaler-policy"]["data"][name], encoding="utf-8")
    return load_policy(path)


@pytest.mark.parametrize("values", VALUES)
def test_it_is_linted_and_rendered(values: str) -> None:
    """Helm reports nothing, and object names are unique."""
    told = helm("lint", "--strict", str(CHART), "--values", str(VALUES[values]))
    assert told.returncode == 0, told.stdout
    found = rendered(values)
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("values", VALUES)
def test_every_service_starts_with_these_settings(values: str) -> None:
    """Each has its own broker user, service account and settings, which load."""
    found = rendered(values)
    seen = set()
    for name, pod, settings in processes(found):
        service = pod["containers"][0]["command"][3]
        seen.add(service)
        user = "node_watcher" if settings.sensing.role == "node" else service
        if settings.nats.token_path is None:
            assert f"://{user}:" in settings.nats.url, name
            assert f".{user}@" in settings.nats.url, "a password of another's"
        else:
            assert "@" not in settings.nats.url
        account = pod["serviceAccountName"]
        assert account in of_kind(found, "ServiceAccount")
        uses_kube = settings.kube.is_in_cluster
        assert pod["automountServiceAccountToken"] is uses_kube, name
        assert settings.kube.is_lease_mirrored == (service == "scaler" and uses_kube)
    without = {
        "simulated": {"shadow", "announcer", "policy_watcher", "node_gateway"},
        "cluster": {"node_gateway"},  # a simulated cloud serves the metadata of its nodes in one place
        "outside": {"shadow", "node_gateway"},
        "aws": {"shadow"},
        "karpenter": {"shadow"},
    }.get(values, set())
    assert seen == {service.name for service in services()} - without


@pytest.mark.parametrize("values", VALUES)
def test_containers_are_restricted(values: str) -> None:
    """Not root, read-only root file system, no capabilities, limits, probes, termination grace."""
    for name, pod in pods(rendered(values)).items():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert {"requests", "limits"} == set(container["resources"])
        assert {"livenessProbe", "readinessProbe"} <= set(container)
        assert pod["terminationGracePeriodSeconds"] >= 20
        assert pod["enableServiceLinks"] is False
        ports = {port["name"] for port in container["ports"]}
        probed = {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")}
        assert probed <= ports


STORED = {f"gpu-autoscaler-{name}" for name in ("controller", "scheduler", "cost-tracker", "gateway")}


def reads_snapshots(name: str, pod: dict[str, Any]) -> bool:
    """True for the services that fold; the pod watcher and the watchers on nodes (hostNetwork) do not."""
    return name != "gpu-autoscaler-pod-watcher" and not pod.get("hostNetwork")


@pytest.mark.parametrize("values", ["simulated", "outside"])
def test_pods_with_the_sqlite_file_share_a_node(values: str) -> None:
    """One file on one volume: the pods that open it have affinity, others do not."""
    for name, pod, settings in processes(rendered(values)):
        mounted = any("persistentVolumeClaim" in volume for volume in pod["volumes"])
        assert mounted == ("podAffinity" in pod["affinity"]) == reads_snapshots(name, pod), name
        if mounted:
            assert settings.store.url == "sqlite:////var/lib/gpu-autoscaler/store.db"


@pytest.mark.parametrize("reader", ["", "postgresql://reader@db.example:5433/gpu"])
def test_pods_with_the_database_run_anywhere(reader: str) -> None:
    """PostgreSQL: URL and password, no volume, and anti-affinity of replicas. Services that only read snapshots may log
    in as another user."""
    login = "store.postgresql.reader"
    found = rendered("cluster", *((f"{login}.url={reader}", f"{login}.passwordSecret=reader") if reader else ()))
    assert "gpu-autoscaler-store" not in of_kind(found, "PersistentVolumeClaim")
    opened = {}
    for name, pod, settings in processes(found):
        assert "podAffinity" not in pod["affinity"]
        seen = environment(pod["containers"][0])
        assert ("PGPASSWORD" in seen) == reads_snapshots(name, pod), name
        if "PGPASSWORD" in seen:
            opened[name] = (settings.store.url, seen["PGPASSWORD"])
    writer = ("postgresql://gpu@db.example:5433/gpu?sslmode=verify-full", "database.password")
    readers = {name: login for name, login in opened.items() if name not in STORED}
    assert opened == {**dict.fromkeys(STORED, writer), **readers}
    assert {"gpu-autoscaler-announcer", "gpu-autoscaler-dcgm-ingest"} <= set(readers)
    assert set(readers.values()) == {(reader, "reader.password") if reader else writer}
    assert "podAntiAffinity" in pods(found)["gpu-autoscaler-controller"]["affinity"]


def test_aws_settings_reach_the_driver() -> None:
    """Only in processes that call AWS; notices are watched on each of our nodes with hostNetwork."""
    found = rendered("aws")
    told = {name: settings for name, _, settings in processes(found) if settings.provider.name == "aws"}
    reading = "gpu-autoscaler-spot-watcher-notices"  # its metadata, without an account of the cloud
    assert set(told) == {"gpu-autoscaler-controller", "gpu-autoscaler-spot-watcher", reading}
    aws = told["gpu-autoscaler-controller"].aws
    assert (aws.region, aws.launch_template, aws.subnets) == ("us-west-2", "gpu-nodes", ("subnet-1", "subnet-2"))
    assert aws.instance_types == ("g5.*", "p5.48xlarge")
    files = of_kind(found, "ConfigMap")["gpu-autoscaler-cloud"]["data"]
    assert json.loads(files["prices.json"]) == {"p5.48xlarge/*/on-demand": 98.32}
    assert "{labels}" in files["user-data"]
    assert aws.prices_path is not None
    assert aws.user_data_path is not None
    mounts = pods(found)["gpu-autoscaler-controller"]["containers"][0]["volumeMounts"]
    folder = next(mount["mountPath"] for mount in mounts if mount["name"] == "cloud")
    assert {aws.prices_path, aws.user_data_path, aws.spot_advisor_path} == {f"{folder}/{name}" for name in files}

    notices = of_kind(found, "DaemonSet")["gpu-autoscaler-spot-watcher-notices"]["spec"]["template"]["spec"]
    assert notices["hostNetwork"] is True
    settings = next(one for name, _, one in processes(found) if name.endswith("-notices"))
    assert (settings.sensing.role, settings.sensing.node_name) == ("node", "node-1")
    assert (settings.http.host, settings.http.port) == ("192.0.2.7", 18081)
    roles = {account["metadata"].get("annotations") is None for account in of_kind(found, "ServiceAccount").values()}
    assert roles == {True, False}


def test_node_watchers_log_in_with_tokens_of_their_own_account() -> None:
    """The token is for the broker alone; only the gateway has the seed, and the server has the public key."""
    found = rendered("aws")
    by_name = {name.removeprefix("gpu-autoscaler-"): (pod, settings) for name, pod, settings in processes(found)}
    pod, settings = by_name["spot-watcher-notices"]
    (token,) = [volume["projected"] for volume in pod["volumes"] if volume["name"] == "token"]
    (source,) = token["sources"]
    assert source["serviceAccountToken"]["audience"] == AUDIENCE
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert settings.nats.token_path == f"{mounts['token']}/{source['serviceAccountToken']['path']}"
    assert "NATS_PASSWORD" not in environment(pod["containers"][0])
    gateway, told = by_name["node-gateway"]
    assert told.nats.node_account == f"system:serviceaccount:{NAMESPACE}:{pod['serviceAccountName']}"
    assert of_kind(found, "Deployment")["gpu-autoscaler-node-gateway"]["spec"]["replicas"] == 2
    holders = [name for name, (one, _) in by_name.items() if "nats-issuer" in json.dumps(one["volumes"])]
    assert holders == ["node-gateway"]
    assert told.nats.issuer_seed_path is not None
    assert "seed" in gateway["volumes"][-1]["secret"]["items"][0]["key"]
    accounts = {binding["subjects"][0]["name"] for binding in of_kind(found, "ClusterRoleBinding").values()}
    assert pod["serviceAccountName"] not in accounts
    config = of_kind(found, "ConfigMap")["gpu-autoscaler-nats"]["data"]["users.conf"].strip()
    issuer = re.search("issuer: (A[A-Z2-7]+)", config)
    assert issuer is not None
    assert config == users_file(callout_issuer=issuer[1]).strip()


def test_without_the_auth_callout_node_watchers_share_a_password() -> None:
    """The gateway has no rights on the cluster then."""
    found = rendered("karpenter")
    settings = {name: one for name, _, one in processes(found)}
    assert settings["gpu-autoscaler-node-gateway"].nats.issuer_seed_path is None
    assert not settings["gpu-autoscaler-node-gateway"].kube.is_in_cluster
    assert "gpu-autoscaler-node-gateway" not in of_kind(found, "ClusterRole")
    assert "auth_callout" not in json.dumps(of_kind(found, "ConfigMap")["gpu-autoscaler-nats"])


CLOUDS = {
    "aws": ("aws.region=eu-west-1", "aws.autoScalingGroups.a=g"),
    "gcp": ("gcp.projectID=p", "gcp.instanceGroups.a=europe-west4-a/g"),
    "azure": ("azure.subscriptionID=s", "azure.resourceGroup=g", "azure.region=westeurope", "azure.vmScaleSets.a=v"),
}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_node_watchers_read_the_metadata_of_their_cloud(cloud: str) -> None:
    """Each cloud's service has addresses and documents of its own."""
    chosen = (f"provider={cloud}", "spot.enabled=true", *CLOUDS[cloud])
    found = rendered("outside", *(f"autoscaling.{value}" for value in chosen))
    (settings,) = [one for name, _, one in processes(found) if name.endswith("-notices")]
    assert (settings.sensing.role, settings.provider.name) == ("node", cloud)


def test_karpenter_permissions_are_minimal(tmp_path: Path) -> None:
    """NodeClaims for the scaler, the node class for cloud callers; the driver reads the offers file."""
    found = rendered("karpenter")
    roles = {name: one["rules"] for name, one in of_kind(found, "ClusterRole").items()}
    of_class = {
        name
        for name, rules in roles.items()
        if any(rule["apiGroups"] == ["karpenter.k8s.aws"] and rule["resourceNames"] == ["gpu"] for rule in rules)
    }
    of_claims = {name for name, rules in roles.items() if any("nodeclaims" in rule["resources"] for rule in rules)}
    assert of_class == {"gpu-autoscaler-controller", "gpu-autoscaler-spot-watcher"}
    assert of_claims == {"gpu-autoscaler-controller"}
    assert not any("karpenter" in str(one.get("rules")) for one in of_kind(rendered("aws"), "ClusterRole").values())

    told = next(settings for name, _, settings in processes(found) if name == "gpu-autoscaler-controller").karpenter
    assert told.node_class == "karpenter.k8s.aws/EC2NodeClass/gpu"
    assert told.mode == "claims"
    path = tmp_path / "offers.json"
    path.write_text(of_kind(found, "ConfigMap")["gpu-autoscaler-cloud"]["data"]["offers.json"])
    assert told.offers_path == "/etc/gpu-autoscaler-cloud/offers.json"
    assert [offer.key for offer in offers_in(str(path))] == [
        f"g5.xlarge/us-west-2{zone}/{capacity_type}" for zone in "ab" for capacity_type in ("on-demand", "spot")
    ]


def test_default_values_are_the_default_policy(tmp_path: Path) -> None:
    """The defaults of the chart equal those of the code."""
    assert policy_of(rendered(), tmp_path) == DEFAULT_POLICY


def test_values_become_the_policy(tmp_path: Path) -> None:
    """Every policy value of `autoscaling` is in the policy."""
    found = rendered("cluster")
    policy = policy_of(found, tmp_path)
    assert (policy.utilization.high_ratio, policy.utilization.low_ratio) == (0.7, 0.1)
    assert policy.limits.scale_up_cooldown_seconds == 180
    assert policy.pending_pod_timeout_seconds == 90
    assert policy.scale_down_cooldown_seconds == policy.removal.pool_cooldown_seconds == 1200
    assert (policy.nodes_count_min, policy.nodes_count_max) == (1, 50)
    mix = policy.spot.mix
    assert (mix.spot_ratio, mix.on_demand_ratio, mix.reserved_ratio) == (0.4, 0.6, 0)
    assert policy.spot.capacity_pool_gpu_ratio_max == 1
    forecast = policy.forecast
    assert (forecast.is_on, forecast.lookback_hours, forecast.confidence_ratio_min) == (True, 28 * 24, 0.8)
    assert forecast.prewarm_utilization_ratio_max == 0.6
    first, paid, rest = policy.pools
    assert [pool.nodes_count_min for pool in policy.pools] == [2, 0, 0]
    assert (first.name, first.priority, first.nodes_count_max, first.gpu_models) == ("spot-a100", 10, 20, ("A100",))
    assert first.instance_types == ("p4d.24xlarge",)
    assert first.zones == ("us-west-2a", "us-west-2b")
    assert first.labels == {"team": "research", "tier": "1"}
    assert first.capacity_types == (CapacityType.SPOT,)
    assert paid.capacity_types == (CapacityType.RESERVED,)
    assert rest.capacity_types == (CapacityType.ON_DEMAND, CapacityType.RESERVED)
    assert policy_of(found, tmp_path, "shadow.toml").nodes_count_max == 10


@pytest.mark.parametrize(
    ("values", "mix"),
    [
        ({"spot": {"targetPercentage": 0.4}}, (0.4, 0.55, 0.05)),
        ({"spot": {"targetPercentage": 40}}, (0.4, 0.55, 0.05)),
        ({"spot": {"targetPercentage": 1}}, (1, 0, 0)),
        ({"spot": {"targetPercentage": 0.4}, "multiTier": {"spotPercentage": 0.7}}, (0.7, 0.25, 0.05)),
        ({"multiTier": {"spotPercentage": 50, "onDemandPercentage": 0.2, "reservedPercentage": 30}}, (0.5, 0.2, 0.3)),
        ({"spot": {"targetPercentage": 0.4}, "multiTier": {"enabled": False}}, (0.4, 0.6, 0)),
        ({"spot": {"enabled": False}, "multiTier": {"reservedPercentage": 0.25}}, (0, 0.75, 0.25)),
    ],
)
def test_a_share_is_a_ratio_or_a_percentage(tmp_path: Path, values: Json, mix: tuple[float, float, float]) -> None:
    """Up to 1 a ratio, above 1 a percentage; the share of on-demand is what remains."""
    found = policy_of(rendered(files=[autoscaling_values(tmp_path, values)]), tmp_path).spot.mix
    assert (found.spot_ratio, found.on_demand_ratio, found.reserved_ratio) == pytest.approx(mix)


def autoscaling_values(folder: Path, values: Json) -> Path:
    """Write a file with these values under `autoscaling`; return its path. `--set` has no fractions."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump({"autoscaling": values}), encoding="utf-8")
    return path


def test_a_spot_share_of_a_pool_is_its_own(tmp_path: Path) -> None:
    """As in AutoscalingPolicies; the other pools follow the mix of the cluster."""
    shares: list[Json] = [
        {"spotPercentage": 80}, {"spotPercentage": 0.2}, {}, {"spotPercentage": 0}, {"spotPercentage": 1},
        {"spotPercentage": 100, "capacityType": "spot"},
    ]  # fmt: skip
    pools = [{"name": f"pool-{number}", **share} for number, share in enumerate(shares)]
    policy = policy_of(rendered(files=[autoscaling_values(tmp_path, {"nodePools": pools})]), tmp_path)
    assert [pool.spot_ratio for pool in policy.pools] == [0.8, 0.2, None, 0, 1, 1]
    spot, others = (CapacityType.SPOT,), (CapacityType.ON_DEMAND, CapacityType.RESERVED)
    assert [pool.capacity_types for pool in policy.pools] == [(), (), (), others, spot, spot]
    assert policy.spot.mix == DEFAULT_POLICY.spot.mix


def test_disabled_autoscaling_freezes_the_policy(tmp_path: Path) -> None:
    """Also with a policy given as text."""
    policy = policy_of(rendered("outside"), tmp_path)
    assert (policy.is_frozen, policy.nodes_count_max, policy.idle_seconds_max) == (True, 7, 1800)


def test_disabled_spot_is_disabled_everywhere(tmp_path: Path) -> None:
    """No spot ratio, no spot pool, and no notice watcher."""
    found = rendered(None, "autoscaling.spot.enabled=false", "autoscaling.nodePools[0].name=a")
    policy = policy_of(found, tmp_path)
    assert policy.spot.mix.spot_ratio == 0
    assert policy.pools[0].capacity_types == (CapacityType.ON_DEMAND, CapacityType.RESERVED)
    assert "gpu-autoscaler-spot-watcher-notices" not in pods(found)


def test_aws_group_values_become_settings() -> None:
    """Region, groups by pool, and the launch template of other pools."""
    groups = (
        "autoScalingGroups.training=p4d",
        "sharedAutoScalingGroups[0]=p4d",
        "desiredCapacityGroups.old=g4",
        "placementGroups.near=p",
    )
    aws = ("region=eu-west-1", *groups, "launchTemplate=gpu", "subnets[0]=subnet-1")
    found = rendered("outside", "autoscaling.provider=aws", *(f"autoscaling.aws.{value}" for value in aws))
    by_process = {name: settings for name, _, settings in processes(found) if settings.provider.name == "aws"}
    assert "gpu-autoscaler-controller" in by_process
    for settings in by_process.values():
        assert settings.aws.region == "eu-west-1"
        assert (settings.aws.groups, settings.aws.desired_capacity_groups) == (("training=p4d",), ("old=g4",))
        assert (settings.aws.placement_groups, settings.aws.shared_groups) == (("near=p",), ("p4d",))
        assert (settings.aws.launch_template, settings.aws.subnets) == ("gpu", ("subnet-1",))
        assert (settings.aws.spot_ceilings, settings.aws.spot_advisor_path) == ((), None)
        assert settings.aws.placement_score_count is None


def test_limits_of_streams_reach_every_process() -> None:
    """All processes compare the same declaration with the broker; the volume may be used up by streams."""
    found = rendered(None, "nats.streamLimits.NODE=1GiB/14d", "nats.streamLimits.COST=3d")
    for name, _, settings in processes(found):
        assert settings.nats.stream_limits == ("COST=3d", "NODE=1GiB/14d"), name
    assert "max_file_store: 20Gi" in of_kind(found, "ConfigMap")["gpu-autoscaler-nats"]["data"]["nats.conf"]


REFUSED = {
    "autoscaling.provider=azure": "subscriptionID, resourceGroup and region are required",
    "autoscaling.provider=gcp": "autoscaling.gcp.projectID: required",
    "autoscaling.provider=aws": "autoscaling.aws.region: required",
    "autoscaling.provider=cloud": "/autoscaling/provider",
    "autoscaling.aws.spotCeilings.p5=free": "/autoscaling/aws/spotCeilings/p5",
    "autoscaling.aws.spotAdvisor.data.spot_advisor.eu-west-1.a=b": "/autoscaling/aws/spotAdvisor",
    "autoscaling.scaleUp.threshhold=0.8": "additional properties 'threshhold' not allowed",
    "autoscaling.scaleUp.cooldown=soon": "/autoscaling/scaleUp/cooldown",
    "autoscaling.limits.maxNodes=-1": "/autoscaling/limits/maxNodes",
    "autoscaling.multiTier.onDemandPercentage=70": "is not 100 %: 0.6, 0.7 and 0.05",
    "autoscaling.predictive.preWarmThreshold=0": "/autoscaling/predictive/preWarmThreshold",
    "autoscaling.predictive.horizonMinutes=60": "/autoscaling/predictive/horizonMinutes",
    "autoscaling.sim.url=http://cloud": "store.postgresql.url: required on a real cluster",
    "store.postgresql.url=postgresql://gpu@db/gpu": "store.postgresql.passwordSecret",
    "store.postgresql.url=postgresql://gpu:secret@db/gpu": "/store/postgresql/url",
    "store.postgresql.url=mysql://db/gpu": "/store/postgresql/url",
    "store.postgresql.reader.url=postgresql://reader@db/gpu": "store.postgresql.reader: requires store.postgresql.url",
    "store.postgresql.reader.url=mysql://db/gpu": "/store/postgresql/reader/url",
    "nats.enabled=false": "nats.external.servers: required",
    "nats.replicas=2": "/nats/replicas",
    "nats.streamLimits.NODE=1GB": "/nats/streamLimits/NODE",
    "nats.authCallout.enabled=true": "nats.authCallout: issuer and seedSecret are required",
    "nats.authCallout.issuer=SAJAC": "/nats/authCallout/issuer",
    "nats.syncInterval=sometimes": "/nats/syncInterval",
    "nats.goMemoryLimit=2Gi": "/nats/goMemoryLimit",
    "nats.clients[0].name=a b": "/nats/clients/0",
    "nats.tls.serverName=nats.example": "nats.tls.secretName: required by",
    "nats.tls.clientSecretName=clients": "nats.tls.secretName: required by",
    "gateway.oidc.issuer=http://login.example": "/gateway/oidc/issuer",
    "gateway.oidc.issuer=https://login.example": "gateway.oidc.audience: required with gateway.oidc.issuer",
    "gateway.tls.certManager.name=authority": "gateway.tls.secretName: required with gateway.tls.certManager",
    "gateway.projectNamespaces.research=Team": "/gateway/projectNamespaces/research",
    "services.scheduler.replicas=2": "/services/scheduler/replicas",
    "services.planner.replicas=1": "additional properties 'planner' not allowed",
}


@pytest.mark.parametrize("value", REFUSED)
def test_an_invalid_value_is_refused(value: str) -> None:
    """Before anything is installed, with the value's name and the next step."""
    result = template(None, value)
    assert result.returncode != 0
    assert REFUSED[value] in result.stderr


def test_roles_of_the_api_are_those_of_the_code() -> None:
    """With the fullname, which refusals name; the roles of 0.2 beside them, unless switched off."""
    roles = of_kind(rendered("cluster"), "ClusterRole")
    for role in ROLES:
        assert roles[f"gpu-autoscaler-{role}"]["rules"] == role_rules(role)
        assert not any("aggregate" in label for label in roles[f"gpu-autoscaler-{role}"]["metadata"]["labels"])
    assert {"gpu-autoscaler-jobs-view", "gpu-autoscaler-jobs-edit"} <= roles.keys()
    roles = of_kind(rendered("cluster", "gateway.singleRight=false", "gateway.aggregateRoles=true"), "ClusterRole")
    assert not {"gpu-autoscaler-jobs-view", "gpu-autoscaler-jobs-edit"} & roles.keys()
    for role, into in (("viewer", "view"), ("submitter", "edit"), ("operator", "admin")):
        key = f"rbac.authorization.k8s.io/aggregate-to-{into}"
        assert roles[f"gpu-autoscaler-{role}"]["metadata"]["labels"][key] == "true"


def test_clients_with_names_are_users_of_the_broker() -> None:
    """As the code writes them; their passwords come from Secrets of their own. The auth callout leaves them alone."""
    names = ["system:serviceaccount:research:pipeline", "oidc:anna"]
    sets = [f"nats.clients[{number}].name={name}" for number, name in enumerate(names)]
    sets += [f"nats.clients[{number}].passwordSecret=of-{number}" for number in range(len(names))]
    found = rendered("simulated", *sets)
    config = of_kind(found, "ConfigMap")["gpu-autoscaler-nats"]["data"]
    assert config["users.conf"].strip() == users_file(clients=names).strip()
    env = {variable["name"]: variable for variable in pods(found)["gpu-autoscaler-nats"]["containers"][0]["env"]}
    assert env["NATS_PASSWORD_CLIENT_1"]["valueFrom"]["secretKeyRef"] == {"name": "of-1", "key": "password"}
    issuer = f"A{'A' * 55}"
    callout = ("nats.authCallout.enabled=true", f"nats.authCallout.issuer={issuer}", "nats.authCallout.seedSecret=seed")
    text = of_kind(rendered("aws", *sets, *callout), "ConfigMap")["gpu-autoscaler-nats"]["data"]["users.conf"]
    (line,) = (line for line in text.splitlines() if "auth_users" in line)
    assert all(json.dumps(name) in line for name in names)


def test_the_gateway_serves_the_certificate_of_cert_manager() -> None:
    """For every name of the Service and the given ones, into the Secret that the gateway mounts."""
    sets = ("gateway.tls.secretName=gateway-tls", "gateway.tls.certManager.name=authority")
    found = rendered("cluster", *sets, "gateway.tls.certManager.dnsNames={gpu.example}")
    spec = of_kind(found, "Certificate")["gpu-autoscaler-gateway"]["spec"]
    host = f"gpu-manager.{NAMESPACE}"
    names = ["gpu-manager", host, f"{host}.svc", f"{host}.svc.cluster.local", "gpu.example"]
    assert (spec["secretName"], spec["dnsNames"]) == ("gateway-tls", names)
    pod = pods(found)["gpu-autoscaler-gateway"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "tls")
    assert volume["secret"]["secretName"] == "gateway-tls"
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    settings = environment(pod["containers"][0])
    for path in ("TLS_CERTIFICATE_PATH", "TLS_KEY_PATH"):
        assert settings[f"GPU_AUTOSCALER_GATEWAY_{path}"].rpartition("/")[0] in mounted
    assert not of_kind(rendered("cluster", "gateway.tls.secretName=own"), "Certificate")


def test_a_provider_of_identities_is_reachable_and_rights_are_checked() -> None:
    """Without token review, too: roles, the rights of the gateway's account, and egress to the issuer."""
    sets = ("gateway.tokenReview=false", "gateway.oidc.issuer=https://login.example:8443", "gateway.oidc.audience=gpu")
    found = rendered("cluster", *sets)
    assert "gpu-autoscaler-operator" in of_kind(found, "ClusterRole")
    account = of_kind(found, "ClusterRole")["gpu-autoscaler-gateway"]
    assert any("subjectaccessreviews" in rule["resources"] for rule in account["rules"])
    egress = of_kind(found, "NetworkPolicy")["gpu-autoscaler-gateway"]["spec"]["egress"]
    assert {"ports": [{"port": 8443}]} in egress
    settings = environment(pods(found)["gpu-autoscaler-gateway"]["containers"][0])
    assert settings["GPU_AUTOSCALER_GATEWAY_OIDC_ISSUER"] == "https://login.example:8443"
    assert "GPU_AUTOSCALER_GATEWAY_IS_TOKEN_REVIEW_ENABLED" not in settings


@pytest.mark.parametrize(
    ("pool", "phrase"),
    [
        ("{name=a,capacityType=spot,spotPercentage=50}", "spotPercentage requires capacityType mixed"),
        ("{name=a,capacityType=on-demand,spotPercentage=1}", "spotPercentage requires capacityType mixed"),
        ("{name=a,spotPercentage=101}", "/autoscaling/nodePools/0/spotPercentage"),
    ],
)
def test_an_invalid_pool_is_refused(pool: str, phrase: str) -> None:
    """With its name and the conflicting value."""
    sets = [f"autoscaling.nodePools[0].{field}" for field in pool.strip("{}").split(",")]
    result = template(None, *sets)
    assert result.returncode != 0
    assert phrase in result.stderr


def test_the_broker_takes_its_configuration(tmp_path: Path) -> None:
    """nats-server validates the mounted configuration for one and three servers; passwords come from secrets."""
    for values, passwords in (("simulated", users()), ("cluster", [*users(), "route"])):
        found = rendered(values)
        for name, text in of_kind(found, "ConfigMap")["gpu-autoscaler-nats"]["data"].items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        (container,) = pods(found)["gpu-autoscaler-nats"]["containers"]
        given = environment(container)
        assert {given[key].partition(".")[2] for key in given if key.startswith("NATS_PASSWORD_")} == set(passwords)
        assert len([key for key in given if key.startswith("NATS_PASSWORD_")]) == len(passwords)
        told = subprocess.run(
            [str(find_binary()), "-c", str(tmp_path / "nats.conf"), "-t"],
            capture_output=True, text=True, timeout=30, check=False, env=given,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr


TLS = ("nats.tls.secretName=broker-tls", "nats.tls.clientSecretName=service-tls", "nats.tls.serverName=nats.example")


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_broker_takes_its_certificates(tmp_path: Path, replicas: int) -> None:
    """Clients and routes are encrypted, and clients verified; facts are on disk before they are acknowledged."""
    found = rendered("cluster", f"nats.replicas={replicas}", *TLS)
    texts = of_kind(found, "ConfigMap")["gpu-autoscaler-nats"]["data"]
    pod = pods(found)["gpu-autoscaler-nats"]
    (folder,) = [each["mountPath"] for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
    authority = Authority(tmp_path / "tls", "ca")
    pair = authority.signed("tls", "nats.example")
    for file, name in ((authority.certificate, "ca.crt"), (pair.certificate, "tls.crt"), (pair.key, "tls.key")):
        file.rename(file.with_name(name))
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(folder, str(tmp_path / "tls")), encoding="utf-8")
    told = subprocess.run(
        [str(find_binary()), "-c", str(tmp_path / "nats.conf"), "-t"],
        capture_output=True, text=True, timeout=30, check=False, env=environment(pod["containers"][0]),
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "verify: true" in texts["nats.conf"]
    assert texts["nats.conf"].count("tls {") == (1 if replicas == 1 else 2)
    assert "sync_interval: always" in texts["nats.conf"]
    assert "sync_interval: 2m" in _broker_text("nats.syncInterval=2m")
    assert "tls" not in _broker_text()


def _broker_text(*sets: str) -> str:
    text = of_kind(rendered("cluster", *sets), "ConfigMap")["gpu-autoscaler-nats"]["data"]["nats.conf"]
    assert isinstance(text, str)
    return text


def test_the_broker_collects_its_heap_before_it_is_killed() -> None:
    """Its soft limit is below the limit of its pod, and can be omitted."""
    (broker,) = pods(rendered("cluster"))["gpu-autoscaler-nats"]["containers"]
    assert (broker["resources"]["limits"]["memory"], environment(broker)["GOMEMLIMIT"]) == ("2Gi", "1600MiB")
    (broker,) = pods(rendered("cluster", "nats.goMemoryLimit="))["gpu-autoscaler-nats"]["containers"]
    assert "GOMEMLIMIT" not in environment(broker)


def test_services_get_the_authority_and_their_own_certificate() -> None:
    """And never the key of the broker."""
    found = rendered("cluster", *TLS)
    for name, pod, settings in processes(found):
        nats = settings.nats
        assert nats.url.startswith("tls://"), name
        assert (nats.tls_ca_path, nats.tls_server_name) == ("/etc/gpu-autoscaler-nats/ca.crt", "nats.example")
        assert nats.tls_key_path == "/etc/gpu-autoscaler-nats/tls.key"
        (volume,) = [each for each in pod["volumes"] if each["name"] == "nats-tls"]
        sources = {each["secret"]["name"]: each["secret"]["items"] for each in volume["projected"]["sources"]}
        assert [item["key"] for item in sources["broker-tls"]] == ["ca.crt"]
        assert [item["key"] for item in sources["service-tls"]] == ["tls.crt", "tls.key"]
    assert not any(
        volume["name"] == "nats-tls" for pod in pods(rendered("cluster")).values() for volume in pod["volumes"]
    )


@pytest.mark.parametrize("values", VALUES)
def test_two_renderings_are_equal(values: str) -> None:
    """Without the cluster as well: Argo CD would otherwise write new passwords at each render."""
    first, second = template(values), template(values)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_the_printed_secret_has_a_password_for_each_user() -> None:
    """And the token of the gateway; all are random."""
    secret = fresh_secret("broker-users")
    assert {*users(), "route", "tokens"} == set(secret["stringData"])
    assert len(set(secret["stringData"].values())) == len(secret["stringData"])
    assert not set(secret["stringData"].values()) & set(fresh_secret("broker-users")["stringData"].values())


@pytest.mark.parametrize("value", ["nats.passwordsSecret", "gateway.tokensSecret"])
def test_passwords_are_not_generated_without_the_cluster(value: str) -> None:
    """The chart could not read those that it generated before, so it names the value and the command."""
    result = template("simulated", f"{value}=")
    assert result.returncode != 0
    assert f"{value}: rendered without the cluster, the chart would write another password each time" in result.stderr
    assert "python -m gpu_autoscaler_services.permissions --secret NAME" in result.stderr


def test_provider_and_image_are_required() -> None:
    """Without values nothing is installed, and the chart names both; with one of them, the other."""
    values = {"autoscaling.provider": "sim", "image.repository": "registry.example/gpu-autoscaler"}
    for given in (), ("autoscaling.provider",), ("image.repository",):
        sets = [part for name in given for part in ("--set", f"{name}={values[name]}")]
        result = helm("template", "gpu-autoscaler", str(CHART), *sets)
        missing = ", ".join(name for name in values if name not in given)
        assert result.returncode != 0
        assert f"{missing}: required; in the file of `helm upgrade --install ... -f values.yaml` set" in result.stderr


def test_the_sdks_default_service_exists() -> None:
    """`http://gpu-manager:8000` reaches the gateway."""
    found = rendered("cluster")
    service = of_kind(found, "Service")["gpu-manager"]
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (8000, "api")
    labels = of_kind(found, "Deployment")["gpu-autoscaler-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def _ports(rules: list[Json]) -> set[Any]:
    return {port["port"] for rule in rules for port in rule.get("ports", ())}


def test_network_policies_open_what_is_used() -> None:
    """A policy per process: DNS and broker for all, plus what each calls (docs/decisions.md#network-policy)."""
    policies = of_kind(rendered("cluster"), "NetworkPolicy")
    opened = {name.removeprefix("gpu-autoscaler-"): one["spec"] for name, one in policies.items()}
    assert _ports(opened["pod-watcher"]["egress"]) == {53, 4222, 6443}
    for name in ("cost-tracker", "shadow"):
        assert _ports(opened[name]["egress"]) == {53, 4222, 5433}
    assert _ports(opened["dcgm-ingest"]["egress"]) == {53, 4222, 5433, 9400}
    assert _ports(opened["controller"]["egress"]) == {53, 4222, 5433, 6443, 8001, 8080, 9090}
    assert _ports(opened["scheduler"]["egress"]) == {53, 4222, 5433, 6443, 8080}
    hooks = [rule for rule in opened["scheduler"]["egress"] if {"port": 8080} in rule["ports"]]
    assert [rule["to"] for rule in hooks] == [[{"namespaceSelector": {}}]]
    assert _ports(opened["gateway"]["ingress"]) == {"http", "api"}
    assert _ports(opened["to-dcgm"]["ingress"]) == {9400}
    assert _ports(opened["to-prometheus"]["ingress"]) == {9090}
    assert 80 in _ports(opened["to-grafana"]["ingress"])
    assert NAMESPACE in str(opened["to-dcgm"]["ingress"][0]["from"][1]["namespaceSelector"])
    without = of_kind(rendered("cluster", "networkPolicy.prometheus.enabled=false"), "NetworkPolicy")
    assert 9090 not in _ports(without["gpu-autoscaler-controller"]["spec"]["egress"])
    closed = of_kind(rendered("cluster", "networkPolicy.checkpointHooks.enabled=false"), "NetworkPolicy")
    assert 8080 not in _ports(closed["gpu-autoscaler-scheduler"]["spec"]["egress"])


@pytest.mark.parametrize(
    ("values", "sets", "are_allowed"),
    [
        ("cluster", ("jobs.namespace=",), False),
        ("cluster", (f"jobs.namespace={NAMESPACE}",), False),
        ("cluster", ("jobs.namespace=work",), True),
        ("simulated", (), True),
    ],
)
def test_pod_templates_are_accepted_only_outside_of_our_namespace(
    values: str, sets: tuple[str, ...], *, are_allowed: bool
) -> None:
    """Beside our own Secrets a template of a user could read them."""
    (settings,) = (
        settings
        for name, _, settings in processes(rendered(values, *sets))
        if name.endswith("gateway") and "node" not in name
    )
    assert settings.gateway.are_pod_templates_allowed is are_allowed
