"""The Dockerfile and the compose file, read as others read them. What they name is checked in `tests/tidy`."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.containers.programs import CONTAINER_TOOLS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tools() -> Path:
    """The folder of the tools; skips with what is missing where they are not."""
    if not CONTAINER_TOOLS.folder().is_dir():
        why = CONTAINER_TOOLS.missing() or "it is not built yet"
        pytest.skip(f"no BuildKit: {why}; `make chart`")
    return CONTAINER_TOOLS.folder()


def linted(tools: Path, text: str) -> tuple[int, str]:
    """What BuildKit's reader and linter say of a Dockerfile."""
    command = [str(tools / "dockerfile")]
    told = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return told.returncode, told.stdout


def problems(tools: Path, document: Any) -> list[str]:  # noqa: ANN401 - YAML
    """Return the violations of the Compose Specification's schema in a document."""
    schema = json.loads((tools / "compose-spec.json").read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def test_buildkit_reads_the_dockerfile(tools: Path) -> None:
    """Every instruction is known, and its linter has nothing to say."""
    assert linted(tools, (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")) == (0, "")


@pytest.mark.parametrize(
    ("text", "words"), [("FROM a\nRUNS b\n", "unknown instruction"), ("FROM a\nMAINTAINER b\n", "MaintainerDeprecated")]
)
def test_a_dockerfile_that_is_wrong_is_found(tools: Path, text: str, words: str) -> None:
    """The check can fail."""
    code, told = linted(tools, text)
    assert code == 1
    assert words in told


def test_the_compose_file_is_one(tools: Path) -> None:
    """By the schema of the specification; a misspelt key and a wrong type are found by it."""
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert problems(tools, document) == []
    wrong = copy.deepcopy(document)
    wrong["services"]["nats"]["restrat"] = "always"
    wrong["services"]["scaler"]["read_only"] = 7
    found = " ".join(problems(tools, wrong))
    assert "'restrat' was unexpected" in found
    assert "7 is not of type 'boolean'" in found
