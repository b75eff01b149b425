"""Which failed tests CI tries once more, alone: few, and all of them or none.

Tests of real processes and clocks share two cores with each other, and a machine that stands still for a second has
failed one in some four thousand, with those beside it that share its servers or find what it left open. What only
computes fails the same way again. What passed the second time is named at the end of the run, so that it can be mended.
"""

import json
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
FILES_COUNT_MAX = 4  # tests of one file share servers, and fall together


def tried_again(failed: list[str]) -> list[str]:
    """Return the node ids to try again, all of them or none."""
    return failed if len({each.partition("::")[0] for each in failed}) <= FILES_COUNT_MAX else []


def main() -> None:
    """Print the node ids, a line each; exit with 1 where there is no second try."""
    again = tried_again(sorted(json.loads(LAST_FAILED.read_text()))) if LAST_FAILED.exists() else []
    sys.stdout.write("\n".join(again) + "\n")
    sys.exit(0 if again else 1)


if __name__ == "__main__":
    main()
