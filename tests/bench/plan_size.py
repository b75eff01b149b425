"""SIZE: the published plan of an account with a GPU quota of zero, for 700 and for 10,000 waiting pods.

390 offers are refused. Beside it stands the plan as it was made, which names each object; grouping is timed alone.
"""

import time

import msgspec
from tests.bench.line import Line
from tests.support.stories import T0, given, policy
from tests.support.zero_quota import world

from gpu_autoscaler.core.deferred_groups import GROUPS_BYTES_MAX, grouped
from gpu_autoscaler.core.plan import plan

PODS_COUNTS = (700, 10_000)


def measure() -> list[Line]:
    """Bytes of the plan, and how long grouping takes."""
    return [line for pods_count in PODS_COUNTS for line in _of(pods_count)]


def _of(pods_count: int) -> list[Line]:
    state = given(*world(pods_count))
    made = plan(state, policy(), T0)
    started = time.process_time()
    published = grouped(made, state)
    seconds = time.process_time() - started
    size, ungrouped_size = len(msgspec.json.encode(published)), len(msgspec.json.encode(made))
    return [
        Line(
            case=f"SIZE {pods_count}",
            value=float(size),
            unit="bytes",
            against=f"{ungrouped_size:,} bytes with each object named, grouped in {seconds:.3g} s CPU",
            target=f"<= {GROUPS_BYTES_MAX:,}",
            met=size <= GROUPS_BYTES_MAX,
        )
    ]
