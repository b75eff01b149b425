"""Run Helm in tests: values in, objects out."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.programs import CHART_TOOLS

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "charts" / "gpu-autoscaler"
VALUES = {path.stem: path for path in sorted((Path(__file__).parent / "values").glob("*.yaml"))}
SECRETS = Path(__file__).parent / "secrets.yaml"  # names that the chart requires without a cluster
RELEASE, NAMESPACE = "gpu-autoscaler", "gpu-autoscaler-system"


def tool(name: str) -> Path:
    """Return a program or file of the chart's tools; skips the test if it is missing."""
    if not CHART_TOOLS.folder().is_dir():
        pytest.skip(f"no Helm: {CHART_TOOLS.missing() or 'it is not built yet'}; `make chart`")
    return CHART_TOOLS.folder() / name


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart: `helm("template", RELEASE, str(CHART))`. The user's Helm configuration is not read."""
    environment = {"HOME": "/nonexistent", "PATH": "/nonexistent"}
    return subprocess.run(
        [str(tool("helm")), *arguments], capture_output=True, text=True, timeout=240, check=False, env=environment
    )


def template(values: str | None = None, *sets: str, files: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Render the chart with a file of `tests/chart/values`, the simulation by default, with further files, and with
    single values, as `a.b=c`."""
    chosen = [part for path in (SECRETS, VALUES[values or "simulated"], *files) for part in ("--values", str(path))]
    further = [part for one in sets for part in ("--set", one)]
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--include-crds", *chosen, *further)


def rendered(values: str | None = None, *sets: str, files: Sequence[Path] = ()) -> list[Json]:
    """Return the objects of the chart; it must render."""
    told = template(values, *sets, files=files)
    assert told.returncode == 0, told.stderr
    return objects(told.stdout)


def objects(text: str) -> list[Json]:
    """Return the objects of a multi-document text."""
    documents = yaml.load_all(text, Loader=yaml.CSafeLoader)  # in C: a rendered chart has thousands of lines
    return [document for document in documents if document]


def of_kind(found: Sequence[Json], *kinds: str) -> dict[str, Json]:
    """Return the objects of these kinds by name."""
    return {one["metadata"]["name"]: one for one in found if one["kind"] in kinds}


def pods(found: Sequence[Json]) -> dict[str, Json]:
    """Return the pod specs of all workloads by name."""
    workloads = of_kind(found, "Deployment", "DaemonSet", "StatefulSet")
    return {name: one["spec"]["template"]["spec"] for name, one in workloads.items()}
