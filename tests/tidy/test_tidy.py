"""The house rules hold for every file, and each rule is shown to fail on a bad example."""

import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from tests.tidy import rules

from gpu_autoscaler.contracts.policy_file import range_of
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events import cost, demand, gpu, job, node, pod, policy, scaling, shadow, spot
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.registry import services

ROOT = Path(__file__).resolve().parents[2]
TextRule = Callable[[Path, str], Iterator[str]]


def _tables(table: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """The policy and every table of it that is defined beside a decision; what `model` lends has its own rules."""
    yield table
    for field in msgspec.structs.fields(table):
        for one in _classes_in(field.type):
            if issubclass(one, msgspec.Struct) and one.__module__.startswith("gpu_autoscaler.core."):
                yield from _tables(one)


def _classes_in(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _classes_in(part)


POLICY_TABLES = tuple(dict.fromkeys(_tables(ScalingPolicy)))


@cache
def _files() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return tuple(path for name in sorted(set(listed)) if (path := ROOT / name).is_file())


def _python(*roots: str) -> Iterator[Path]:
    for path in _files():
        if path.suffix == ".py" and path.relative_to(ROOT).as_posix().startswith(roots):
            yield path


def _text_files() -> Iterator[Path]:
    binary = {".png", ".gz", ".tgz", ".xz", ".ico", ".woff2"}
    return (path for path in _files() if path.suffix not in binary)


def _findings(rule: TextRule, paths: Iterator[Path]) -> list[str]:
    return [found for path in paths for found in rule(path.relative_to(ROOT), path.read_text(encoding="utf-8"))]


def test_files_are_short() -> None:
    """No Python, JavaScript or style file has more than 700 lines."""
    paths = (path for path in _files() if path.suffix in {".py", ".js", ".css", ".html"})
    assert _findings(rules.file_size, paths) == []


def test_functions_are_short() -> None:
    """No function has more than 60 lines."""
    assert _findings(rules.function_size, _python("libs", "services", "tests")) == []


def test_everything_public_has_a_docstring() -> None:
    """Modules, public classes and functions carry docstrings."""
    assert _findings(rules.docstrings, _python("libs", "services")) == []


def test_the_core_is_arithmetic() -> None:
    """Nouns, facts and decisions have no IO, clock, randomness, logging or async."""
    roots = ("libs/gpu_autoscaler/core", "libs/gpu_autoscaler/model", "libs/gpu_autoscaler/events")
    assert _findings(rules.purity, _python(*roots)) == []


def test_what_time_changes_is_noted() -> None:
    """No decision compares a duration that notes nothing. The check, displays and estimates decide nothing."""
    folder = "libs/gpu_autoscaler/core"
    others = {f"{folder}/{name}" for name in ("check", "explain", "intake")}
    paths = [
        path
        for path in _python(folder)
        if str(path.parent.relative_to(ROOT)) not in others and path.name not in {"next_change.py", "estimates.py"}
    ]
    assert len(paths) > 80
    assert _findings(rules.noted_comparisons, iter(paths)) == []


def test_no_file_names_a_package_index_or_a_machine() -> None:
    """Locks, docs and code work with any index and on any machine."""
    assert _findings(rules.addresses, _text_files()) == []


def test_nothing_is_left_unfinished() -> None:
    """No notes of unfinished work and no stubs."""
    assert _findings(rules.unfinished, _python("libs", "services", "tests")) == []


def test_facts_follow_the_grammar() -> None:
    """Subject, type, class, file and stream of a fact are one name."""
    found = [
        finding
        for fact in FACTS
        for finding in rules.fact_grammar(
            fact.__module__, fact.__name__, fact.subject_root(), fact.type_name(), fact.stream()
        )
    ]
    assert found == []


def test_every_fact_is_in_the_catalogue() -> None:
    """A public fact class that nobody listed would be an unknown type to its own publisher."""
    defined = {
        item
        for module in (cost, demand, gpu, job, node, pod, policy, scaling, shadow, spot)
        for name, item in vars(module).items()
        if isinstance(item, type)
        and issubclass(item, Fact)
        and item.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert defined == set(FACTS)


@pytest.mark.parametrize("policy", POLICY_TABLES)
def test_policy_fields_have_unit_range_and_source(policy: type[msgspec.Struct]) -> None:
    """Every threshold, in tables below the first as well, names its unit, its range and where its default is from."""
    schema = msgspec.json.schema(policy)["$defs"][policy.__name__]["properties"]
    found = [
        finding
        for name, field in schema.items()
        for finding in rules.policy_field(
            name, _description(field), is_number=_is_number(field), has_range=bool(range_of(field))
        )
    ]
    assert found == []


@pytest.mark.parametrize("policy", POLICY_TABLES)
def test_every_policy_field_is_read_by_a_decision(policy: type[msgspec.Struct]) -> None:
    """Who sets a threshold sees its effect."""
    deciding = "".join(path.read_text() for path in _python("libs/gpu_autoscaler/core", "services"))
    fields = policy.__struct_fields__
    assert [finding for name in fields for finding in rules.policy_use(name, deciding)] == []
    assert list(rules.policy_use("patience_seconds", deciding)) != []


def _description(field: dict[str, object]) -> str:
    return str(field.get("description", ""))


def _is_number(field: dict[str, object]) -> bool:
    variants = field.get("anyOf", [field])
    assert isinstance(variants, list)
    return any(variant.get("type") in {"integer", "number"} for variant in variants)


BAD_TEXTS: tuple[tuple[TextRule, str], ...] = (
    (rules.file_size, "x = 1\n" * 701),
    (rules.function_size, "def f():\n" + "    x = 1\n" * 61),
    (rules.docstrings, "x = 1\n"),
    (rules.docstrings, '"""Module."""\n\nclass Public:\n    x = 1\n'),
    (rules.purity, "import time\n"),
    (rules.purity, "from random import choice\n"),
    (rules.purity, "import logging\n"),
    (rules.purity, "async def decide(): ...\n"),
    (rules.purity, "from datetime import datetime\nnow = datetime.now()\n"),
    (rules.purity, "text = open('facts').read()\n"),
    (rules.noted_comparisons, "def f(as_of, at):\n    return (as_of - at).total_seconds() > 5\n"),
    (rules.noted_comparisons, "def f(draft, at):\n    age = draft.as_of - at\n    return age > LIMIT\n"),
    (rules.noted_comparisons, "def f(as_of, at):\n    return at < as_of + LIMIT\n"),
    (rules.noted_comparisons, "def f(as_of, at):\n    return as_of.timestamp() < at\n"),
    (rules.addresses, "index-url = https://py" + "pi.org/simple\n"),
    (rules.addresses, "cd /ro" + "ot/project\n"),
    (rules.unfinished, "# TO" + "DO: later\n"),
    (rules.unfinished, "raise NotImplemented" + "Error\n"),
)


@pytest.mark.parametrize(("rule", "text"), BAD_TEXTS)
def test_each_rule_fails_on_a_bad_example(rule: TextRule, text: str) -> None:
    """A rule that cannot fail proves nothing."""
    assert list(rule(Path("bad.py"), text)) != []


@pytest.mark.parametrize(
    ("module", "class_name", "subject_root", "type_name", "stream"),
    [
        ("events.spot", "SpotNoticeReceived", "spot.notice_arrived", "spot.notice_arrived.v1", "SPOT"),
        ("events.node", "SpotNoticeReceived", "spot.notice_received", "spot.notice_received.v1", "SPOT"),
        ("events.spot", "SpotNoticeReceived", "spot.notice_received", "spot.notice_received", "SPOT"),
        ("events.spot", "SpotNoticeReceived", "spot.notice_received", "spot.notice_received.v1", "NOTICES"),
        ("events.node", "NodeDrain", "node.drain", "node.drain.v1", "NODE"),
        ("events.node", "NodeUpNowStarted", "node.up.now_started", "node.up.now_started.v1", "NODE"),
    ],
)
def test_the_fact_grammar_fails_on_a_bad_name(
    module: str, class_name: str, subject_root: str, type_name: str, stream: str
) -> None:
    """Each part of the grammar is checked."""
    assert list(rules.fact_grammar(module, class_name, subject_root, type_name, stream)) != []


@pytest.mark.parametrize(
    ("name", "description", "has_range"),
    [
        ("idle_max", "Idle. Source: a document.", True),
        ("idle_seconds_max", "Idle for this long.", True),
        ("idle_seconds_max", "Idle. Source: a document.", False),
    ],
)
def test_the_policy_rule_fails_on_a_bad_field(name: str, description: str, has_range: bool) -> None:  # noqa: FBT001
    """A threshold without unit, range or source is found."""
    assert list(rules.policy_field(name, description, is_number=True, has_range=has_range)) != []


def test_the_policy_rule_looks_into_tables() -> None:
    """Pools, and whatever comes after them, are held to the same rule."""
    assert "NodePool" in {table.__name__ for table in POLICY_TABLES}


@pytest.mark.parametrize("service", services(), ids=lambda service: service.name)
def test_a_services_readme_lists_what_it_declares(service: type[Service]) -> None:
    """What goes in, what comes out, what is urgent: no more and no less."""
    declared = {
        row: {fact.subject_root() for fact in getattr(service, row)}
        for row in ("consumes", "folds", "publishes", "urgent")
    }
    readme = (ROOT / "services/gpu_autoscaler_services" / service.name / "README.md").read_text()
    assert list(rules.service_readme(service.name, readme, declared)) == []


def test_the_readme_rule_fails_on_a_difference() -> None:
    """A README that tells less or more than the declarations is found."""
    readme = "| what | facts |\n| --- | --- |\n| consumes | job.requested |\n"
    assert list(rules.service_readme("x", readme, {"consumes": {"job.requested"}})) == []
    assert list(rules.service_readme("x", readme, {"consumes": {"job.requested", "job.queued"}})) != []
    assert list(rules.service_readme("x", readme, {"consumes": set()})) != []
    assert list(rules.service_readme("x", readme, {"publishes": set()})) != []
