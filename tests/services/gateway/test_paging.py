"""Pages of lists: one convention for all, without a gap or a repeat, and old plans from the store."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tests.support.front import Front, front
from tests.support.stories import T0, TimedFact, node

from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler_services.gateway.api import ROUTES
from gpu_autoscaler_services.gateway.paging import PageQuery
from gpu_autoscaler_services.gateway.problems import RULE_TYPE

LISTS = [route.path for route in ROUTES if route.query is not None and issubclass(route.query, PageQuery)]


async def _get(gate: Front, path: str, **query: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.get(gate.url + path, params=query) as response:
        return response.status, await response.json(content_type=None)


async def _pages(gate: Front, path: str, **query: str) -> list[dict[str, Any]]:
    items, cursor = [], ""
    for _ in range(30):
        _, page = await _get(gate, path, **query, **({"cursor": cursor} if cursor else {}))
        items += page["items"]
        if (cursor := page["next_cursor"]) is None:
            return items
    raise AssertionError("pages have no end")


def _plan(number: int) -> ScalingPlanMade:
    made_from = Plan(as_of=T0, parent_sequence=0)
    return ScalingPlanMade(plan_id=PlanId(f"p{number}"), plan=made_from, cut=Cut(), policy_digest="p", core_digest="c")


async def test_every_list_has_limit_and_cursor(tmp_path: Path) -> None:
    """Limits outside of the bounds are of another form, strange cursors break a rule."""
    assert len(LISTS) >= 10
    async with front(tmp_path) as gate:
        for path in LISTS:
            for limit in ("0", "100000", "many"):
                assert (await _get(gate, path, limit=limit))[0] == 422, path
            for cursor in ("x", "*", "YWJj"):
                status, problem = await _get(gate, path, cursor=cursor)
                assert status == 200 or problem["type"] == RULE_TYPE, (path, cursor)


async def test_nodes_are_paged_and_filtered(tmp_path: Path) -> None:
    """All pages together have each wanted node once, by name."""
    names = [f"n{number:02d}" for number in range(7)]
    async with front(tmp_path) as gate:
        await gate.tell(*(node(name) for name in names))
        shown = await _pages(gate, "/api/v1/nodes", limit="3")
        assert [item["name"] for item in shown] == names
        zone = shown[0]["zone"]
        assert len(await _pages(gate, "/api/v1/nodes", limit="2", zone=str(zone))) == 7
        assert await _pages(gate, "/api/v1/nodes", zone="elsewhere") == []


async def test_plans_that_left_memory_come_from_the_store(tmp_path: Path) -> None:
    """Memory has the last three of twelve, two of which the store has too; pages hold each plan once."""
    made_at = [T0 + number * timedelta(minutes=1) for number in range(12)]
    async with front(tmp_path, ring_count_max=3) as gate:
        for number in range(11):
            await gate.model.store.record_plan(_plan(number), made_at=made_at[number])
        await gate.tell(*((TimedFact(_plan(number), made_at[number]),) for number in range(9, 12)))
        for limit in ("1", "2", "5"):
            shown = await _pages(gate, "/api/v1/plans", limit=limit)
            assert [plan["plan_id"] for plan in shown] == [f"p{number}" for number in reversed(range(12))], limit
        shown = await _pages(gate, "/api/v1/plans")
        assert [plan["sequence"] is None for plan in shown] == [False] * 3 + [True] * 9
        some = await _pages(
            gate, "/api/v1/plans", limit="2", after=made_at[4].isoformat(), before=made_at[10].isoformat()
        )
        assert [plan["plan_id"] for plan in some] == [f"p{number}" for number in reversed(range(4, 10))]
        status, plan = await _get(gate, "/api/v1/plans/p1")
        assert (status, plan["made_at"]) == (200, msgspec.to_builtins(made_at[1]))
