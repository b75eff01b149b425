"""The gateway shows where the shadow policy decides differently: current and past differences."""

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.front import Front, front
from tests.support.stories import MINUTE, T0, TimedFact

from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.decisions import Cut, Difference, Plan, Side
from gpu_autoscaler.model.ids import PlanId

DEFERRED = Side(what="deferred", reason="not_yet_idle", sentence="Not yet.")
DRAINED = Side(what="drain_node", reason="node_idle", sentence="Drain it.")


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway of an empty cluster."""
    async with front(tmp_path) as opened:
        yield opened


async def _shown(gate: Front, query: str = "") -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{gate.url}/api/v1/shadow{query}") as response:
        assert response.status == 200, await response.text()
        document: dict[str, Any] = await response.json()
        return document


def _shadow_plan(at: datetime, *nodes: str) -> TimedFact:
    """The shadow policy would drain these nodes, the active policy would not."""
    fact = ShadowPlanMade(
        plan_id=PlanId(f"shadow-{at.isoformat()}"),
        parent_sequence=0,
        plan=Plan(as_of=at, parent_sequence=0),
        cut=Cut(),
        policy_digest="ours",
        real_policy_digest="theirs",
        core_digest="core",
        differences=tuple(
            Difference(subject=f"node/{name}", name=f"node/{name}", made=DEFERRED, other=DRAINED) for name in nodes
        ),
    )
    return TimedFact(fact, at)


def _real(policy_digest: str) -> TimedFact:
    fact = ScalingPlanMade(
        plan_id=PlanId(f"real-{policy_digest}"),
        plan=Plan(as_of=T0, parent_sequence=0),
        cut=Cut(),
        policy_digest=policy_digest,
        core_digest="core",
    )
    return TimedFact(fact, T0)


async def test_a_missing_shadow_plan_is_reported(gate: Front) -> None:
    """No shadow plan is distinguishable from two policies that agree."""
    shown = await _shown(gate)

    assert (shown["changed_at"], shown["now"], shown["earlier"]) == (None, [], [])


async def test_a_difference_is_shown_once_with_start_and_end(gate: Front) -> None:
    """Whatever other differences occur."""
    await gate.tell(
        (_shadow_plan(T0, "n1"), _shadow_plan(T0 + MINUTE, "n1", "n2"), _shadow_plan(T0 + 2 * MINUTE, "n2"))
    )

    shown = await _shown(gate)

    (current,), (past,) = shown["now"], shown["earlier"]
    assert (current["name"], current["until_at"]) == ("node/n2", None)
    assert datetime.fromisoformat(current["since_at"]) == T0 + MINUTE
    assert past["name"] == "node/n1"
    assert datetime.fromisoformat(past["since_at"]) == T0
    assert datetime.fromisoformat(past["until_at"]) == T0 + 2 * MINUTE
    assert current["real"] == {"outcome": "deferred", "reason": "not_yet_idle", "sentence": "Not yet."}
    assert (await _shown(gate, "?limit=1"))["next_cursor"] is None


@pytest.mark.parametrize(("digest", "is_same"), [("theirs", True), ("another", False)])
async def test_another_policy_than_the_scalers_is_reported(gate: Front, digest: str, is_same: bool) -> None:  # noqa: FBT001
    """Otherwise a stale policy file would silently invalidate the comparison."""
    await gate.tell((_shadow_plan(T0),), (_real(digest),))

    assert (await _shown(gate))["is_compared_with_scaler"] is is_same
