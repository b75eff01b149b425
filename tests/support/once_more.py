"""Which failed tests CI tries once more, alone: few, and only of those that wait for real processes or clocks.

Three such tests share two cores with each other, and a machine that stands still for a second has failed one in some
four thousand. What only computes gets no second try: it fails the same way again. What passed the second time is named
at the end of the run, so that it can be mended.
"""

import json
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
FAILED_COUNT_MAX = 3
REAL_PROCESSES = tuple(
    f"tests/{folder}/"
    for folder in ("bench", "containers", "contract", "controlplane", "e2e", "integration", "services", "upgrade")
)


def tried_again(failed: list[str]) -> list[str]:
    """Return the node ids to try again, all of them or none."""
    is_few = 0 < len(failed) <= FAILED_COUNT_MAX
    return failed if is_few and all(each.startswith(REAL_PROCESSES) for each in failed) else []


def main() -> None:
    """Print the node ids, a line each; exit with 1 where there is no second try."""
    again = tried_again(sorted(json.loads(LAST_FAILED.read_text()))) if LAST_FAILED.exists() else []
    sys.stdout.write("\n".join(again) + "\n")
    sys.exit(0 if again else 1)


if __name__ == "__main__":
    main()
