"""The policy file is followed while a service runs; an invalid one changes nothing and is reported."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime import policy_reload as module
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.policy_reload import PolicyFile, differences, following_policy_file


def test_a_changed_file_is_reloaded_and_an_invalid_one_refused(tmp_path: Path) -> None:
    """The last valid policy stays active, and all errors are listed, until the file is corrected."""
    path = tmp_path / "policy.toml"
    path.write_text("nodes_count_max = 5\n")
    file = PolicyFile(path)
    assert file.now.nodes_count_max == 5
    assert not file.reload()
    path.write_text("nodes_count_max = 7\nidle_seconds_max = 300\n")
    assert file.reload()
    assert (file.now.nodes_count_max, file.now.idle_seconds_max) == (7, 300)

    path.write_text("nodes_count_max = 2\nnodes_count_min = 3\nnodes = 1\n")
    assert not file.reload()
    assert file.now.nodes_count_max == 7
    assert any("nodes" in error for error in file.errors)
    path.unlink()
    assert not file.reload()
    assert "cannot be read" in file.errors[0]
    path.write_text("nodes_count_max = 7\nidle_seconds_max = 300.0\n")
    assert not file.reload()  # equal to the active policy
    assert file.errors == ()


def test_an_initially_invalid_file_prevents_the_start(tmp_path: Path) -> None:
    """There is no valid policy to fall back to. Without a file nothing is reloaded."""
    with pytest.raises(ConfigError):
        PolicyFile(tmp_path / "none.toml")
    assert PolicyFile(None).now == DEFAULT_POLICY
    assert not PolicyFile(None).reload()


async def test_the_service_gets_each_policy_and_readyz_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid file does not make the process unready: the last valid policy stays active, with the error shown."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    path, registry = tmp_path / "policy.toml", CollectorRegistry()
    path.write_text("nodes_count_max = 5\n")
    used: list[ScalingPolicy] = []
    readiness, metrics = Readiness(), Metrics("scaler", registry)

    async def until(text: str) -> None:
        async with asyncio.timeout(60):
            while text not in readiness.details["policy"]:
                await asyncio.sleep(0.01)

    async with following_policy_file(PolicyFile(path), used.append, readiness, metrics):
        path.write_text("nodes_count_max = 50\n")
        async with asyncio.timeout(60):
            while not used:
                await asyncio.sleep(0.01)
        path.write_text("nodes_count_max = 'many'\n")
        await until("refused")
        assert readiness.is_ready
        assert "nodes_count_max" in readiness.details["policy"]
        assert registry.get_sample_value("gpu_autoscaler_policy_file_errors") == 1
        path.write_text("nodes_count_max = 50\n# corrected\n")
        await until(f"of {path}")
    assert [policy.nodes_count_max for policy in used] == [50]
    assert registry.get_sample_value("gpu_autoscaler_policy_file_errors") == 0
    assert registry.get_sample_value("gpu_autoscaler_policy_changes_total") == 1


def test_differences_list_each_changed_value() -> None:
    """With its path, in tables and lists too."""
    after = ScalingPolicy(nodes_count_max=50, pools=(*DEFAULT_POLICY.pools, *DEFAULT_POLICY.pools))
    lines = differences(DEFAULT_POLICY, after)
    assert lines[0] == "nodes_count_max: 100 -> 50"
    assert "pools[1].name: not set -> default" in lines
    assert differences(after, after) == ()
