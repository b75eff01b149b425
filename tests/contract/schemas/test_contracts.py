"""The committed contracts match the code, and their official parsers accept them."""

import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import openapi_spec_validator
import pytest
import yaml

from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler_services.contracts import contract_files

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = ROOT / "schemas"
PARSER = Path(__file__).parent / "parser"
VALIDATOR = jsonschema.Draft202012Validator
FACT_TYPES = [fact.type_name() for fact in FACTS]


def read_json(path: Path) -> dict[str, object]:
    """A committed JSON document."""
    document: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_committed_schemas_match_the_code() -> None:
    """`make schemas` leaves no difference, and nothing stale lies about."""
    committed = {
        path.relative_to(SCHEMAS).as_posix(): path.read_text(encoding="utf-8")
        for path in SCHEMAS.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert committed == contract_files(), "run `make schemas`"


@pytest.mark.parametrize("type_name", FACT_TYPES)
def test_every_fact_has_a_schema_and_an_example_that_validates(type_name: str) -> None:
    """JSON Schema 2020-12, with instants checked as instants."""
    schema = read_json(SCHEMAS / "facts" / f"{type_name}.json")
    VALIDATOR.check_schema(schema)
    example = read_json(SCHEMAS / "examples" / f"{type_name}.json")
    VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(example)


@pytest.mark.parametrize("broken", [{"id": 7}, {"type": "job.imagined.v1"}, {"time": "yesterday"}, {"data": {}}])
def test_a_schema_refuses_what_is_wrong(broken: dict[str, object]) -> None:
    """A schema that accepts everything proves nothing."""
    schema = read_json(SCHEMAS / "facts" / "job.requested.v1.json")
    example = read_json(SCHEMAS / "examples" / "job.requested.v1.json") | broken
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(example)


def test_the_policy_schema_is_a_schema() -> None:
    """Editors can complete a policy file by it."""
    VALIDATOR.check_schema(read_json(SCHEMAS / "policy.json"))


def test_the_openapi_document_is_valid() -> None:
    """OpenAPI 3.1, by its validator."""
    document = yaml.safe_load((SCHEMAS / "openapi.yaml").read_text(encoding="utf-8"))
    assert document["openapi"].startswith("3.1")
    openapi_spec_validator.validate(document)


def test_every_broker_of_the_asyncapi_document_says_who_may_connect() -> None:
    """By schemes that the document describes."""
    document = yaml.safe_load((SCHEMAS / "asyncapi.yaml").read_text(encoding="utf-8"))
    schemes = {f"#/components/securitySchemes/{name}": scheme for name, scheme in document["components"]["securitySchemes"].items()}
    assert document["servers"]
    for server in document["servers"].values():
        assert server["security"]
        assert all(schemes[known["$ref"]]["description"] for known in server["security"])


@pytest.mark.skipif(shutil.which("npm") is None, reason="AsyncAPI parser: Node.js with npm is not installed")
def test_the_asyncapi_document_passes_its_official_parser() -> None:
    """AsyncAPI 3, without an error and without a warning."""
    if not (PARSER / "node_modules").is_dir():
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=PARSER, check=True, capture_output=True)
    asyncapi = SCHEMAS / "asyncapi.yaml"
    checked = subprocess.run(["node", "check.mjs", str(asyncapi)], cwd=PARSER, check=False, capture_output=True)
    assert checked.returncode == 0, checked.stderr.decode()
