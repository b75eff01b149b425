"""Maintains recorded histories: `bless` writes the expected reports, `record` makes histories.

After an intended change of decisions: `python -m tests.replay bless`, review the difference in git, commit it.
"""

import argparse
import sys

import structlog
from tests.replay.histories_data import DAYS, FOLDER, expected_of, history_of, record, replayed, report_of

from gpu_autoscaler.replay.recording import save

CRITICAL = 50


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("what", choices=("bless", "record"))
    parser.add_argument("--day", choices=tuple(DAYS), help="only this day")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    FOLDER.mkdir(exist_ok=True)
    for name in [arguments.day] if arguments.day else DAYS:
        if arguments.what == "record":
            save(record(name), history_of(name))
            sys.stdout.write(f"{history_of(name)}: {history_of(name).stat().st_size} bytes\n")
        text = report_of(replayed(name))
        expected_of(name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{name}: {text.splitlines()[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
