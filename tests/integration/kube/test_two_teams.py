"""The page for a platform team, docs/two-teams.md: its commands on a real API server, its values through Helm."""

import asyncio
import os
import re
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.chart.charting import ROOT, of_kind, rendered
from tests.controlplane.fixtures import kube, plane
from tests.controlplane.plane import ControlPlane, needed_programs
from tests.support.cluster import until
from tests.support.front import front
from tests.support.stories import quota

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler_services.api_rights import API_GROUP
from gpu_autoscaler_services.gateway.access import AccessReviews, AccessRules, CheckedNamespaces
from gpu_autoscaler_services.gateway.auth import TokenReviews

__all__ = ["kube", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs" / "two-teams.md").read_text(encoding="utf-8")
SETUP, ACCEPTED, REFUSED = re.findall(r"(?ms)^```sh\n(.*?)^```", PAGE)
(VALUES,) = re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE)


async def shell(text: str, plane: ControlPlane, folder: Path, **variables: str) -> tuple[int, str]:
    """Run commands as a person whose kubectl reaches the cluster; return the exit status and what was printed."""
    own = Path(sys.executable).parent  # gpu-autoscaler itself: no environment needs to be activated for the tests
    path = f"{own}:{needed_programs()}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "KUBECONFIG": str(plane.kubeconfig()), **variables}
    process = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", text, cwd=folder, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()


def policy_of(folder: Path) -> tuple[ScalingPolicy, list[dict[str, Any]]]:
    """Return the policy that the chart makes of the page's values, and all objects."""
    values = folder / "values.yaml"
    values.write_text(VALUES, encoding="utf-8")
    found = rendered("cluster", files=[values])
    (text,) = (each["data"]["policy.toml"] for each in found if "policy.toml" in each.get("data", {}))
    return msgspec.convert(tomllib.loads(text), ScalingPolicy), found


def test_the_values_give_a_valid_policy(tmp_path: Path) -> None:
    """Both projects have their namespace, their nominal quota, and the shared queue."""
    rules, _ = policy_of(tmp_path)
    assert policy_violations(rules) == ()
    assert {project.name: project.namespace for project in rules.tenancy.projects} == {
        "vision": "team-vision", "speech": "team-speech"
    }  # fmt: skip
    assert [quota_.nominal_gpu_count for quota_ in rules.quotas.projects] == [8, 8]
    assert [queue.projects for queue in rules.queues] == [("vision", "speech")]


async def test_the_commands_do_what_the_page_says(plane: ControlPlane, kube: KubeClient, tmp_path: Path) -> None:
    """Team vision submits its job; a job of the other team and one over the quota are refused, each with its type."""
    rules, found = policy_of(tmp_path)
    plane.kubectl("apply", "--filename", "-", text=yaml.safe_dump_all(of_kind(found, "ClusterRole").values()))
    status, printed = await shell(SETUP, plane, tmp_path)
    assert status == 0, printed
    await until(partial(_may_submit, kube))  # the server hears of new roles a moment later
    namespaces = yaml.safe_load(VALUES)["gateway"]["projectNamespaces"]
    access = AccessRules(
        authorizer=AccessReviews(kube), namespaces=CheckedNamespaces(namespace="gpu-system", by_project=namespaces)
    )
    async with front(tmp_path, authenticators=[TokenReviews(kube)], rules=access, policy=rules) as gate:
        await gate.tell(quota("gpus", {"requests.nvidia.com/gpu": 12}, namespace="team-vision"))
        status, printed = await shell(ACCEPTED, plane, tmp_path, GPU_AUTOSCALER_GATEWAY=gate.url)
        assert status == 0, printed
        assert "small" in printed
        token = ACCEPTED.splitlines()[0]
        expected = ("right-missing", "quota-exceeded")
        for command, kind in zip(REFUSED.splitlines(), expected, strict=True):
            text = f"{token}\n{command} --output json"
            status, printed = await shell(text, plane, tmp_path, GPU_AUTOSCALER_GATEWAY=gate.url)
            assert status != 0
            assert ("speech" if kind == "right-missing" else "quota") in printed, printed
        refused = [
            row.document for row in (await gate.model.store.audit()).rows if row.document["outcome"] == "refused"
        ]
        assert sorted(entry["status"] for entry in refused) == [403, 422]
        (queued,) = [row.spec for row in await gate.model.store.unfinished_jobs()]
        assert (queued.project_id, queued.namespace, queued.tenant) == ("vision", "team-vision", "vision")
        assert queued.submitted_by == "system:serviceaccount:team-vision:pipeline"


async def _may_submit(kube: KubeClient) -> bool:
    attributes = {"group": API_GROUP, "resource": "jobs", "verb": "create", "namespace": "team-vision"}
    spec = {"user": "x", "groups": ["system:serviceaccounts:team-vision"], "resourceAttributes": attributes}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = await kube.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"].get("allowed"))
