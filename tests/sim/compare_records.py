"""Compares two records of facts that may differ in names, digests and sentences only.

`python -m tests.sim.compare_records OLD.jsonl NEW.jsonl [--names FILE]`. A record is written by
`python -m gpu_autoscaler_services.simulate --seed N --record FILE`: one envelope as JSON per line. FILE is
docs/upgrading.md or a TSV with the columns kind, old, new, where. Exits with 1 at the first other difference.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

NAMES = Path(__file__).resolve().parents[2] / "docs" / "upgrading.md"
KINDS_NOT_IN_FACTS = (
    "out",
    "metric",
    "cli",
    "rest",
    "setting",
    "chart",
    "column",
    "consumer",
    "permission",
    "page",
    "make",
)
UNORDERED = ("last_sequences",)  # sorted by stream name
_HEX = re.compile(r"[0-9a-f]{12,}")
_WORDS_COUNT_MIN = 3  # of a sentence
Names = Mapping[str, frozenset[str]]


class Different(Exception):
    """The records differ in more than names."""


def read_names(path: Path) -> Names:
    """Return the new names of each old one, from a TSV or from the tables of a Markdown page."""
    names: dict[str, set[str]] = {}
    for kind, old, new in _rows(path.read_text(encoding="utf-8").splitlines(), is_table=path.suffix == ".md"):
        if not kind.startswith(KINDS_NOT_IN_FACTS):
            names.setdefault(old, set()).add(new)
            names.setdefault(old.rpartition(".")[2], set()).add(new.rpartition(".")[2])
    return {old: frozenset(new) for old, new in names.items()}


def _rows(lines: Iterable[str], *, is_table: bool) -> Iterator[tuple[str, str, str]]:
    kind = ""
    for line in lines:
        if line.startswith("#"):
            kind = line.strip("# ").lower().replace(" ", "_")
        if is_table and not line.startswith("|"):
            continue
        cells = [cell.strip(" `") for cell in (line.strip("|").split("|") if is_table else line.split("\t"))]
        if len(cells) > 2 and re.fullmatch(r"[a-z]+(_[a-z]+)*", cells[0]) and _is_kind(cells[0]):
            yield cells[0], cells[1], cells[2]
        elif is_table and len(cells) > 1 and not cells[0].startswith("-"):
            yield kind, cells[0], cells[1]


def _is_kind(cell: str) -> bool:
    return cell.partition("_")[0] in (
        "fact",
        "reason",
        "policy",
        "stream",
        "subject",
        "label",
        "annotation",
        "value",
    ) or (cell.startswith(KINDS_NOT_IN_FACTS))


class Comparison:
    """Compares values, and counts tolerated differences."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.renamed: Counter[tuple[str, str]] = Counter()
        self.sentences: Counter[tuple[str, str]] = Counter()
        self._digests: dict[str, str] = {}
        self._digests_back: dict[str, str] = {}

    @property
    def digests_count(self) -> int:
        """Return how many different digests were paired."""
        return len(self._digests)

    def check(self, old: Any, new: Any, path: str = "") -> None:  # noqa: ANN401 - JSON
        """Raise Different where the values differ in more than names, digests and sentences."""
        if isinstance(old, dict) and isinstance(new, dict):
            self._check_fields(old, new, path)
        elif isinstance(old, list) and isinstance(new, list):
            if path.rpartition(".")[2] in UNORDERED:
                old, new = sorted(old, key=self._new_first), sorted(new)
            if len(old) != len(new):
                raise Different(f"{path}: {len(old)} and {len(new)} items: {_short(old)} and {_short(new)}")
            for number, (before, now) in enumerate(zip(old, new, strict=True)):
                self.check(before, now, f"{path}[{number}]")
        elif isinstance(old, str) and isinstance(new, str):
            self._check_texts(old, new, path)
        elif old != new or type(old) is not type(new):
            raise Different(f"{path}: {_short(old)} and {_short(new)}")

    def _new_first(self, item: Any) -> Any:  # noqa: ANN401 - JSON
        return [min(self.names.get(item[0], {item[0]})), *item[1:]]

    def _check_fields(self, old: dict[str, Any], new: dict[str, Any], path: str) -> None:
        remaining = dict(new)
        for key, value in old.items():
            candidates = [name for name in (key, *sorted(self.names.get(key, ()))) if name in remaining]
            if not candidates:
                candidates = [name for name in remaining if self._is_renamed(key, name)]
            if not candidates:
                raise Different(f"{path}.{key} is missing: {_short(new)}")
            if candidates[0] != key:
                self.renamed[key, candidates[0]] += 1
            self.check(value, remaining.pop(candidates[0]), f"{path}.{candidates[0]}")
        if remaining:
            raise Different(f"{path}: unexpected {_short(remaining)}")

    def _check_texts(self, old: str, new: str, path: str) -> None:
        if old == new or path.endswith(".service_version"):
            return
        if self._is_renamed(old, new):
            self.renamed[old, new] += 1
        elif self._are_paired_digests(old, new):
            return
        elif min(len(old.split()), len(new.split())) >= _WORDS_COUNT_MIN:
            self.sentences[old, new] += 1
        else:
            raise Different(f"{path}: {old!r} and {new!r}")

    def _is_renamed(self, old: str, new: str) -> bool:
        """True if each part of the text, between its separators, is equal or renamed."""
        if new in self.names.get(old, ()):
            return True
        before, now = re.split(r"([./:>* ])", old), re.split(r"([./:>* ])", new)
        return len(before) == len(now) and all(
            one == other or other in self.names.get(one, ()) for one, other in zip(before, now, strict=True)
        )

    def _are_paired_digests(self, old: str, new: str) -> bool:
        """True if the texts differ only in digests that are always paired in the same way."""
        if _HEX.sub("#", old) != _HEX.sub("#", new):
            return False
        pairs = list(zip(_HEX.findall(old), _HEX.findall(new), strict=True))
        return all(
            self._digests.setdefault(before, now) == now and self._digests_back.setdefault(now, before) == before
            for before, now in pairs
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


def compare(old: Iterable[str], new: Iterable[str], names: Names) -> Comparison:
    """Compare two records line by line. Raises Different."""
    comparison = Comparison(names)
    for number, (before, now) in enumerate(zip_longest(old, new), start=1):
        if before is None or now is None:
            raise Different(f"fact {number}: the {'old' if before is None else 'new'} record has ended")
        try:
            comparison.check(json.loads(before), json.loads(now))
        except Different as difference:
            raise Different(f"fact {number}{difference}\nold: {before.strip()}\nnew: {now.strip()}") from None
    return comparison


def main() -> int:
    """Compare two files."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.compare_records", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--names", type=Path, default=NAMES, help="docs/upgrading.md, or a TSV: kind, old, new, where")
    arguments = parser.parse_args()
    try:
        with arguments.old.open(encoding="utf-8") as old, arguments.new.open(encoding="utf-8") as new:
            comparison = compare(old, new, read_names(arguments.names))
    except Different as difference:
        sys.stdout.write(f"{difference}\n")
        return 1
    for title, counts in (("renamed", comparison.renamed), ("sentence", comparison.sentences)):
        for (before, now), count in sorted(counts.items()):
            sys.stdout.write(f"{title} {count}x: {before} -> {now}\n")
    sys.stdout.write(f"equal but for names; {comparison.digests_count} digests differ consistently\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
