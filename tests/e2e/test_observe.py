"""`observe` beside another autoscaler on a real control plane: it reads, tells, compares, and writes nothing."""

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest
from tests.controlplane.joining import joined
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.e2e.test_kubernetes import OFFERS, POLICY, placed
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import job
from tests.support.running import started

from gpu_autoscaler.tools.recording import load
from gpu_autoscaler_services.local.system import Elsewhere

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(400)]

AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""
LOOKER = "looker"
BOOT_SECONDS = 12.0  # time enough to be seen waiting
RULE = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]}


def looker(plane: ControlPlane) -> Path:
    """The kubeconfig of somebody who may read everything and write nothing."""
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


async def test_a_looker_on_tells_and_compares_and_writes_nothing(tmp_path: Path) -> None:
    """What ours would buy is said while theirs buys; both fleets are compared; the audit shows no write of ours."""
    audit, policy, offers = tmp_path / "audit.log", tmp_path / "policy.toml", tmp_path / "offers.json"
    (tmp_path / "audit.yaml").write_text(AUDIT)
    policy.write_text(POLICY)
    offers.write_text(json.dumps([one | {"boot_seconds": BOOT_SECONDS} for one in OFFERS]))
    settings = [f"--audit-log-path={audit}", f"--audit-policy-file={tmp_path / 'audit.yaml'}"]
    with running_plane(tmp_path / "plane", EVERYTHING, api_settings=settings) as plane:
        theirs = Elsewhere(kubeconfig=plane.kubeconfig())
        async with (
            aiohttp.ClientSession() as session,
            started(tmp_path / "theirs", clock_factor=1.0, policy=policy, offers=offers, elsewhere=theirs) as system,
            joined(system.simcluster_url, kube := KubeHttp(session, plane.url, plane.admin_token, plane.tls)),
        ):
            ours = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpu_autoscaler_services.cli.main", "observe", "--output", "json"),
                *("--kubeconfig", str(looker(plane)), "--policy", str(policy), "--offers", str(offers)),
                *("--folder", str(tmp_path / "ours"), "--gateway-port", "0"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert ours.stderr is not None
            said = await until_said(ours.stderr, "dashboard and API")
            await kube.made("/apis/batch/v1/namespaces/default/jobs", work())
            said += await until_said(ours.stderr, "we would: Buy g4dn.12xlarge")
            await kube.until("/api/v1/namespaces/default/pods", lambda answer: len(placed(answer)) == 2, 120.0)
            await kube.send("DELETE", "/apis/batch/v1/namespaces/default/jobs/train?propagationPolicy=Background")
            await kube.until("/api/v1/nodes", lambda answer: not answer["items"], 120.0)
            ours.terminate()
            out, err = await asyncio.wait_for(ours.communicate(), 120.0)
            assert ours.returncode == 0, err.decode()
    found = json.loads(out)
    assert found["theirs"]["jobs_count"] == found["ours"]["jobs_count"] == 2
    assert found["theirs"]["cost_micro_usd"] > 0
    assert found["ours"]["cost_micro_usd"] > 0
    assert found["theirs"]["started_count"] == found["ours"]["started_count"] == 2
    assert any("boot times of ours" in sentence for sentence in found["assumed"])
    asked = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {one["verb"] for one in asked if one["user"]["username"] == LOOKER} == {"get", "list", "watch"}
    assert load(tmp_path / "ours" / "history.xz").facts


def work() -> dict[str, object]:
    """A user's own Job: two pods, four GPUs each."""
    pods = {
        "nodeSelector": {"gpu-autoscaler.io/gpu-model": "T4"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }
    return job("train", gpus=4, completions=2, parallelism=2, template=pods)


async def until_said(lines: asyncio.StreamReader, words: str) -> str:
    """Read what it says to people until these words; raises TimeoutError."""
    said = ""
    try:
        async with asyncio.timeout(180):
            while words not in said:
                line = await lines.readline()
                assert line, f"it ended: {said}"
                said += line.decode()
    except TimeoutError:
        raise AssertionError(f"{words!r} was not said: {said}") from None
    return said
