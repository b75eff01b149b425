"""Bugs to plant in how effects are handled: lanes, rate limits and the steps of a plan. See `planted.py`.

The simulator finds those in `EFFECTS`. How long a launch takes, and which slot it holds meanwhile, is nothing that it
plays: `SHOWN_BY_TESTS` names the test that finds each of these (`test_planted_effects.py`).
"""

import msgspec
from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_LIB = "libs/gpu_autoscaler"
_FLUSHED = """            self._hooks.notify(pods, decision.deadline_at)
            await self._hooks.flush()
"""
_LANES_TEST = "tests/services/scaler/test_service_lanes.py::test_notices_do_not_wait_for_launches"

EFFECTS = (
    Planted(
        "a drain that waits keeps later drains waiting",
        4,
        f"{_LIB}/bus/streams.py",
        "                max_ack_pending=lane.max_ack_pending,\n",
        "                max_ack_pending=1,\n",
        profile="notices",
    ),
    # Sixteen slots are too many for launches of a small cluster: two are as many for it as sixteen for a large one.
    Planted(
        "launches share two slots with drains",
        4,
        f"{_SCALER}/service.py",
        "    lanes: ClassVar[tuple[Lane, ...]] = LANES\n",
        "    concurrency_max: ClassVar[int] = 2\n",
        profile="slow launches",
    ),
)


class ShownByTest(msgspec.Struct, frozen=True):
    """A bug, and the test that fails with it."""

    bug: Planted
    test: str  # node id


SHOWN_BY_TESTS = (
    ShownByTest(
        Planted(
            "launches share consumer and slots with drains",
            4,
            f"{_SCALER}/service.py",
            "    lanes: ClassVar[tuple[Lane, ...]] = LANES\n",
            "    concurrency_max: ClassVar[int] = 16\n",
        ),
        f"{_LANES_TEST}[waiting for the cloud]",
    ),
    ShownByTest(
        Planted(
            "a launch keeps its slot while it waits for the rate limit",
            4,
            f"{_LIB}/providers/throttling.py",
            "            async with while_waiting.get()():\n",
            "            async with nullcontext():\n",
        ),
        "tests/unit/runtime/test_slots.py::test_who_waits_for_a_rate_limit_holds_no_slot",
    ),
    ShownByTest(
        Planted(
            "the nodes of a plan begin one after the other, each after its hooks",
            4,
            f"{_SCALER}/executor.py",
            "NODES_CONCURRENT_MAX = 32\n",
            "NODES_CONCURRENT_MAX = 1\n",
            also=((f"{_SCALER}/drains.py", "            self._hooks.notify(pods, decision.deadline_at)\n", _FLUSHED),),
        ),
        "tests/services/scaler/test_executor_storms.py::test_silent_hooks_delay_no_drain",
    ),
    ShownByTest(
        Planted(
            "the facts of a plan are published when its last node has begun",
            4,
            f"{_LIB}/runtime/steps.py",
            "    await asyncio.gather(*(take_next() for _ in range(hands)))\n",
            "    parts: list[Outcome] = []\n"
            "    publish_all = publish\n\n"
            "    async def publish(part: Outcome) -> None:\n        parts.append(part)\n\n"
            "    await asyncio.gather(*(take_next() for _ in range(hands)))\n"
            "    for part in parts:\n        await publish_all(part)\n",
        ),
        "tests/services/scaler/test_executor_storms.py::test_facts_are_published_as_nodes_begin",
    ),
    ShownByTest(
        Planted(
            "a plan whose decisions partly failed is not handled again",
            4,
            f"{_LIB}/runtime/steps.py",
            "    return RETRY_WALL_SECONDS\n",
            "    return None\n",
        ),
        "tests/unit/runtime/test_steps.py::test_a_failed_step_delays_no_other",
    ),
)
