"""Runs seed after seed of the code that stands on the path, and prints what each broke: one line of JSON a seed.

`python -m tests.sim.searching SEEDS HOURS FOUND`: `SEEDS` as `1,5,7` or `1-500`; ends early after so many finds.
"""

import signal
import sys
from collections.abc import Iterator

import msgspec

from gpu_autoscaler.sim.process import BUG
from gpu_autoscaler.sim.world import Setting
from gpu_autoscaler_services.simulate import run_one

# Of wall time; a run takes seconds, and one that a bug keeps from ending has shown nothing.
RUN_SECONDS_MAX = 300


class Looked(msgspec.Struct, frozen=True):
    """What one seed showed. A run that fell over by an exception, or never ended, has found nothing."""

    seed: int
    promise: str = ""  # empty: all were kept
    what: str = ""
    error: str = ""

    @property
    def is_found(self) -> bool:
        """True where a promise broke, or the end was not settled."""
        return bool(self.promise)


def look(seed: int, hours: float) -> Looked:
    """Run one seed."""
    signal.alarm(RUN_SECONDS_MAX)
    try:
        result = run_one(Setting(seed=seed, hours=hours))
    except Exception as exc:  # noqa: BLE001 - whatever a planted bug makes of the code is told
        return Looked(seed, error=f"the run fell over: {exc!r}")
    finally:
        signal.alarm(0)
    if result.promise == BUG:
        return Looked(seed, error=result.broken[0])
    return Looked(seed, result.promise, result.broken[0]) if result.broken else Looked(seed)


def seeds_of(text: str) -> Iterator[int]:
    """Yield the seeds that `1,5,7-9` names."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main() -> None:
    """Print a line for each seed, until there are enough finds."""
    signal.signal(signal.SIGALRM, _too_long)
    seeds, hours, left = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    for seed in seeds_of(seeds):
        looked = look(seed, hours)
        sys.stdout.write(msgspec.json.encode(looked).decode() + "\n")
        left -= looked.is_found
        if left <= 0:
            return


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {RUN_SECONDS_MAX} s")


if __name__ == "__main__":
    main()
