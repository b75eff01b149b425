"""The audit trail of the gateway: who did what, when, through which entry point, once each."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.contract.store.audit_contract import chain_of
from tests.support.front import Front, front
from tests.support.outside import event, request_body
from tests.support.stories import policy

from gpu_autoscaler.bus.client_subjects import client_subjects
from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.gateway import audit as gateway_audit
from gpu_autoscaler_services.gateway.access import AccessRules, Caller, client_projects_of
from gpu_autoscaler_services.gateway.audit import AuditTrail
from gpu_autoscaler_services.gateway.audit_projection import AuditProjection, cut_expired, following
from gpu_autoscaler_services.gateway.auth import SharedTokens
from gpu_autoscaler_services.gateway.client_requests import ClientRequests

TOKEN = "a-shared-token-of-the-settings"
RULES = AccessRules(client_projects=client_projects_of(("anna=outside",)))
IN_AN_HOUR = (datetime.now(UTC) + timedelta(hours=1)).isoformat()


class Named:
    """Identifies the owner of one token, as OpenID Connect does."""

    async def caller(self, token: str) -> Caller | None:
        """Return the owner."""
        return Caller(name="oidc:anna", authentication="oidc") if token == "anna" else None


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway with shared tokens, and a user without any right."""
    pools = policy(pools=[{"name": "general"}])
    async with front(tmp_path, authenticators=[SharedTokens([TOKEN]), Named()], rules=RULES, policy=pools) as entry:
        yield entry


async def send(gate: Front, method: str, path: str, body: object = None, **headers: str) -> int:
    """Send a request with the shared token; return its status."""
    headers = {"Authorization": f"Bearer {TOKEN}"} | headers
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"{gate.url}/api/v1/{path}", json=body, headers=headers) as response,
    ):
        await response.read()
        return response.status


async def entries_of(store: Store) -> list[dict[str, Any]]:
    """Return all entries, oldest first; their chain is whole."""
    assert (await chain_of(store)).violation is None
    return [row.document for row in (await store.audit(count_max=1000, is_oldest_first=True)).rows]


def directive(**changes: object) -> dict[str, object]:
    """Return a directive for an hour."""
    return {"directive": {"directive": "freeze"}, "reason": "upkeep", "until": IN_AN_HOUR, **changes}


def brief(entry: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Return who did what with which outcome."""
    return entry["who"], entry["authentication"], entry["verb"], entry["object"], entry["outcome"]


async def test_each_act_over_rest_has_an_entry_before_its_fact(gate: Front) -> None:
    """With the caller, not with whom the request names; reading has none."""
    assert await send(gate, "POST", "gpu/jobs", {**request_body(job_id="j-1"), "submitted_by": "somebody"}) == 202
    assert await send(gate, "POST", "directives", directive(given_by="somebody")) == 202
    pause = {"directive": "pause", "pool": "general"}
    assert await send(gate, "POST", "directives", directive(directive=pause, given_by="somebody")) == 202
    demand = {"source": "kafka", "shape": {"gpu_count": 1}, "count": 1, "until": IN_AN_HOUR}
    assert await send(gate, "POST", "demand", demand) == 202
    assert await send(gate, "DELETE", "gpu/jobs/j-1") == 202
    assert await send(gate, "GET", "gpu/jobs/j-1") == 200
    entries = await entries_of(gate.model.store)
    name, known_by = "bearer of a token", "shared token"
    assert [brief(entry) for entry in entries] == [
        (name, known_by, "submit", "job/j-1", "allowed"),
        (name, known_by, "freeze", "directive/freeze", "allowed"),
        (name, known_by, "pause", "directive/pause/general", "allowed"),
        (name, known_by, "report", "demand/kafka", "allowed"),
        (name, known_by, "cancel", "job/j-1", "allowed"),
    ]
    assert [entry["project_id"] for entry in entries] == ["outside", None, None, None, "outside"]
    assert [entry["reason"] for entry in entries[1:3]] == ["upkeep", "upkeep"]
    before = len(entries)
    await AuditProjection(gate.model.store, gate.bus, gate.model.clock).advance()
    assert len(await entries_of(gate.model.store)) == before, "no fact has a second entry"


async def test_refused_acts_have_their_reason(gate: Front) -> None:
    """Of a caller without the right, of an unknown one, of an invalid request, and of one about nothing."""
    assert await send(gate, "POST", "gpu/jobs", request_body(), Authorization="Bearer anna") == 403
    assert await send(gate, "POST", "directives", directive(), Authorization="Bearer anna") == 403
    assert await send(gate, "POST", "directives", directive(), Authorization="Bearer unknown") == 401
    assert await send(gate, "POST", "gpu/jobs", request_body(members=-1)) == 422
    assert await send(gate, "DELETE", "gpu/jobs/nothing") == 404
    assert await send(gate, "DELETE", "directives/freeze") == 404
    assert await send(gate, "POST", "gpu/jobs", "no request") == 422
    assert await send(gate, "GET", "status", Authorization="Bearer anna") == 403
    entries = await entries_of(gate.model.store)
    assert [(*brief(entry)[:4], entry["status"]) for entry in entries] == [
        ("oidc:anna", "oidc", "submit", "", 403),
        ("oidc:anna", "oidc", "freeze", "directive/freeze", 403),
        ("", "none", "direct", "", 401),
        ("bearer of a token", "shared token", "submit", "", 422),
        ("bearer of a token", "shared token", "cancel", "job/nothing", 404),
        ("bearer of a token", "shared token", "resume", "directive/freeze", 404),
        ("bearer of a token", "shared token", "submit", "", 422),
    ]
    assert {entry["outcome"] for entry in entries} == {"refused"}
    assert entries[0]["project_id"] == "outside"
    assert "no right to create jobs.api.gpu-autoscaler.io" in entries[0]["reason"]
    assert "members: " in entries[3]["reason"]


async def test_what_cannot_be_done_is_no_refusal(gate: Front) -> None:
    """The broker is away: the act was allowed and failed, or failed before."""
    gate.bus.is_away = True
    assert await send(gate, "POST", "directives", directive()) == 503
    gate.bus.is_away = False
    entries = await entries_of(gate.model.store)
    assert [(entry["outcome"], entry["status"]) for entry in entries] == [("allowed", None), ("failed", 503)]


async def test_the_entry_point_is_distinguished_by_what_the_client_says(gate: Front) -> None:
    """A command, the page in a browser, and any other program."""
    await send(gate, "DELETE", "directives/x", **{"User-Agent": "gpu-autoscaler-cli/1"})
    await send(gate, "DELETE", "directives/x", **{"User-Agent": "Mozilla/5.0", "Sec-Fetch-Site": "same-origin"})
    await send(gate, "DELETE", "directives/x", **{"User-Agent": "curl/8"})
    entries = await entries_of(gate.model.store)
    assert [(entry["entry_point"], entry["agent"]) for entry in entries] == [
        ("cli", "gpu-autoscaler-cli/1"), ("page", "Mozilla/5.0"), ("rest", "curl/8")
    ]  # fmt: skip


async def test_clients_of_the_broker_have_their_name(gate: Front) -> None:
    """The subject has it; a refused request says why, and one that cannot be read is refused as well."""
    requests = ClientRequests(gate.model, RULES)

    async def unused(_: bytes) -> None:
        """The answer is returned."""

    async def ask(client: str, payload: bytes) -> dict[str, Any]:
        request = Request(subject=client_subjects(client)[0], payload=payload, answer=unused, message_id="m")
        answer: dict[str, Any] = json.loads(await requests.answer(request))
        return answer

    job_id = (await ask("anna", json.dumps(request_body()).encode()))["job_id"]
    assert (await ask("bob", json.dumps(request_body(job_id="j-2")).encode()))["error"]["code"] == 403
    assert (await ask("bob", b"no json"))["error"]["code"] == 400
    entries = await entries_of(gate.model.store)
    assert [(*brief(entry), entry["status"]) for entry in entries] == [
        ("anna", "broker", "submit", f"job/{job_id}", "allowed", None),
        ("bob", "broker", "submit", "job/j-2", "refused", 403),
        ("bob", "broker", "submit", "", "refused", 400),
    ]
    assert {entry["entry_point"] for entry in entries} == {"nats"}
    assert "gateway.client_projects has no bob=outside" in entries[1]["reason"]


async def publish(gate: Front, event_id: str, **changes: Any) -> None:  # noqa: ANN401 - any JSON
    """Publish a request as a trusted client does."""
    await gate.bus.publish("job.requested", event(event_id, request_body(**changes)), message_id=event_id)


async def test_facts_that_did_not_pass_the_gateway_are_added_once(gate: Front, tmp_path: Path) -> None:
    """Of trusted clients, with the name that they claim; after a restart and with a second gateway as well."""
    await publish(gate, "t-1", job_id="j-1", submitted_by="carl")
    projection = AuditProjection(gate.model.store, gate.bus, gate.model.clock)
    await projection.advance()
    await projection.advance()
    await publish(gate, "t-2", job_id="j-2")
    other = await SqliteStore.open(tmp_path / "store.db")
    again = [AuditProjection(store, gate.bus, gate.model.clock) for store in (gate.model.store, other)]
    await asyncio.gather(*(each.advance() for each in (*again, projection)))
    entries = await entries_of(other)
    assert [brief(entry) for entry in entries] == [
        ("carl", "recorded", "submit", "job/j-1", "allowed"),
        ("", "recorded", "submit", "job/j-2", "allowed"),
    ]
    assert {entry["entry_point"] for entry in entries} == {"stream"}
    await other.close()


@pytest.mark.parametrize(
    ("changes", "reason"), [({"countt": 4}, "countt: unknown key"), ({"count": -1}, "count: is -1; must be")]
)
async def test_a_demand_report_that_changes_nothing_is_refused(
    gate: Front, changes: dict[str, object], reason: str
) -> None:
    """With an unknown field no service reads it, with an invalid one none follows it; another one counts."""
    until = (gate.model.clock.now() + timedelta(hours=1)).isoformat()
    report = {"source": "batch-api", "shape": {"gpu_count": 1}, "count": 4, "until": until}
    for event_id, body in (("good", report), ("bad", {**report, **changes})):
        await gate.bus.publish("demand.reported", json.dumps(body).encode(), message_id=event_id)
    await AuditProjection(gate.model.store, gate.bus, gate.model.clock).advance()
    allowed, refused = await entries_of(gate.model.store)
    assert brief(allowed) == ("", "recorded", "report", "demand/batch-api", "allowed")
    assert brief(refused) == ("", "recorded", "report", "demand/batch-api", "refused")
    assert reason in refused["reason"]


async def test_a_fact_hides_behind_no_entry_of_another_act(gate: Front) -> None:
    """Whoever publishes with the id of a recorded fact gets an entry all the same."""
    assert await send(gate, "POST", "gpu/jobs", request_body(job_id="j-1")) == 202
    (entry,) = await entries_of(gate.model.store)
    await gate.bus.publish(
        "job.requested", event(entry["fact_id"], request_body(job_id="j-9")), message_id="another message"
    )
    await AuditProjection(gate.model.store, gate.bus, gate.model.clock).advance()
    assert [entry["object"] for entry in await entries_of(gate.model.store)] == ["job/j-1", "job/j-9"]


async def test_an_act_does_not_wait_for_a_store_that_is_away(gate: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A freeze takes effect; its fact makes the entry once the store is back, with the name that the fact has."""

    async def away(_: object) -> int:
        raise TransientError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(gate.model.store, "append_audit", away)
        assert await send(gate, "POST", "directives", directive()) == 202
    assert await entries_of(gate.model.store) == []
    async with following(AuditProjection(gate.model.store, gate.bus, gate.model.clock), gate.model.audit):
        async with asyncio.timeout(20):
            while not await entries_of(gate.model.store):
                await asyncio.sleep(0.01)
    (entry,) = await entries_of(gate.model.store)
    assert brief(entry) == ("bearer of a token", "recorded", "freeze", "directive/freeze", "allowed")


async def test_a_new_stream_is_read_from_its_beginning(gate: Front) -> None:
    """The broker lost its disk: positions of the old stream are ahead of the new one."""
    projection = AuditProjection(gate.model.store, gate.bus, gate.model.clock)
    for number in range(3):
        await publish(gate, f"old-{number}", job_id=f"old-{number}")
    await projection.advance()
    async with front(Path(gate.model.store._path).parent) as after:  # type: ignore[attr-defined]  # the same file
        await publish(after, "new", job_id="new")
        await AuditProjection(after.model.store, after.bus, after.model.clock).advance()
        objects = [entry["object"] for entry in await entries_of(after.model.store)]
        assert objects == ["job/old-0", "job/old-1", "job/old-2", "job/new"]


async def test_refusals_of_one_caller_are_bounded(gate: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are counted, and their number has an entry; another caller has entries of its own."""
    monkeypatch.setattr(gateway_audit, "REFUSALS_PER_MINUTE_MAX", 3)
    for _ in range(8):
        assert await send(gate, "DELETE", "directives/x") == 404
    assert await send(gate, "DELETE", "directives/x", Authorization="Bearer anna") == 403
    assert len(await entries_of(gate.model.store)) == 4
    monkeypatch.setattr(gateway_audit, "WINDOW_SECONDS", -1.0)
    await gate.model.audit.flush()
    last = (await entries_of(gate.model.store))[-1]
    assert (last["verb"], last["unlisted_count"], last["outcome"]) == ("several", 5, "refused")
    assert len(await entries_of(gate.model.store)) == 5, "of a caller within the limit there is nothing to count"


async def test_callers_beyond_the_limit_share_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes up names fills no memory."""
    monkeypatch.setattr(gateway_audit, "CALLERS_COUNT_MAX", 2)
    monkeypatch.setattr(gateway_audit, "REFUSALS_PER_MINUTE_MAX", 1)
    async with front(tmp_path) as entry:
        trail: AuditTrail = entry.model.audit
        for number in range(9):
            access = ClientRequests(entry.model, RULES)._access(f"client-{number}")
            await trail.refused(access, gateway_audit.Act(verb="submit"), 403, "no right")
        assert len(await entries_of(entry.model.store)) == 3


async def test_pages_and_filters_over_rest(gate: Front) -> None:
    """The last first by default; the next page follows; an invalid cursor is named."""
    for number in range(5):
        assert await send(gate, "POST", "gpu/jobs", request_body(job_id=f"j-{number}")) == 202
    await send(gate, "POST", "gpu/jobs", request_body(), Authorization="Bearer anna")

    async def page(query: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{gate.url}/api/v1/audit?{query}", headers=headers) as got,
        ):
            answer: dict[str, Any] = await got.json(content_type=None)
            return answer | {"status": got.status}

    first = await page("limit=4")
    second = await page(f"limit=4&cursor={first['next_cursor']}")
    assert [item["number"] for item in (*first["items"], *second["items"])] == [6, 5, 4, 3, 2, 1]
    assert (second["next_cursor"], second["head"]["number"], second["anchor"]["number"]) == (None, 6, 0)
    assert second["head"]["hash"] == first["items"][0]["hash"]
    for query, numbers in (
        ("outcome=refused", [6]),
        ("who=oidc:anna", [6]),
        ("object=job/j-2", [3]),
        ("verb=submit&outcome=allowed&oldest_first=true&limit=2", [1, 2]),
        ("project_id=vision", []),
        ("after=2030-01-01T00:00:00Z", []),
        ("before=2030-01-01T00:00:00%2B02:00&entry_point=rest&limit=1", [6]),
    ):
        assert [item["number"] for item in (await page(query))["items"]] == numbers, query
    assert (await page("cursor=x"))["violations"][0]["field"] == "cursor"


async def test_expired_entries_are_removed_and_broken_ones_stay(gate: Front, tmp_path: Path) -> None:
    """By the tick of the gateway; a broken chain is not cut, so that its proof stays."""
    for number in range(3):
        await send(gate, "DELETE", f"directives/{number}")
    store, now = gate.model.store, gate.model.clock.now()
    await cut_expired(store, now, timedelta(days=1))
    assert len(await entries_of(store)) == 3
    later = now + timedelta(days=3)
    connection = store._connection  # type: ignore[attr-defined]  # as somebody with the file
    (written,) = await asyncio.to_thread(
        lambda: connection.execute("SELECT entry FROM audit WHERE number = 2").fetchone()
    )
    change = "UPDATE audit SET entry = ? WHERE number = 2"
    await asyncio.to_thread(connection.execute, change, (written.replace("404", "200"),))
    await cut_expired(store, later, timedelta(days=1))
    assert len((await store.audit()).rows) == 3
    await asyncio.to_thread(connection.execute, change, (written,))
    await cut_expired(store, later, timedelta(days=1))
    (entry,) = await entries_of(store)
    assert (entry["verb"], entry["object"], entry["who"]) == ("cut_audit", "audit/1-3", "gpu-autoscaler")
