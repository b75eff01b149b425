"""`observe` beside another autoscaler on a real control plane: it reads, reports, compares, and writes nothing."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.bench.peers.real import running as karpenter
from tests.bench.peers.side_by_side import missing
from tests.controlplane.joining import joined
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.e2e.test_kubernetes import OFFERS, POLICY, placed
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import job
from tests.support.running import started

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.replay.recording import load
from gpu_autoscaler.simcluster.offers import load_catalog, offers_of
from gpu_autoscaler_services.local.system import ExternalSystems

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(400)]

AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""
LOOKER = "looker"
BOOT_SECONDS = 12.0  # long enough to observe the wait
IDLE_SECONDS = 20.0
CLAIMS, TYPE = "/apis/karpenter.sh/v1/nodeclaims", "node.kubernetes.io/instance-type"
RULE = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]}


def looker(plane: ControlPlane) -> Path:
    """A kubeconfig with read access only."""
    certificate, key = plane.authority.client(LOOKER)
    names = {"metadata": {"name": LOOKER}}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "rules": [RULE], **names}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": LOOKER},
        "subjects": [{"kind": "User", "name": LOOKER}],
        **names,
    }
    for made in (role, binding):
        plane.kubectl("apply", "-f", "-", text=json.dumps(made))
    return plane.kubeconfig(LOOKER, {"client-certificate": str(certificate), "client-key": str(key)})


class Looking:
    """`observe` beside another autoscaler, with an audit log."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        self.policy, self.offers = folder / "policy.toml", folder / "offers.json"
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        """Start it and wait until it observes."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu_autoscaler_services.cli.main", "observe", "--output", "json"),
            *("--kubeconfig", str(looker(self.plane)), "--policy", str(self.policy), "--offers", str(self.offers)),
            *("--folder", str(self.folder / "ours"), "--gateway-port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await self.says("dashboard and API")

    async def says(self, words: str) -> None:
        """Wait until it has printed this text on stderr."""
        assert self._process is not None
        assert self._process.stderr is not None
        await until_said(self._process.stderr, words)

    async def end(self) -> tuple[dict[str, Any], str]:
        """Return its report and last messages. Asserts by the audit log that it wrote nothing."""
        assert self._process is not None
        self._process.terminate()
        out, err = await asyncio.wait_for(self._process.communicate(), 120.0)
        assert self._process.returncode == 0, err.decode()
        asked = [json.loads(line) for line in (self.folder / "audit.log").read_text().splitlines()]
        assert {one["verb"] for one in asked if one["user"]["username"] == LOOKER} == {"get", "list", "watch"}
        assert load(self.folder / "ours" / "history.xz").facts
        return json.loads(out), err.decode()


@contextmanager
def beside(folder: Path) -> Iterator[Looking]:
    """A control plane with an audit log, and the options of `observe`."""
    (folder / "audit.yaml").write_text(AUDIT)
    settings = [f"--audit-log-path={folder / 'audit.log'}", f"--audit-policy-file={folder / 'audit.yaml'}"]
    with running_plane(folder / "plane", EVERYTHING, api_settings=settings) as plane:
        looking = Looking(plane, folder)
        looking.policy.write_text(POLICY)
        looking.offers.write_text(json.dumps([one | {"boot_seconds": BOOT_SECONDS} for one in OFFERS]))
        yield looking


async def test_observe_reports_and_compares_and_writes_nothing(tmp_path: Path) -> None:
    """Our purchase is printed while theirs happens; both fleets are compared; the audit log has no write."""
    with beside(tmp_path) as ours:
        plane, theirs = ours.plane, ExternalSystems(kubeconfig=ours.plane.kubeconfig())
        async with (
            aiohttp.ClientSession() as session,
            started(
                tmp_path / "theirs", clock_factor=1.0, policy=ours.policy, offers=ours.offers, external=theirs
            ) as system,
            joined(system.simcluster_url, kube := KubeHttp(session, plane.url, plane.admin_token, plane.tls)),
        ):
            await ours.begin()
            await kube.made("/apis/batch/v1/namespaces/default/jobs", work())
            await ours.says("would: Buy g4dn.12xlarge")
            await kube.until("/api/v1/namespaces/default/pods", lambda answer: len(placed(answer)) == 2, 120.0)
            await kube.send("DELETE", "/apis/batch/v1/namespaces/default/jobs/train?propagationPolicy=Background")
            await kube.until("/api/v1/nodes", lambda answer: not answer["items"], 120.0)
            found, _ = await ours.end()
    assert found["theirs"]["jobs_count"] == found["ours"]["jobs_count"] == 2
    assert found["theirs"]["cost_micro_usd"] > 0
    assert found["ours"]["cost_micro_usd"] > 0
    assert found["theirs"]["started_count"] == found["ours"]["started_count"] == 2
    assert any("our boot times" in sentence for sentence in found["assumptions"])


async def test_observe_beside_real_karpenter(tmp_path: Path) -> None:
    """Karpenter launches nodes and keeps them; ours would have bought spot nodes and removed them."""
    if reason := missing():
        pytest.skip(reason)
    with beside(tmp_path) as ours:
        plane = ours.plane
        sold = [one for one in offers_of(load_catalog(ours.offers)) if one.capacity_type is CapacityType.ON_DEMAND]
        with karpenter(plane, sold, {}, boot_seconds=int(BOOT_SECONDS)):
            await ours.begin()
            async with aiohttp.ClientSession() as session:
                kube = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
                await kube.made(
                    "/apis/batch/v1/namespaces/default/jobs",
                    job("train", gpus=4, completions=2, parallelism=2, run_seconds=15.0),
                )
                await ours.says("would: Buy g4dn.12xlarge")
                await kube.until(CLAIMS, lambda answer: bought(answer) == ["g4dn.12xlarge"] * 2, 60.0)
                path = "/apis/batch/v1/namespaces/default/jobs/train"
                await kube.until(path, lambda answer: answer["status"].get("succeeded") == 2, 120.0)
                await asyncio.sleep(IDLE_SECONDS)  # their nodes keep costing
                found, said = await ours.end()
    theirs, mine = found["theirs"], found["ours"]
    assert theirs["jobs_count"] == theirs["finished_count"] == mine["jobs_count"] == mine["finished_count"] == 2
    assert theirs["nodes_count_max"] == mine["nodes_count_max"] == 2
    assert theirs["price_unknown_count"] == 0
    assert 0 < mine["cost_micro_usd"] < theirs["cost_micro_usd"]
    assert "prices: a list of " in said
    assert any("the simulation begins without nodes" in sentence for sentence in found["assumptions"])


def bought(claims: Json) -> list[str | None]:
    """Return the types of Karpenter's claims; None until chosen."""
    return [one["metadata"].get("labels", {}).get(TYPE) for one in claims.get("items", ())]


def work() -> dict[str, object]:
    """A user's own Job: two pods, four GPUs each."""
    pods = {
        "nodeSelector": {"gpu-autoscaler.io/gpu-model": "T4"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }
    return job("train", gpus=4, completions=2, parallelism=2, template=pods)


async def until_said(lines: asyncio.StreamReader, words: str) -> str:
    """Read messages until this text; raises AssertionError after a time-out."""
    said = ""
    try:
        async with asyncio.timeout(180):
            while words not in said:
                line = await lines.readline()
                assert line, f"it ended: {said}"
                said += line.decode()
    except TimeoutError:
        raise AssertionError(f"{words!r} was not printed: {said}") from None
    return said
