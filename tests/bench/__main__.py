"""`make bench`: figures as ratios within one run, printed and written to `out/bench.json`.

Absolute times move with the machine; what is held is the ratio to something measured beside it in the same run.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.bench import (
    burst,
    capacity,
    deciding,
    decision,
    draining,
    folding,
    grouping,
    holding,
    launching,
    memory,
    noticing,
    packing,
    plan_size,
    planning,
    publishing,
    readiness,
    recovering,
    related_objects,
    reporting,
    sizing,
    starting,
    store_size,
    storm,
    stream_sizes,
    submitting,
    watching,
    week,
)
from tests.bench.line import Line
from tests.bench.peers import side_by_side

CASES: dict[str, Callable[[], list[Line]]] = {
    "FOLD": folding.measure,
    "DECISION": decision.measure,
    "SNAPSHOT": starting.measure,
    "PLAN": planning.measure,
    "SIZE": plan_size.measure,
    "GROUPS": grouping.measure,
    "STORM": storm.measure,
    "STORE": store_size.measure,
    "STREAMS": stream_sizes.measure,
    "V1": deciding.measure,
    "V2": draining.measure,
    "V3": publishing.measure,
    "BURST": burst.measure,
    "V5": capacity.measure,
    "V7": sizing.measure,
    "START": readiness.measure,
    "UPGRADE": readiness.measure_upgrade,
    "WEEK": week.measure,
    "REBUILD": recovering.measure_rebuild,
    "STANDBY": recovering.measure_standby,
    "MEMORY": memory.measure,
    "V6": packing.measure,
    "WATCH": watching.measure,
    "RELATED": related_objects.measure,
    "HELD": holding.measure,
    "N1": noticing.measure,
    "NODES": reporting.measure,
    "LANES": launching.measure,
    "SUBMIT": submitting.measure,
    "P1": side_by_side.measure,
}

# Targets that are missed for a reason that is known: shown as missed, and no failure. Best figures and reasons:
# docs/performance.md.
KNOWN_MISSES = frozenset(
    {
        "V1 200/s",
        "V1 200/s tail",
        "V1 2000/s",
        "V1 2000/s tail",
        "V2",
        "P1 1 pods, all bound",
        "P1 200 pods, all bound",
        "P1 1,000 pods, all bound",
        "V5 nodes cost",
        "V5 diverse time",
        "V5 diverse checked",
        "V6 default packing at 100 %",
        "V6 default packing at 130 %",
        "V6 default least-fragments at 100 %",
    }
)


def main() -> int:
    """Measure, print, write. Exits 1 where a target is missed, unless it is known to be (KNOWN_MISSES)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), help="measure only this")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    options = parser.parse_args()
    names = [options.case] if options.case else list(CASES)
    lines = [line for name in names for line in CASES[name]()]
    table = Table(box=None)
    for column in ("case", "value", "unit", "against", "target", "met"):
        table.add_column(column)
    for line in lines:
        met = "-" if line.met is None else ("yes" if line.met else "NO")
        table.add_row(line.case, f"{line.value:,.4g}", line.unit, line.against, line.target or "-", met)
    Console(width=140).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([_told(line) for line in lines], indent=2) + "\n")
    missed = [line for line in lines if line.met is False and not line.is_tolerated]
    for line in missed:
        known = "known; see docs/performance.md" if line.case in KNOWN_MISSES else "a failure"
        told = f"missed: {line.case} is {line.value:.3g} {line.unit}, target {line.target} ({known})"
        sys.stderr.write(told + "\n")
    return 1 if any(line.case not in KNOWN_MISSES for line in missed) else 0


def _told(line: Line) -> dict[str, object]:
    return {name: getattr(line, name) for name in ("case", "value", "unit", "against", "target", "met")}


if __name__ == "__main__":
    sys.exit(main())
