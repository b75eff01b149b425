"""The OpenAPI document and the gateway agree: each operation answers the declared statuses and bodies."""

import asyncio
import io
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
import structlog
from tests.services.gateway.test_jobs import BODY
from tests.support.cluster import running_cluster
from tests.support.front import Front, front
from tests.support.kube_objects import pod
from tests.support.stories import T0, TimedFact, job, node, policy

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler.model.labels import JOB_ID
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.simcluster.kinds import PODS
from gpu_autoscaler_services.api_rights import RIGHTS
from gpu_autoscaler_services.gateway.access import Caller
from gpu_autoscaler_services.gateway.api import ROUTES, events
from gpu_autoscaler_services.gateway.api.logs import STREAMS_COUNT_MAX, LogSource
from gpu_autoscaler_services.gateway.openapi import document
from gpu_autoscaler_services.gateway.problems import TYPES
from gpu_autoscaler_services.gateway.problems_page import problems_page
from gpu_autoscaler_services.gateway.routes import BODY_BYTES_MAX, JSON, Route
from gpu_autoscaler_services.gateway.server import NO_LOGS

DOCUMENT = document()
ROOT = Path(__file__).parents[3]
PROBLEM = "application/problem+json"
ALL, NONE, BUG, UNCHECKED = "has-all-rights", "has-none", "meets-a-bug", "is-not-checked"
WITH_RETRY = {429, 503}
UNREADABLE = (400, "text/plain")  # answered by the HTTP server

Folders = Callable[[], Path]
Seen = defaultdict[tuple[str, str], set[int]]


class _Callers:
    """One with all rights, one with none, and two tokens that the check of tokens fails for."""

    async def caller(self, token: str) -> Caller | None:
        if token == BUG:
            raise RuntimeError("a bug")
        if token == UNCHECKED:
            raise PermanentError("POST /apis/authentication.k8s.io/v1/tokenreviews: 403: not granted")
        return Caller(name=token, has_all_rights=token == ALL) if token in {ALL, NONE} else None


class Walk:
    """Sends requests to every route; collects the statuses, and compares each answer with what is declared."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.seen: Seen = defaultdict(set)

    async def ask(
        self,
        gate: Front,
        path: str,
        route: Route,
        *,
        headers: Mapping[str, str] = {},
        query: str = "",
        **sent: Any,  # noqa: ANN401 - as aiohttp takes them
    ) -> tuple[int, str]:
        """Send a request to a path of the document; return status and ETag."""
        if route.body is not None and not sent:
            sent = {"json": _body(gate, route)}
        objects = {"job_id": "j1", "plan_id": "p1", "key": "freeze", "kind": "node", "name": "n1"}
        url = gate.url + path.format_map(objects | sent.pop("objects", {})) + query
        async with self.http.request(route.method, url, headers=headers, **sent) as answer:
            self.seen[route.method.lower(), path].add(answer.status)
            declared = DOCUMENT["paths"][path][route.method.lower()]["responses"].get(str(answer.status))
            where = f"{route.method} {path}: {answer.status}"
            assert declared is not None, f"{where} is not declared"
            if answer.status == 304:
                return answer.status, ""
            media_type = answer.content_type
            assert media_type in declared["content"], where
            content = declared["content"][media_type]
            assert (answer.status >= 400) == (media_type == PROBLEM or (answer.status, media_type) == UNREADABLE), where
            for name in declared.get("headers", {}):
                assert name in answer.headers, where
            assert ("Retry-After" in answer.headers) == (answer.status in WITH_RETRY), where
            if media_type.endswith("json"):
                schema = content["schema"] | {"components": DOCUMENT["components"]}
                jsonschema.Draft202012Validator(schema).validate(await answer.json(content_type=None))
            return answer.status, answer.headers.get("ETag", "")


def _body(gate: Front, route: Route) -> dict[str, Any]:
    until = (gate.model.clock.now() + timedelta(hours=1)).isoformat()
    bodies: dict[str, dict[str, Any]] = {
        "DirectiveRequest": {"directive": {"directive": "freeze"}, "reason": "upkeep", "until": until},
        "DemandReported": {"source": "kafka", "shape": {"gpu_count": 1}, "count": 3, "until": until},
        "JobRequested": BODY,
        "PlanQuestion": {"jobs": [BODY]},
    }
    return bodies[route.body.__name__ if route.body else ""]


def _paths() -> list[tuple[str, Route]]:
    return [(path, route) for route in ROUTES for path in (route.path, *route.aliases)]


@pytest.fixture
async def walk() -> AsyncIterator[Walk]:
    """A walk that has seen nothing yet."""
    async with aiohttp.ClientSession() as http:
        yield Walk(http)


@asynccontextmanager
async def gateway_with_objects(
    folder: Path, policy: ScalingPolicy = DEFAULT_POLICY, logs: LogSource = NO_LOGS
) -> AsyncIterator[Front]:
    """A gateway that knows a node, two jobs of which one has ended, a plan and a directive."""
    async with front(folder, authenticators=[_Callers()], policy=policy, logs=logs) as gate:
        now = gate.model.clock.now()
        plan = ScalingPlanMade(
            plan_id=PlanId("p1"), plan=Plan(as_of=T0, parent_sequence=0), cut=Cut(), policy_digest="p", core_digest="c"
        )
        given = PolicyDirectiveGiven(
            directive=Freeze(), reason="upkeep", given_by="anna", given_at=now, until=now + timedelta(hours=1)
        )
        ended = JobFinished(job_id=JobId("j2"), outcome="failed", finished_at=T0)
        told = (TimedFact(plan, T0), TimedFact(given, now), TimedFact(ended, T0))
        await gate.tell(node("n1"), job("j1"), job("j2"), told)
        yield gate


async def _of_callers(walk: Walk, folders: Folders) -> None:
    """What every operation answers before its handler runs."""
    async with front(folders(), authenticators=[_Callers()]) as gate:
        for path, route in _paths():
            assert (await walk.ask(gate, path, route))[0] == 401
            assert (await walk.ask(gate, path, route, query="?x=" + "x" * 9000))[0] == 400
            assert (await walk.ask(gate, path, route, headers=_token("nobody")))[0] == 401
            assert (await walk.ask(gate, path, route, headers=_token(BUG)))[0] == 500
            assert (await walk.ask(gate, path, route, headers=_token(UNCHECKED)))[0] == 503


def _token(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def _of_starting(walk: Walk, folders: Folders) -> None:
    """Before the state is complete, and for a foreign name."""
    async with front(folders(), readiness=Readiness()) as gate:
        for path, route in _paths():
            assert (await walk.ask(gate, path, route))[0] == 503
            assert (await walk.ask(gate, path, route, headers={"Host": "evil.example"}))[0] == 421


async def _of_answers(walk: Walk, folders: Folders, logs: LogSource) -> None:
    """What handlers answer: objects, invalid requests, missing objects."""
    for path, route in _paths():
        async with gateway_with_objects(folders(), logs=logs) as gate:
            of_project = "?project_id=research" if route.operation_id == "list_jobs" else ""
            assert (await walk.ask(gate, path, route, headers=_token(NONE), query=of_project))[0] == 403
            ask = _token(ALL)
            assert (await walk.ask(gate, path, route, headers=ask))[0] == route.status
            if route.method == "GET" and route.media_type == JSON:
                with pytest.MonkeyPatch.context() as patched:  # else `as_of` of two answers differs
                    patched.setattr(gate.model.clock, "now", repeat(gate.model.clock.now()).__next__)
                    _, etag = await walk.ask(gate, path, route, headers=ask)
                    assert (await walk.ask(gate, path, route, headers=ask | {"If-None-Match": etag}))[0] == 304
            if route.query is not None:
                assert (await walk.ask(gate, path, route, headers=ask, query="?nonsense=1"))[0] == 422
            if "{" in path:
                missing = dict.fromkeys(("job_id", "plan_id", "key", "name"), "nobody")
                assert (await walk.ask(gate, path, route, headers=ask, objects=missing))[0] == 404
                for strange in ("%FF", "%00", "*", ">", "x" * 2000, "%2F"):
                    await walk.ask(gate, path, route, headers=ask, objects=dict.fromkeys(missing, strange))
            if route.body is not None:
                await _of_bodies(walk, gate, path, route, ask)


async def _of_bodies(walk: Walk, gate: Front, path: str, route: Route, ask: dict[str, str]) -> None:
    as_json = ask | {"Content-Type": JSON}
    large = b'"' + b"x" * BODY_BYTES_MAX + b'"'
    for expected, body, headers in (
        (415, b"{}", ask | {"Content-Type": "text/plain"}),
        (400, b"{", as_json),
        (422, b'{"nonsense": 1}', as_json),
        (413, large, as_json),
    ):
        assert (await walk.ask(gate, path, route, headers=headers, data=io.BytesIO(body)))[0] == expected


@asynccontextmanager
async def cluster_with_logs() -> AsyncIterator[LogSource]:
    """A cluster in which the pod of the first job has ended, and the pod of the second one has no node."""
    async with running_cluster() as cluster:
        cluster.add_node("n1")
        for job_id, node_name in (("j1", "n1"), ("j2", None)):
            item = pod(job_id, labels={JOB_ID: job_id}, schedulerName="nobody")
            item["spec"] |= {"nodeName": node_name} if node_name else {}
            cluster.add("pods", item)
        async with asyncio.timeout(60):
            while cluster.item("pods", "j1").get("status", {}).get("phase") != "Running":
                await asyncio.sleep(0.02)
        cluster.world.api.modify(PODS, "default/j1", lambda item: item["status"].update(phase="Succeeded"))
        yield LogSource(cluster.kube)


async def _of_logs(walk: Walk, folders: Folders, logs: LogSource) -> None:
    """A pod that has not started, too many readers, and no cluster."""
    ask, full = _token(ALL), LogSource(logs.kube)
    full.streams_count = STREAMS_COUNT_MAX
    for path, route in _paths():
        if route.operation_id == "read_job_logs":
            for source, objects, status in ((logs, {"job_id": "j2"}, 409), (full, {}, 429), (NO_LOGS, {}, 501)):
                async with gateway_with_objects(folders(), logs=source) as gate:
                    assert (await walk.ask(gate, path, route, headers=ask, objects=objects))[0] == status


async def _of_conflicts(walk: Walk, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conflicts, a full queue, and too many event streams."""
    monkeypatch.setattr(events, "LISTENERS_PER_CALLER_COUNT_MAX", 0)
    for path, route in _paths():
        ask = _token(ALL) | {"Idempotency-Key": path}
        async with gateway_with_objects(folders(), policy(queue_count_max=2)) as gate:
            if route.operation_id == "submit_job":
                assert (await walk.ask(gate, path, route, headers=ask))[0] == 202
                other = BODY | {"job_name": "other"}
                assert (await walk.ask(gate, path, route, headers=ask, json=other))[0] == 409
                await gate.tell(job("j3"))
                ask |= {"Idempotency-Key": f"{path} again"}
                assert (await walk.ask(gate, path, route, headers=ask))[0] == 429
            elif route.operation_id == "cancel_job":
                assert (await walk.ask(gate, path, route, headers=ask, objects={"job_id": "j2"}))[0] == 409
            elif route.operation_id == "stream_events":
                assert (await walk.ask(gate, path, route, headers=ask))[0] == 429


async def test_every_operation_declares_exactly_what_it_answers(
    walk: Walk, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each status that a walk over all routes meets is declared, and each declared status is met."""

    def folders() -> Path:
        return tmp_path_factory.mktemp("gateway")

    with structlog.testing.capture_logs():
        await _of_callers(walk, folders)
        await _of_starting(walk, folders)
        async with cluster_with_logs() as logs:
            await _of_answers(walk, folders, logs)
            await _of_logs(walk, folders, logs)
        await _of_conflicts(walk, folders, monkeypatch)
    declared = {
        (method, path): {int(status) for status in operation["responses"]}
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
    }
    assert dict(walk.seen) == declared


def test_every_operation_requires_a_token_and_a_right() -> None:
    """Each lists the rights that it checks, of those that roles grant; 401 names the scheme."""
    assert DOCUMENT["security"] == [{"bearer": []}]
    known = {right.qualified for right in RIGHTS}
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            rights = [right for alternative in operation["security"] for right in alternative["bearer"]]
            assert rights, operation["operationId"]
            assert known.issuperset(rights), operation["operationId"]
            assert "WWW-Authenticate" in operation["responses"]["401"]["headers"]


def test_everything_in_the_document_is_described() -> None:
    """Each property, parameter, operation and schema, and each operation has an id of its own."""
    made = document()
    schemas = made["components"]["schemas"].items()
    operations = [operation for path in made["paths"].values() for operation in path.values()]
    parameters = [parameter for operation in operations for parameter in operation.get("parameters", ())]

    assert [name for name, schema in schemas if not schema.get("description")] == []
    properties = [(name, key, shown) for name, schema in schemas for key, shown in schema.get("properties", {}).items()]
    undescribed = [f"{name}.{key}" for name, key, shown in properties if not shown.get("description")]
    assert undescribed == [], "a comment at the end of the field's line, or an entry in contracts/glossary.py"
    assert [parameter["name"] for parameter in parameters if not parameter.get("description")] == []
    assert [operation["operationId"] for operation in operations if not operation.get("summary")] == []
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_every_problem_type_leads_to_its_explanation(tmp_path: Path) -> None:
    """The gateway serves what the page says about the type, without a token; the page has each type."""
    assert problems_page() == (ROOT / "docs/reference/problems.md").read_text(encoding="utf-8"), "run `make schemas`"
    async with front(tmp_path, authenticators=[_Callers()]) as gate, aiohttp.ClientSession() as http:
        for kind in TYPES:
            async with http.get(gate.url + kind.uri) as answer:
                shown = await answer.text()
            assert (answer.status, kind.remedy in shown) == (200, True), kind.uri
            assert f"## {kind.name}" in problems_page()
    assert len({kind.name for kind in TYPES}) == len(TYPES)
