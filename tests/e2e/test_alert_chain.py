"""The chart's rules in a real Prometheus that scrapes real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.alerts.programs import ALERT_TOOLS
from tests.alerts.test_alerts import RELEASES, groups
from tests.e2e.test_story import has, request
from tests.support.running import Running, running

from gpu_autoscaler.events.job import JobStarted
from gpu_autoscaler_services.local.child import free_port

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(300)]

RELEASE = "blue"
FOR_SECONDS = 5  # instead of the minutes of the rules


def configured(folder: Path, cluster: Running) -> Path:
    """Write the configuration that scrapes every process as a pod of the release."""
    namespace, _ = RELEASES[RELEASE]
    rules = groups(RELEASE)
    for rule in (rule for group in rules for rule in group["rules"]):
        rule["for"] = f"{FOR_SECONDS}s"
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}), encoding="utf-8")
    targets = [
        {
            "targets": [child.ready_url.removeprefix("http://").partition("/")[0]],
            "labels": {"namespace": namespace, "release": RELEASE, "pod": name},
        }
        for name, child in cluster.system.children.items()
        if child.ready_url.endswith("/readyz")
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "gpu-autoscaler", "static_configs": targets}],
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@asynccontextmanager
async def prometheus(folder: Path, cluster: Running) -> AsyncIterator[str]:
    """Run Prometheus on these processes; yield its address."""
    port, log = free_port(), folder / "prometheus.log"
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            str(ALERT_TOOLS.folder() / "prometheus"),
            f"--config.file={configured(folder, cluster)}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", stdout=output, stderr=output,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


async def asked(url: str, path: str, **query: str) -> Any:  # noqa: ANN401 - as Prometheus answers
    """Return the data of an answer; None while Prometheus does not answer."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}{path}", params=query) as answer:
            return (await answer.json())["data"] if answer.status == 200 else None
    except aiohttp.ClientError:
        return None


async def firing(url: str) -> set[tuple[str, str]]:
    """Return name and severity of the alerts that fire."""
    data = await asked(url, "/api/v1/alerts")
    alerts = [] if data is None else data["alerts"]
    return {(one["labels"]["alertname"], one["labels"]["severity"]) for one in alerts if one["state"] == "firing"}


async def until_fires(url: str, name: str, *, is_expected: bool) -> None:
    """Wait until the alert fires, or does no more."""
    async with asyncio.timeout(90):
        while ((name, "critical") in await firing(url)) is not is_expected:
            await asyncio.sleep(0.5)


async def test_an_absent_scaler_raises_its_alert(tmp_path: Path) -> None:
    """While a job runs nothing critical fires; without an active scaler its alert does, although all others are ready.

    The fleet of the stopped scaler is gone from the current values as well.
    """
    if not ALERT_TOOLS.folder().is_dir():
        pytest.skip(f"no Prometheus: {ALERT_TOOLS.missing() or 'it is not built yet'}; `make chart`")
    name = "GpuAutoscalerNoActiveScaler"
    async with running(tmp_path) as cluster, prometheus(tmp_path, cluster) as url:
        await cluster.player.submit(request("job-0"), "nats")
        await cluster.until(lambda record: has(record, JobStarted, job_id="job-0"), "the job runs")
        await until_fires(url, name, is_expected=False)
        await asyncio.sleep(2 * FOR_SECONDS)
        assert {alert for alert, severity in await firing(url) if severity == "critical"} == set()
        nodes = await asked(url, "/api/v1/query", query="gpu_autoscaler_node_count")
        assert [row["metric"]["pod"] for row in nodes["result"]] == ["scaler"]
        paused = cluster.freeze("scaler")
        try:
            await until_fires(url, name, is_expected=True)
            assert (await asked(url, "/api/v1/query", query="gpu_autoscaler_node_count"))["result"] == []
        finally:
            os.kill(paused, signal.SIGCONT)
        await until_fires(url, name, is_expected=False)
