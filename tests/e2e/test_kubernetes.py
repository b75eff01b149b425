"""The demo's scenario on a real control plane: API server, scheduler, controllers, KWOK nodes, our processes."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.controlplane.joining import joined
from tests.controlplane.plane import EVERYTHING, ControlPlane, running_plane
from tests.support.cluster import until
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import job
from tests.support.running import Running, followed, started

from gpu_autoscaler.events.job import JobFinished, JobRequested, JobStarted
from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeDrained, ScalingNodeTerminated
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler_services.local.system import ExternalSystems

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

# A real API server runs in wall time, so this scenario is short.
OFFERS = [
    {
        "name": "g4dn.2xlarge",
        "vcpu_count": 8,
        "memory_gib": 32,
        "gpu_count": 1,
        "gpu_model": "T4",
        "gpu_memory_gib": 16,
    },
    {
        "name": "g4dn.12xlarge",
        "vcpu_count": 48,
        "memory_gib": 192,
        "gpu_count": 4,
        "gpu_model": "T4",
        "gpu_memory_gib": 16,
    },
]
BOOT_SECONDS = 4.0
POLICY = """
idle_seconds_max = 5.0
scale_down_cooldown_seconds = 2.0
nodes_count_max = 20
disruption_ratio_max = 1.0
"""
NOTICE_SECONDS = 40.0
QUIET_SECONDS_MAX = 90.0
PATH = "/api/v1/namespaces/default/pods"


@asynccontextmanager
async def real_cluster(
    folder: Path,
    plane: ControlPlane,
    kubeconfigs: Path | Mapping[str, Path] | None = None,
    *,
    policy_text: str = POLICY,
) -> AsyncIterator[tuple[Running, KubeHttp]]:
    """Our processes on this control plane, as its administrator or each with a kubeconfig of its own, and the simulated
    cloud whose machines join it."""
    policy, offers = folder / "policy.toml", folder / "offers.json"
    policy.write_text(policy_text)
    offers.write_text(json.dumps([one | {"boot_seconds": BOOT_SECONDS} for one in OFFERS]))
    async with aiohttp.ClientSession() as session:
        kube = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        async with (
            started(
                folder,
                clock_factor=1.0,
                policy=policy,
                offers=offers,
                external=ExternalSystems(kubeconfig=kubeconfigs or plane.kubeconfig()),
            ) as system,
            joined(system.simcluster_url, kube),
            followed(system, policy=policy) as running,
        ):
            yield running, kube


def placed(answer: Json) -> dict[str, str]:
    """Return running pods -> their nodes."""
    return {
        item["metadata"]["name"]: item["spec"]["nodeName"]
        for item in answer.get("items", ())
        if item["status"].get("phase") == "Running" and "deletionTimestamp" not in item["metadata"]
    }


def says_unschedulable(answer: Json) -> bool:
    """Return whether each pod is pending with a reason of the scheduler."""
    conditions = [item["status"].get("conditions") or [{}] for item in answer.get("items", ())]
    return bool(conditions) and all(one[0].get("reason") == "Unschedulable" for one in conditions)


@pytest.mark.sweep
async def test_the_scenario_on_a_real_control_plane(tmp_path: Path) -> None:
    """Pending pods get nodes; a notice moves them before the deadline; idle nodes are removed."""
    with running_plane(tmp_path / "plane", EVERYTHING) as plane:
        async with real_cluster(tmp_path, plane) as (cluster, kube):
            await play(cluster, kube)


async def play(cluster: Running, kube: KubeHttp) -> None:
    """One job of our queue, one created by a user, a notice, and the end of both."""
    # A user's Job, visible to us only through its unschedulable pods.
    chosen = {"nodeSelector": {"gpu-autoscaler.io/gpu-model": "T4"}}
    tolerations = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    body = job("train", gpus=4, completions=2, parallelism=2, template=chosen | tolerations)
    await kube.made("/apis/batch/v1/namespaces/default/jobs", body)
    of_user = f"{PATH}?labelSelector=batch.kubernetes.io%2Fjob-name%3Dtrain"
    await kube.until(of_user, says_unschedulable)
    # A job of our queue.
    await cluster.player.submit(
        JobRequested(
            job_id=JobId("queued"),
            job_name="queued",
            project_id="e2e",
            gpu_requirements=GpuRequirements(gpu_type="T4", gpu_count=1),
            container=ContainerRequest(image="registry.example/e2e:1"),
            resources=ResourceRequest(cpu="2", memory="8Gi", ephemeral_storage="1Gi"),
            run_seconds=20.0,
        ),
        "rest",
    )
    about_pods = "/api/v1/namespaces/default/events?fieldSelector=involvedObject.kind%3DPod,reason%3DScaleUpTriggered"
    said = await kube.until(about_pods, lambda answer: answer.get("items"), 60.0)
    assert "which was bought for it, is expected" in said["items"][0]["message"]
    before = placed(await kube.until(of_user, lambda answer: len(placed(answer)) == 2, 60.0))
    await cluster.until(lambda record: record.count(JobStarted) == 1, "the job of the queue runs")

    # The cloud reclaims a machine: its pods are moved before the deadline.
    notice = await until(lambda: cluster.world.send_notice(NOTICE_SECONDS), 60.0)
    await cluster.until(lambda record: record.count(SpotNoticeReceived) >= 1, "the notice")
    await cluster.until(lambda record: record.count(ScalingNodeDrained) >= 1, "the node is drained")
    node = await kube.send("GET", f"/api/v1/nodes/{notice}")
    assert node.status == 404 or node.body["spec"]["unschedulable"]
    after = placed(await kube.until(of_user, lambda answer: len(placed(answer)) == 2, 60.0))
    assert notice not in after.values()
    assert (after != before) == (notice in before.values())
    await cluster.until(lambda record: record.count(JobFinished) == 1, "the job of the queue ends", 90.0)

    # The user's work ends; no node is needed.
    await kube.send("DELETE", "/apis/batch/v1/namespaces/default/jobs/train", {"propagationPolicy": "Background"})
    report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
    assert report.broken_promises == ()
    assert (report.jobs_completed, report.notices_answered) == (1, 1)
    assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd > 0
    assert cluster.record.count(ScalingDrainStarted) >= report.nodes_bought
    assert cluster.record.count(ScalingNodeTerminated) >= report.nodes_bought
    await kube.until("/api/v1/nodes", lambda answer: answer.get("items") == [])
    about_nodes = await kube.read("/api/v1/namespaces/default/events?fieldSelector=involvedObject.kind%3DNode")
    assert {"NodeRegistered", "SpotInterruption"} <= {event["reason"] for event in about_nodes["items"]}
