"""Schemathesis finds no difference between the OpenAPI document and a gateway, in every operation.

All of its checks apply, but for one to jobs: DELETE cancels a job, which stays readable (`schemathesis.toml`).

It generates requests that the document allows and requests that it forbids. `make test` sends a few of them, the sweep
every limit of every field and thousands of random ones, in sequences too.
"""

import asyncio
import os
import sys
from pathlib import Path

import pytest
import structlog
from tests.services.gateway.test_openapi import ALL, cluster_with_logs, gateway_with_objects

from gpu_autoscaler_services.gateway.api import events

HERE = Path(__file__).parent
SECONDS_MAX = 280.0


async def _run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Run Schemathesis against a gateway that has objects; return its report. Fails with it."""
    monkeypatch.setattr(events, "STREAM_SECONDS_MAX", 0.05)  # it reads a stream to its end
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_checks", "PYTHONPATH": str(HERE)}
    (folder / "gateway").mkdir()
    with structlog.testing.capture_logs():
        async with cluster_with_logs() as source, gateway_with_objects(folder / "gateway", logs=source) as gate:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "run"),
                *(f"{gate.url}/openapi.json", "--header", f"Authorization: Bearer {ALL}", "--request-timeout", "20"),
                # Jobs are all that can be read and deleted, and a canceled one stays readable with its history.
                *("--checks", "all", "--exclude-checks", "use_after_free"),
                *("--no-color", "--continue-on-failure", *options),
                cwd=folder,
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                async with asyncio.timeout(SECONDS_MAX):
                    output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
    report = output.decode()
    assert process.returncode == 0, report
    return report


async def test_schemathesis_is_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of the document, and a few random requests."""
    await _run(tmp_path, monkeypatch, "--phases", "examples,fuzzing", "--max-examples", "8", "--seed", "1")


@pytest.mark.sweep
async def test_schemathesis_is_content_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit of each field, and random requests, alone and in sequences."""
    await _run(tmp_path, monkeypatch, "--max-examples", "60", "--max-time", "180")
