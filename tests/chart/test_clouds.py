"""Cloud values of the chart: settings and files of the services that call the cloud."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.chart.charting import CHART, RELEASE, SECRETS, Json, helm, objects, of_kind, rendered, template
from tests.chart.test_rendering import processes

from gpu_autoscaler.providers.aws.advisor import bands_of
from gpu_autoscaler.providers.aws.options import validate_options as validate_aws
from gpu_autoscaler.providers.azure.options import validate_options as validate_azure
from gpu_autoscaler.providers.gcp.options import validate_options as validate_gcp
from gpu_autoscaler.providers.karpenter.options import validate_options as validate_karpenter

STORE = {"store": {"postgresql": {"url": "postgresql://gpu@db.example/gpu"}}}
# What the files in `examples` leave empty: values in the order in which the chart asks for them.
FILLED: dict[str, list[tuple[str, Json]]] = {
    "simulated": [],
    "aws": [
        ("autoscaling.aws.region", {"autoscaling": {"aws": {"region": "eu-west-1"}}}),
        ("autoscaling.aws.launchTemplate", {"autoscaling": {"aws": {"launchTemplate": "g", "subnets": ["subnet-1"]}}}),
        ("store.postgresql.url", STORE),
    ],
    "gcp": [
        ("autoscaling.gcp.projectID", {"autoscaling": {"gcp": {"projectID": "p"}}}),
        ("autoscaling.gcp.instanceGroups", {"autoscaling": {"gcp": {"instanceGroups": {"*": "europe-west4-a/l4"}}}}),
        ("store.postgresql.url", STORE),
    ],
    "azure": [
        ("subscriptionID, resourceGroup and region", {"autoscaling": {"azure": {
            "subscriptionID": "s", "resourceGroup": "g", "region": "westeurope"
        }}}),
        ("autoscaling.azure.vmScaleSets", {"autoscaling": {"azure": {"vmScaleSets": {"default": "gpu-t4"}}}}),
        ("store.postgresql.url", STORE),
    ],
    "karpenter": [
        ("autoscaling.karpenter.nodeClass", {"autoscaling": {"karpenter": {
            "nodeClass": "karpenter.k8s.aws/EC2NodeClass/gpu"
        }}}),
        ("autoscaling.karpenter.offers", {"autoscaling": {"karpenter": {"offers": [
            {"instance_type": "g5.xlarge", "zones": ["a"], "resources": {"cpu": "4"}, "usd_per_hour": {"spot": 0.4}}
        ]}}}),
        ("store.postgresql.url", STORE),
    ],
}  # fmt: skip
VALIDATED: dict[str, Callable[[Any], None]] = {
    "aws": validate_aws,
    "gcp": validate_gcp,
    "azure": validate_azure,
    "karpenter": validate_karpenter,
}


@pytest.mark.parametrize("path", sorted((CHART / "examples").iterdir()), ids=lambda path: path.stem)
def test_an_example_asks_for_what_it_leaves_empty(path: Path, tmp_path: Path) -> None:
    """One value after another, the image first; then it renders, and the driver accepts its settings."""
    provider = "sim" if path.stem == "simulated" else path.stem
    asked = [("image.repository", {"image": {"repository": "registry.example/gpu-autoscaler"}}), *FILLED[path.stem]]
    files = [SECRETS, path]
    for number, (value, filled) in enumerate(asked):
        result = helm("template", RELEASE, str(CHART), *chain(files))
        assert result.returncode != 0
        assert value in result.stderr
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(json.dumps(filled), encoding="utf-8")
    result = helm("template", RELEASE, str(CHART), *chain(files))
    assert result.returncode == 0, result.stderr
    called = [settings for _, _, settings in processes(objects(result.stdout)) if settings.sensing.role != "node"]
    callers = [settings for settings in called if settings.provider.name == provider]
    assert len(callers) >= 2
    for settings in callers:
        if provider in VALIDATED:
            VALIDATED[provider](getattr(settings, provider))


def chain(files: list[Path]) -> Iterator[str]:
    """Yield the arguments that name the files of values."""
    for path in files:
        yield from ("--values", str(path))


def test_gcp_values_become_settings() -> None:
    """One group per pool or several, and a price file."""
    gcp = (
        "projectID=p1",
        "region=europe-west4",
        "instanceGroups.training=europe-west4-a/a100",
        "instanceGroups.batch[0]=europe-west4-a/t4",
        "instanceGroups.batch[1]=europe-west4-b/t4",
        "sharedInstanceGroups[0]=europe-west4-a/a100",
        r"prices.a2-highgpu-1g/*/on-demand=4",
    )
    found = rendered("outside", "autoscaling.provider=gcp", *(f"autoscaling.gcp.{one}" for one in gcp))
    told = {name: settings.gcp for name, _, settings in processes(found) if settings.provider.name == "gcp"}
    assert "gpu-autoscaler-controller" in told
    groups = ("batch=europe-west4-a/t4", "batch=europe-west4-b/t4", "training=europe-west4-a/a100")
    assert {(one.project, one.groups) for one in told.values()} == {("p1", groups)}
    assert {one.shared_groups for one in told.values()} == {("europe-west4-a/a100",)}
    files = of_kind(found, "ConfigMap")["gpu-autoscaler-cloud"]["data"]
    assert json.loads(files["prices.json"]) == {"a2-highgpu-1g/*/on-demand": 4}


def test_aws_spot_values_become_settings(tmp_path: Path) -> None:
    """Price ceilings by type, the advisor file with its date, and placement scores."""
    found = rendered("aws")
    callers = {"gpu-autoscaler-controller", "gpu-autoscaler-spot-watcher"}
    told = {name: settings.aws for name, _, settings in processes(found) if name in callers}
    assert told.keys() == callers
    for one in told.values():
        validate_aws(one)
        assert (one.spot_ceilings, one.placement_score_count) == (("g5.*=0.6", "p5.48xlarge=40"), 8)
        assert one.spot_advisor_path == "/etc/gpu-autoscaler-cloud/spot-advisor.json"
    path = tmp_path / "spot-advisor.json"
    path.write_text(of_kind(found, "ConfigMap")["gpu-autoscaler-cloud"]["data"][path.name], encoding="utf-8")
    bands = bands_of(str(path), "us-west-2")
    assert (bands.ratios, bands.dated_at) == ({"g5.xlarge": 0.15}, datetime(2026, 11, 20, tzinfo=UTC))


def test_azure_values_become_settings() -> None:
    """A uniform scale set of a pool, the flexible one with its machine file, and a price file."""
    azure = (
        "subscriptionID=s1",
        "resourceGroup=gpu",
        "region=westeurope",
        "vmScaleSets.training=a100",
        "flexibleScaleSet=gpu",
        "machine.storageProfile.osDisk.createOption=FromImage",
        "instanceTypes[0]=Standard_NC*_T4_v3",
        r"prices.Standard_NC4as_T4_v3/*/on-demand=4",
        "spotCeilings.Standard_NC4as_T4_v3=1",
    )
    found = rendered("outside", "autoscaling.provider=azure", *(f"autoscaling.azure.{one}" for one in azure))
    told = {name: settings.azure for name, _, settings in processes(found) if settings.provider.name == "azure"}
    assert "gpu-autoscaler-controller" in told
    for one in told.values():
        assert (one.subscription, one.resource_group, one.region) == ("s1", "gpu", "westeurope")
        assert (one.scale_sets, one.scale_set) == (("training=a100",), "gpu")
        assert one.instance_types == ("Standard_NC*_T4_v3",)
        assert one.spot_ceilings == ("Standard_NC4as_T4_v3=1",)
    files = of_kind(found, "ConfigMap")["gpu-autoscaler-cloud"]["data"]
    assert json.loads(files["machine.json"]) == {"storageProfile": {"osDisk": {"createOption": "FromImage"}}}
    assert json.loads(files["prices.json"]) == {"Standard_NC4as_T4_v3/*/on-demand": 4}


def test_only_the_scaler_may_write_node_pool_limits() -> None:
    """Mode limits: permissions by pool name; without pools the chart fails."""
    mode = "autoscaling.karpenter.mode=limits"
    found = rendered("karpenter", mode, "autoscaling.karpenter.nodePools={gpu,spot}")
    of_pools = {
        name: rule["verbs"]
        for name, role in of_kind(found, "ClusterRole").items()
        for rule in role["rules"]
        if "nodepools" in rule["resources"]
    }
    assert of_pools == {"gpu-autoscaler-controller": ["get", "patch"], "gpu-autoscaler-spot-watcher": ["get"]}
    for name, _, settings in processes(found):
        if name == "gpu-autoscaler-controller":
            assert (settings.karpenter.mode, settings.karpenter.node_pools) == ("limits", ("gpu", "spot"))
    told = template("karpenter", mode)
    assert "autoscaling.karpenter.nodePools: required in mode limits" in told.stderr
    assert "nodepools" not in str(rendered("karpenter"))
