"""The failed tests of JUnit reports in a few lines each, for the end of a long log.

A log is often shown from its end, and a test's captured output fills any space there is.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

TESTS_COUNT_MAX = 12  # in full; the others by name
LINES_COUNT_MAX = 12  # of one test's report, its last ones: where it failed, and with what
LINE_CHARACTERS_MAX = 160


def failures(report: Path) -> list[tuple[str, list[str]]]:
    """Return name and last lines of each test of a JUnit file that failed or had an error; a missing file has none."""
    if not report.exists():
        return []
    found = []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
        for kind in ("failure", "error"):
            if (failure := case.find(kind)) is not None:
                lines = (failure.text or failure.get("message") or "").splitlines()[-LINES_COUNT_MAX:]
                name = f"{case.get('classname')}::{case.get('name')}"
                found.append((name, [line[:LINE_CHARACTERS_MAX] for line in lines]))
    return found


def main() -> None:
    """Print the failed tests of the reports that the arguments name."""
    found = [each for name in sys.argv[1:] for each in failures(Path(name))]
    for index, (name, lines) in enumerate(found):
        sys.stdout.write(f"failed: {name}\n")
        if index < TESTS_COUNT_MAX:
            sys.stdout.write("".join(f"    {line}\n" for line in lines))


if __name__ == "__main__":
    main()
