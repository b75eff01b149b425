"""`policy check` validates policy files and manifests before they are used."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from tests.support.front import front
from tests.support.kube_policies import policy as kube_policy
from tests.support.sources import autoscaling_policy
from tests.support.stories import offer, on_sale

from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


def test_every_error_is_reported_with_its_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once on stderr, with the exit code of invalid input."""
    path = tmp_path / "policy.toml"
    path.write_text('nodes_count_min = 5\nnodes_count_max = 2\n[[pools]]\nname = "a"\n[[pools]]\nname = "a"\n')
    assert run(("policy", "check", str(path))) == Exit.USAGE
    errors = capsys.readouterr().err
    assert "2 error(s)" in errors
    assert "nothing was started" not in errors  # the command starts nothing
    assert "lower it or raise the other" in errors
    assert "use unique names" in errors


def test_a_valid_policy_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names what was not checked."""
    path = tmp_path / "policy.toml"
    path.write_text("nodes_count_max = 5\n")
    assert run(("policy", "check", str(path))) == Exit.OK
    captured = capsys.readouterr()
    assert "valid (1 pool: default)" in captured.out
    assert "--check-offers" in captured.err


BROKEN = """
apiVersion: gpu-autoscaler.io/v1alpha1
kind: AutoscalingPolicy
metadata: {name: first}
spec:
  minNodes: 5
  maxNodes: 4
  spotInstancePercentage: 0.6
  nodePools: [{name: a, capacityType: spot, spotPercentage: 50}, {name: b, gpuType: A1000}]
---
kind: ConfigMap
metadata: {name: other}
---
apiVersion: gpu-autoscaler.io/v1
kind: AutoscalingPolicy
metadata: {name: second}
spec: {scaleUpTreshold: 0.8, maxNodes: many, nodePools: [{name: c, minSize: -1}]}
---
apiVersion: gpu-autoscaler.io/v1alpha1
kind: AutoscalingPolicy
metadata: {name: third}
spec: {nodePools: [{name: a, labels: {gpu-autoscaler.io/gpu-model: T4}, gpuType: A100}]}
"""


def test_all_errors_of_manifests_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the object, the field and the next step; other kinds are skipped."""
    path = tmp_path / "policies.yaml"
    path.write_text(BROKEN)
    assert run(("policy", "check", str(path))) == Exit.USAGE
    errors = capsys.readouterr().err
    for expected in (
        "AutoscalingPolicy first: minNodes is above maxNodes; lower it",
        "AutoscalingPolicy first: nodePools a: spotPercentage contradicts capacityType; use capacityType mixed",
        "AutoscalingPolicy first: nodePools b: unknown GPU model 'A1000'; known: ",
        "skipped: ConfigMap other",
        "AutoscalingPolicy second: apiVersion: 'gpu-autoscaler.io/v1' is not served; write gpu-autoscaler.io/v1alpha1",
        "AutoscalingPolicy second: spec.scaleUpTreshold: unknown key 'scaleUpTreshold'; did you mean 'scaleUpThr",
        "AutoscalingPolicy second: spec.maxNodes: Expected `int | null`, got `str`; correct the value",
        "AutoscalingPolicy second: spec.nodePools[0].minSize: Expected `int` >= 0; correct the value",
        "AutoscalingPolicy third: nodePools a: pool already defined in policy first; rename it in policy third",
        "AutoscalingPolicy third: nodePools a: labels: gpu-autoscaler.io/gpu-model=T4 contradicts gpuType (A100)",
    ):
        assert expected in errors, expected
    assert "nothing was started" not in errors


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_a_valid_manifest_is_reported(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In YAML, JSON and TOML."""
    path = tmp_path / f"policy{suffix}"
    body = kube_policy("vision", spotInstancePercentage=0.6)
    toml = 'apiVersion = "gpu-autoscaler.io/v1alpha1"\nkind = "AutoscalingPolicy"\nmetadata.name = "vision"\n'
    path.write_text(f'{toml}[[spec.nodePools]]\nname = "vision"\n' if suffix == ".toml" else json.dumps(body))
    assert run(("policy", "check", str(path))) == Exit.OK
    assert "AutoscalingPolicy vision: valid (1 pool: vision)" in capsys.readouterr().out


def test_a_policy_file_may_be_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the keys of the TOML file; services load it as well."""
    path = tmp_path / "policy.yaml"
    path.write_text("idle_seconds: 300\npools: [{name: a, gpu_models: [nvidia-tesla-v100]}]\n")
    assert run(("policy", "check", str(path))) == Exit.OK
    assert "valid (1 pool: a)" in capsys.readouterr().out
    loaded = load_policy(path)
    assert (loaded.idle_seconds, loaded.pools[0].gpu_models) == (300.0, ("V100",))
    path.write_text("idle_secnds: 300\n")
    assert run(("policy", "check", str(path))) == Exit.USAGE
    assert "did you mean 'idle_seconds'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"), [("", "is empty"), ("a: [", "invalid YAML"), ("kind: Pod\n", "no policy and no Autoscal")]
)
def test_a_file_without_a_policy_is_refused(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the next step."""
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    assert run(("policy", "check", str(path))) == Exit.USAGE
    assert expected in capsys.readouterr().err


def test_the_policy_of_the_autoscaling_guide_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unchanged, as its text has it."""
    path = tmp_path / "guide.yaml"
    path.write_text(yaml.safe_dump(autoscaling_policy()))
    assert run(("policy", "check", str(path))) == Exit.OK
    assert "AutoscalingPolicy production-autoscaling: valid (1 pool: spot-pool)" in capsys.readouterr().out


async def test_pools_are_checked_against_offers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway has the current offers."""
    path = tmp_path / "policy.toml"
    path.write_text('[[pools]]\nname = "a"\nzones = ["nowhere"]\n')
    async with front(tmp_path) as gate:
        command = ("policy", "check", str(path), "--check-offers", "--gateway", gate.url)
        assert await asyncio.to_thread(run, command) == Exit.FAILURE
        assert "no recent offers" in capsys.readouterr().err
        await gate.tell(on_sale(offer()))
        assert await asyncio.to_thread(run, command) == Exit.USAGE
        assert "pools[0].zones: 'nowhere' is not offered" in capsys.readouterr().err
        manifest = tmp_path / "manifest.yaml"
        manifest.write_text(json.dumps(kube_policy("v", nodePools=[{"name": "a", "availabilityZones": ["nowhere"]}])))
        command = ("policy", "check", str(manifest), "--check-offers", "--gateway", gate.url)
        assert await asyncio.to_thread(run, command) == Exit.USAGE
        assert "'nowhere' is not offered" in capsys.readouterr().err
