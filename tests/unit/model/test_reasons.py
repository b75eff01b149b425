"""Reasons: each has a sentence, a remedy where there is a next step, an example, and an entry on the page."""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from gpu_autoscaler.contracts.reasons_page import EXAMPLES, reasons_page
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model.directives import PERMANENT, Attribution
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons import all_reasons
from gpu_autoscaler.model.reasons.base import Reason, ReasonWithoutRemedy
from gpu_autoscaler.model.reasons.defer import DeferReason, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import Frozen, KeptByOverride, OverrideReached, PoolPaused
from gpu_autoscaler.model.reasons.defer_waits import GangIncomplete
from gpu_autoscaler_services.cli.main import app

ROOT = Path(__file__).parents[3]
FIELD = re.compile(r"(?<![\w./-])(?:[a-z]+(?:_[a-z]+)+|[a-z_]+(?:\.[a-z_]+)+)(?![\w/-]|\.\w)")
TAGS = [example.tag() for example in EXAMPLES]


def test_every_reason_is_on_the_page_with_one_example() -> None:
    """A reason is not complete without a struct, sentence, remedy, union entry and example."""
    assert Counter(type(example) for example in EXAMPLES) == Counter(all_reasons())
    assert set(TAGS) == set(re.findall(r"^### `(\w+)`$", reasons_page(), re.MULTILINE))


def test_the_page_is_current() -> None:
    """`make schemas` writes it."""
    page = (ROOT / "docs" / "reference" / "reasons.md").read_text(encoding="utf-8")
    assert page == reasons_page(), "run `make schemas`"


@pytest.mark.parametrize("reason", all_reasons(), ids=lambda reason: reason.tag())
def test_sentence_and_remedy_are_beside_the_fields(reason: type[Reason]) -> None:
    """A missing remedy is explicit, and the struct stays immutable and cheap."""
    assert "sentence" in vars(reason)
    assert ("remedy" in vars(reason)) != issubclass(reason, ReasonWithoutRemedy)
    assert reason.__struct_config__.frozen
    assert not reason.__struct_config__.gc


@pytest.mark.parametrize("example", EXAMPLES, ids=TAGS)
def test_sentences_and_remedies_are_whole_sentences(example: Reason) -> None:
    """Without traces of how values are stored."""
    for text in filter(None, (example.sentence(), example.remedy())):
        assert text[0].isupper() or text[0].isdigit()
        assert text.endswith(".")
        assert not any(trace in text for trace in ("None", "{", "datetime", "..", "uid-"))


def test_every_deferral_has_a_next_step_of_its_own() -> None:
    """Those that a directive causes end as the directive does."""
    deferrals = [example for example in EXAMPLES if isinstance(example, get_args(DeferReason))]
    directives = Frozen | PoolPaused | OverrideReached | KeptByOverride
    remedies = [example.remedy() for example in deferrals if not isinstance(example, directives)]
    assert None not in [example.remedy() for example in deferrals]
    assert len(set(remedies)) == len(remedies)


@pytest.mark.parametrize("example", EXAMPLES, ids=TAGS)
def test_remedies_name_fields_and_commands_that_exist(example: Reason) -> None:
    """A word with an underscore or a path with dots is a field of the policy, by its path or by its own name."""
    text = example.remedy() or ""
    paths = set(_fields(ScalingPolicy))
    known = paths | {path.rpartition(".")[2] for path in paths}
    assert set(FIELD.findall(text)) <= known
    assert all(command in app for command in re.findall(r"gpu-autoscaler ([a-z-]+)", text))


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        (Frozen(), "Set is_frozen to false in the policy."),
        (OffersUnavailable(offers=("a",), retry_at=datetime(2026, 11, 21, 12, tzinfo=UTC)), "allow more zones"),
        (GangIncomplete(job_id=JobId("a"), members_placed=3, members_count=4), "capacity for 1 more member"),
    ],
)
def test_a_remedy_names_the_next_step(reason: Frozen | OffersUnavailable | GangIncomplete, step: str) -> None:
    """Waiting without an end is no answer."""
    assert step in reason.remedy()


def test_a_directive_ends_in_time_or_by_command_or_with_the_policy() -> None:
    """One that the policy sets cannot be taken back."""
    override = Attribution(key="override/pool/a/kind/A100", by="ada", why="release week.", until=PERMANENT)
    assert override.text() == "by ada (release week)"
    assert "at most 1 node in pool a of GPU model A100 (now: 2)" in override.override("allows at most", 1, "node", 2)
    assert "resume" not in override.remedy()
    assert Frozen().remedy() == "Set is_frozen to false in the policy."


def _fields(struct: type[msgspec.Struct], at: str = "") -> Iterator[str]:
    """Paths of all fields, through nested structs and tuples of structs."""
    for field in msgspec.structs.fields(struct):
        yield f"{at}{field.name}"
        for kind in _structs(field.type):
            yield from _fields(kind, f"{at}{field.name}.")


def _structs(annotation: Any) -> Iterator[type[msgspec.Struct]]:  # noqa: ANN401 - any annotation
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for part in get_args(annotation):
        yield from _structs(part)
