"""`up --kubeconfig`: an unusable cluster is reported before anything starts, with the next step."""

import shlex
from pathlib import Path

import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.cluster import until

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.local.cluster_access import check_access
from gpu_autoscaler_services.registry import specs

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

ALL = [right for spec in specs() for right in spec.rights]


def user(plane: ControlPlane, name: str, days: str = "1") -> Path:
    """A kubeconfig of somebody with a client certificate and no rights."""
    certificate, key = plane.authority.client(name, days=days)
    return plane.kubeconfig(name, {"client-certificate": str(certificate), "client-key": str(key)})


async def test_whoever_has_all_rights_may(plane: ControlPlane) -> None:
    """An administrator; only the cluster's address is printed."""
    assert await check_access(plane.kubeconfig(), ALL, "default") == plane.url


async def test_each_missing_permission_is_reported_with_its_command(plane: ControlPlane) -> None:
    """All at once; running the printed commands is sufficient."""
    path = user(plane, "carol")
    with pytest.raises(ConfigError) as told:
        await check_access(path, ALL, "default")
    mistakes = [line.removeprefix("  - ") for line in str(told.value).splitlines() if line.startswith("  - ")]
    wanted = "carol may not list, watch, get, patch, delete nodes; grant it: kubectl create"
    assert any(one.startswith(wanted) for one in mistakes)
    assert any("pods/eviction" in one for one in mistakes)
    for one in mistakes:
        for command in one.partition("; grant it: ")[2].split(" && "):
            plane.kubectl(*shlex.split(command)[1:])

    async def may_all() -> bool:
        """The server applies new roles after a short delay."""
        try:
            return await check_access(path, ALL, "default") == plane.url
        except ConfigError:
            return False

    await until(may_all)


async def test_expired_credentials_are_reported(plane: ControlPlane) -> None:
    """An expired certificate is no missing right: it is to be renewed."""
    with pytest.raises(TransientError, match=r"401: .* rejects user 'dave' .*renew it"):
        await check_access(user(plane, "dave", days="-1"), ALL, "default")


def test_nothing_is_started_for_a_kubeconfig_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reports it and exits without leaving a folder."""
    folder = tmp_path / "up"
    missing = tmp_path / "nowhere.kubeconfig"
    assert run(["up", "--kubeconfig", str(missing), "--folder", str(folder)]) == Exit.USAGE
    assert str(missing) in capsys.readouterr().err
    assert not folder.exists()
