"""Repeats one test on a busy machine: `make flaky TEST=tests/e2e/test_story.py::test_x TIMES=20`.

A test that fails once in many runs is mended, not tried again. More copies run at once than there are cores, so that
each of them waits for the processor as in a whole run. The output of each failed run is kept.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

FOLDER = Path("out/flaky")


async def repeat(test: str, *, times: int, at_once: int, folder: Path) -> list[Path]:
    """Run the test in `times` processes, `at_once` of them together; return the outputs of those that failed."""
    slots = asyncio.Semaphore(at_once)

    async def run(number: int) -> Path | None:
        output = folder / f"{number}.log"
        command = (sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", test)
        async with slots:
            began_at = time.monotonic()
            with output.open("wb") as file:
                process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
                code = await process.wait()
        sys.stdout.write(f"{number}: {'failed' if code else 'passed'} in {time.monotonic() - began_at:.0f} s\n")
        if code:
            return output
        output.unlink()
        return None

    return [output for output in await asyncio.gather(*map(run, range(1, times + 1))) if output is not None]


def main() -> int:
    """Print how often it failed; return 1 if it did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("test", help="node id")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=3 * (os.cpu_count() or 1))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = asyncio.run(repeat(options.test, times=options.times, at_once=options.at_once, folder=options.folder))
    outputs = "".join(f"; see {output}" for output in failed)
    sys.stdout.write(f"failed {len(failed)} of {options.times} times{outputs}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
