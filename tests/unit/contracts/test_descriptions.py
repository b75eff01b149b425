"""Descriptions of schemas: the comments of fields, else the glossary."""

import sys
from pathlib import Path

import msgspec
import pytest

from gpu_autoscaler.contracts.descriptions import described, field_comments
from gpu_autoscaler.contracts.schemas import fact_schema
from gpu_autoscaler.events.catalog import FACTS


class Part(msgspec.Struct, kw_only=True):
    """A part."""

    gpu_count: int  # of one part


class Whole(msgspec.Struct, kw_only=True):
    """All forms of comments."""

    parts: tuple[Part, ...] = ()  # in the order of size
    zone: str | None = None
    pool: str = "any"
    job_name: str = ""  # empty: it has none
    price_micro_usd_per_hour: int | None = None  # None: it is free
    period: str = ""  # day or month
    state: str = ""  # at_rest, moving, ...
    unheard_of: str = ""
    noted: str = ""  # for tools alone


def test_a_comment_is_the_description_and_the_glossary_stands_in() -> None:
    """Values keep their first letter, None is null and left out where it is not allowed, and a remark that only
    qualifies follows the glossary."""
    _, components = msgspec.json.schema_components([Whole])
    schemas = described(components, [Whole])
    shown = {name: schema.get("description") for name, schema in schemas["Whole"]["properties"].items()}

    assert shown == {
        "parts": "In the order of size.",
        "zone": "Zone of the cloud.",
        "pool": "Node pool of the policy.",
        "job_name": "Name of the job; several jobs may have it; empty: it has none.",
        "price_micro_usd_per_hour": "Price in millionths of a USD per hour; null: it is free.",
        "period": "Day or month.",
        "state": "at_rest, moving, ...",
        "unheard_of": None,
        "noted": "For tools alone.",
    }
    assert schemas["Part"]["properties"]["gpu_count"]["description"] == "Number of GPUs. Of one part."
    assert "description" not in components["Whole"]["properties"]["zone"]


def test_without_its_source_a_type_has_no_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation without source files."""
    (tmp_path / "sourceless.py").write_text("import msgspec\nclass Alone(msgspec.Struct):\n    a: int  # a number\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from sourceless import Alone  # type: ignore[import-not-found]  # noqa: PLC0415 - made by this test

    (tmp_path / "sourceless.py").unlink()
    assert field_comments(Alone) == {}
    monkeypatch.delitem(sys.modules, "sourceless")


def test_every_property_of_every_fact_is_described() -> None:
    """Also what null means, where it is allowed."""
    parts = {
        name: part
        for schema in map(fact_schema, FACTS)
        for name, part in {schema["title"]: schema, **schema["$defs"]}.items()
    }
    shown = {
        f"{name}.{key}": value for name, part in parts.items() for key, value in part.get("properties", {}).items()
    }
    nullable = [name for name, value in shown.items() if {"type": "null"} in value.get("anyOf", ())]
    remedy = "a comment at the end of the field's line, or an entry in contracts/glossary.py"

    assert [name for name, part in parts.items() if not part.get("description")] == []
    assert [name for name, value in shown.items() if not value.get("description")] == [], remedy
    assert [name for name in nullable if "null" not in shown[name]["description"]] == [], remedy
    assert len(shown) > 1000
