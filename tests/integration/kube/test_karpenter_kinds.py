"""What the converter of Karpenter's old kinds prints is accepted by a real API server, by the published definitions."""

from pathlib import Path

import pytest
import yaml
from tests.controlplane.definitions import needed_definition
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.old_karpenter import PROVISIONERS

from gpu_autoscaler_services.cli.main import run

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

ESTABLISHED_SECONDS_MAX = 60.0


def test_what_is_printed_is_accepted(plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Schema and rules of both kinds hold: applied as printed, and read back with every field that was printed."""
    for name in ("nodepools.karpenter.sh", "ec2nodeclasses.karpenter.k8s.aws"):
        plane.kubectl("apply", "--server-side", "-f", str(needed_definition(name)))
    plane.kubectl("wait", "--for=condition=Established", f"--timeout={ESTABLISHED_SECONDS_MAX:.0f}s", "crd", "--all")
    path = tmp_path / "old.yaml"
    path.write_text(PROVISIONERS, encoding="utf-8")
    assert run(["convert", "karpenter", str(path), "--role", "gpu-nodes"]) == 0
    said = capsys.readouterr()
    assert "AWSNodeTemplate/gpu: spec.blockDeviceMappings[0].virtualName: no longer supported, dropped" in said.err

    plane.kubectl("apply", "--validate=strict", "-f", "-", text=said.out)

    printed = list(yaml.safe_load_all(said.out))
    assert len(printed) == 4
    for one in printed:
        kept = yaml.safe_load(plane.kubectl("get", one["kind"].lower(), one["metadata"]["name"], "-o", "yaml"))
        assert holds(kept["spec"], one["spec"]), (kept["spec"], one["spec"])


def test_an_invalid_file_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a conversion would be applied by somebody."""
    path = tmp_path / "old.yaml"
    path.write_text(PROVISIONERS, encoding="utf-8")
    assert run(["convert", "karpenter", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "AWSNodeTemplate/gpu: has no instanceProfile; a class needs one or a role: use --role" in said.err


def holds(kept: object, printed: object) -> bool:
    """Whether all that was printed is there; the server adds defaults."""
    if isinstance(printed, dict):
        return isinstance(kept, dict) and all(key in kept and holds(kept[key], value) for key, value in printed.items())
    if isinstance(printed, list):
        return isinstance(kept, list) and len(kept) == len(printed) and all(map(holds, kept, printed))
    return kept == printed
