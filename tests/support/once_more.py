"""Which failed tests CI retries once, alone: a few, and all of them or none.

Tests with real processes and clocks share two cores. A one-second stall of the machine has failed about one in four
thousand, together with tests that share its servers or find its open resources. Pure computations fail again in the
same way. The run ends with the names of the tests that passed on retry, so that they can be fixed.
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
