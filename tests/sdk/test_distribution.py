"""The distribution: built from its folder, it runs without this project, and its types are those of the gateway."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import aiohttp
import pytest

from gpu_autoscaler_services.gateway import openapi
from gpu_autoscaler_services.sdk_models import filters, models

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / "libs" / "gpu_manager_sdk"
OWN = {"gpu_autoscaler", "gpu_autoscaler_services"}
SITE = Path(aiohttp.__file__).parents[1]  # without its .pth files, which only Python's own start reads
ALONE = """
import importlib.util, json, sys
sys.path[:0] = json.loads(sys.argv[1])
assert importlib.util.find_spec("gpu_autoscaler") is None
import gpu_manager_sdk
assert gpu_manager_sdk.__file__.startswith(sys.argv[2]), gpu_manager_sdk.__file__
client = gpu_manager_sdk.GPUJobClient()
blocking = sorted(sys.modules)
gpu_manager_sdk.AsyncGPUJobClient()
print(json.dumps({"url": client.api_url, "has_aiohttp": "aiohttp" in blocking, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, built without network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(FOLDER)], check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_types_are_written_from_the_openapi_document() -> None:
    """`make schemas` has written them; nobody has edited them since."""
    assert (FOLDER / "models.py").read_text(encoding="utf-8") == models(openapi.document())
    assert (FOLDER / "filters.py").read_text(encoding="utf-8") == filters(openapi.document())


def test_the_release_is_that_of_the_project() -> None:
    """One number, and what it needs is msgspec and aiohttp."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == importlib.metadata.version("gpu-autoscaler")
    assert [requirement.partition(">")[0] for requirement in project["dependencies"]] == ["aiohttp", "msgspec"]


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module, and the mark that it is typed."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert names == {f"gpu_manager_sdk/{path.name}" for path in FOLDER.iterdir() if path.suffix in {".py", ".typed"}}
    assert "Name: gpu-manager-sdk" in metadata
    assert "GPUJobClient" in metadata  # the page of the registry


def test_the_wheel_runs_alone(wheel: Path, tmp_path: Path) -> None:
    """Where gpu-autoscaler is not installed; the blocking client does not even import aiohttp."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", ALONE, json.dumps([str(tmp_path), str(SITE)]), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)

    told = json.loads(done.stdout)
    assert told["url"] == "http://gpu-manager:8000"
    assert told["has_aiohttp"] is False
    assert not OWN.intersection(told["modules"])
