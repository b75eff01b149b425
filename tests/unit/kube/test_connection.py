"""How a cluster is found, and what becomes of a token that cannot be read."""

from datetime import timedelta
from pathlib import Path

import certifi
import pytest
from kubernetes_asyncio.config import incluster_config

from gpu_autoscaler.kube.connection import from_environment
from gpu_autoscaler.model.errors import ConfigError, TransientError


async def test_a_token_is_read_again_and_one_that_is_away_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Service accounts' tokens are exchanged under way: a call is tried again later, not set aside as a bug of ours."""
    token = tmp_path / "token"
    token.write_text("first", encoding="utf-8")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", certifi.where())
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", timedelta(0))
    connection = await from_environment()

    assert await connection.authorize() == "Bearer first"
    token.write_text("second", encoding="utf-8")
    assert await connection.authorize() == "Bearer second"
    token.unlink()
    with pytest.raises(TransientError, match="cannot be renewed"):
        await connection.authorize()


async def test_no_cluster_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was looked at is named, and the two settings that help."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigError, match=r"nowhere\.yaml names no usable cluster.*kube\.url or kube\.kubeconfig_path"):
        await from_environment(str(tmp_path / "nowhere.yaml"))
