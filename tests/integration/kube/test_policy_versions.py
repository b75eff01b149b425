"""A CRD of another version, or a partial one: reported by name; active policies stay active."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.integration.kube.test_policies import Running, apply, condition, running, told
from tests.support.kube_policies import DEFINITION_FILE, defined, policy

from gpu_autoscaler.kube import watch

__all__ = ["plane", "running", "told"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for what is not installed every second."""
    monkeypatch.setattr(watch, "ABSENT_SECONDS", 1.0)


@pytest.fixture(autouse=True)
def ours_again(plane: ControlPlane) -> Iterator[None]:
    """The other tests find the definition of this release."""
    yield
    plane.kubectl("delete", "crd", "autoscalingpolicies.gpu-autoscaler.io", "--ignore-not-found")
    forgotten(plane)


def forgotten(plane: ControlPlane) -> None:
    """Clients keep for hours which versions are served."""
    shutil.rmtree(plane.folder / ".kube/cache", ignore_errors=True)


def redefine(plane: ControlPlane, change: Callable[[dict[str, Any]], None]) -> None:
    """Put a changed definition in the place of ours."""
    said = plane.kubectl("create", "--dry-run=client", "-o", "json", "-f", str(DEFINITION_FILE))
    definition: dict[str, Any] = json.loads(said)
    change(definition["spec"])
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=json.dumps(definition))
    plane.kubectl("wait", "--for=condition=Established", "crd/autoscalingpolicies.gpu-autoscaler.io", "--timeout=60s")
    forgotten(plane)


def newer_beside(spec: dict[str, Any]) -> None:
    """A release that serves its own version beside ours, and stores that."""
    (ours,) = spec["versions"]
    spec["versions"] = [{**ours, "name": "v1beta1"}, {**ours, "storage": False}]


def ours_not_served(spec: dict[str, Any]) -> None:
    """The release after it: our version is no longer served."""
    newer_beside(spec)
    spec["versions"][1]["served"] = False


def without_status(spec: dict[str, Any]) -> None:
    """Written by hand, or by a release before statuses."""
    del spec["versions"][0]["subresources"]


def without_rules(spec: dict[str, Any]) -> None:
    """A release that asked nothing of a policy."""
    spec["versions"][0]["schema"]["openAPIV3Schema"] = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {"status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }


async def begun(plane: ControlPlane, running: Running) -> None:
    """Wait until a policy is active and its status shows it."""
    vision = policy("vision", maxNodes=3, nodePools=[{"name": "a"}])
    await running.until(lambda: not _fails(lambda: apply(plane, vision)))
    await running.until(lambda: not _fails(lambda: condition(plane, "vision")))
    await running.until(lambda: condition(plane, "vision").get("status") == "True")
    assert running.pools() == ["of-the-file", "a"]


async def test_a_newer_version_beside_ours_changes_nothing(plane: ControlPlane, running: Running) -> None:
    """What is written in the newer one is read in ours, changed and answered as before."""
    await begun(plane, running)
    await asyncio.to_thread(redefine, plane, newer_beside)
    newer = policy("speech", nodePools=[{"name": "b"}]) | {"apiVersion": "gpu-autoscaler.io/v1beta1"}
    await running.until(lambda: not _fails(lambda: apply(plane, newer)))
    await running.until(lambda: condition(plane, "speech").get("status") == "True")
    assert sorted(running.pools()) == ["a", "b", "of-the-file"]  # of one second, as fast machines make them, by name


async def test_a_release_that_serves_ours_no_more_is_named(
    plane: ControlPlane, running: Running, told: list[str]
) -> None:
    """The last good policies stay in force, and when ours is served again they are read again."""
    await begun(plane, running)
    await asyncio.to_thread(redefine, plane, ours_not_served)
    await running.until(lambda: any("serves v1beta1, not v1alpha1" in words for words in told))
    assert told[-1].endswith("install the definition of this release; 1 active")
    assert running.pools() == ["of-the-file", "a"]

    await asyncio.to_thread(redefine, plane, newer_beside)
    await running.until(lambda: told[-1].startswith("1 policies"))
    larger = policy("vision", maxNodes=5, nodePools=[{"name": "a"}])
    await running.until(lambda: not _fails(lambda: apply(plane, larger)))
    await running.until(lambda: running.active_policy.pools[1].nodes_count_max == 5)


async def test_a_definition_without_status_is_named(plane: ControlPlane, running: Running, told: list[str]) -> None:
    """The policy is active all the same; the missing status is reported elsewhere."""
    await asyncio.to_thread(redefine, plane, without_status)
    vision = policy("vision", maxNodes=3, nodePools=[{"name": "a"}])
    await running.until(lambda: not _fails(lambda: apply(plane, vision)))
    await running.until(lambda: running.pools() == ["of-the-file", "a"])
    await running.until(lambda: any("has no status" in words for words in told))
    await asyncio.to_thread(defined, plane)
    await running.until(lambda: condition(plane, "vision").get("status") == "True", seconds=60)


async def test_a_definition_without_rules_lets_nonsense_in_that_is_refused(
    plane: ControlPlane, running: Running
) -> None:
    """What a stricter server would have refused is refused by its condition; the good generation stays."""
    await begun(plane, running)
    await asyncio.to_thread(redefine, plane, without_rules)
    nonsense = policy("vision", maxNodes="many", nodePools=[{"name": "a"}])
    await running.until(lambda: not _fails(lambda: apply(plane, nonsense)))  # the stricter rules go a moment later
    await running.until(lambda: condition(plane, "vision").get("status") == "False")
    assert "install the CustomResourceDefinition of this version" in condition(plane, "vision")["message"]
    assert running.active_policy.pools[1].nodes_count_max == 3


def _fails(act: Callable[[], object]) -> bool:
    """True where the server does not take it yet: a new version is served a moment later."""
    try:
        act()
    except AssertionError:
        return True
    return False
