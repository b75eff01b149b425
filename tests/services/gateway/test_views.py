"""Views of the gateway: nodes, plans, facts, cost, status, why, the page and the OpenAPI document."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from openapi_spec_validator import validate
from tests.support.front import Front, front
from tests.support.money import clusters
from tests.support.purchases import spread
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    TimedFact,
    bought,
    given,
    job,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)
from tests.support.telemetry import minute
from tests.support.timed_facts import EPOCH
from tests.support.zero_quota import world

from gpu_autoscaler.core.deferred_groups import grouped
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Deferred, DeferredUpkeep, Plan, Upkeep
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import PlanId, PodUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit
from gpu_autoscaler.model.reasons.upkeep import UpkeepRepeated
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler_services.gateway import recent_facts
from gpu_autoscaler_services.gateway.access import Caller
from gpu_autoscaler_services.gateway.auth import SharedTokens
from gpu_autoscaler_services.gateway.openapi import document

TOKEN = "a-token-that-is-long-enough"


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway of an empty cluster."""
    async with front(tmp_path) as opened:
        yield opened


async def _get(gate: Front, path: str, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.get(gate.url + path, headers=headers) as response:
        return response.status, await response.json(content_type=None)


def _charge(name: str, number: int, *, total: int, idle: int, project: str | None = "research") -> TimedFact:
    from_at = T0 + number * HOUR
    fact = CostAccrued(
        provider_id=ProviderId(name),
        node_name=None,
        instance_type="p4d.24xlarge",
        capacity_type=CapacityType.SPOT,
        from_at=from_at,
        to_at=from_at + HOUR,
        total_micro_usd=total,
        idle_micro_usd=idle,
        shares=(CostShare(allocated_micro_usd=total - idle, used_micro_usd=None, project_id=project),),
        price_micro_usd_per_hour=total,
        price_source="sim",
        price_at=from_at,
    )
    return TimedFact(fact, from_at + HOUR)


async def test_a_node_shows_gpus_notice_and_reason_of_purchase(gate: Front) -> None:
    """One answer has everything that the page shows of a node."""
    await gate.tell(
        node("n1", offer(gpus=8)),
        pod("train-0", on="n1", gpus=3),
        notice("n1", reclaim_at=T0 + 2 * MINUTE),
        bought(purchase("waits"), is_launched=False),
    )

    status, nodes = await _get(gate, "/api/v1/nodes")

    assert status == 200
    by_name = {item["name"]: item for item in nodes["items"]}
    assert set(by_name) == {"n1", "waits"}
    assert (by_name["n1"]["gpu_count"], by_name["n1"]["gpu_busy_count"]) == (8, 3)
    assert by_name["n1"]["notice"]["reclaim_at"] == "2026-11-21T12:02:00Z"
    assert by_name["n1"]["gpu_utilization_ratio"] is None
    assert by_name["waits"]["reason"]


async def test_utilization_is_of_the_present_pods(gate: Front) -> None:
    """A minute before the last pod left, and a minute that is too old, prove nothing; zero is a figure."""
    now = gate.model.clock.now()
    minutes = {"busy": (-3, 0.9), "left": (-2, 0.92), "idle": (-1, 0.0), "silent": (-20, 0.5), "never": (-9, None)}
    for name, (number, busy) in minutes.items():
        await gate.tell(
            node(name, offer(gpus=8), at=now - HOUR),
            pod(f"{name}-0", on=name, gpus=8, at=now - HOUR),
            () if busy is None else minute(name, now + number * MINUTE, busy=busy),
        )
    for name, ago in (("left", 30 * SECOND), ("idle", 5 * MINUTE)):
        uid = PodUid(f"uid-{name}-0")
        gone = PodGone(epoch=EPOCH, version=2, pod_uid=uid, namespace="default", name=f"{name}-0", node_name=name)
        await gate.tell((TimedFact(gone, now - ago),))
    _, nodes = await _get(gate, "/api/v1/nodes")

    shown = {item["name"]: item["gpu_utilization_ratio"] for item in nodes["items"]}
    assert shown == {"busy": pytest.approx(0.9), "left": None, "idle": 0.0, "silent": None, "never": None}


async def test_the_cluster_in_numbers(gate: Front) -> None:
    """Pods determine busy GPUs, booting GPUs are not usable, the price is that of existing instances."""
    bought = node("n1", offer(gpus=8, usd_per_hour=10), reason=spread(10.0, 9.0))
    await gate.tell(bought, pod("train-0", on="n1", gpus=3), job("waits"))

    _, status = await _get(gate, "/api/v1/status")

    assert (status["gpu_count"], status["gpu_busy_count"], status["gpu_booting_count"]) == (8, 3, 0)
    assert status["jobs_by_status"] == {"queued": 1}
    assert status["price_micro_usd_per_hour"] == 10_000_000
    assert status["spread_micro_usd_per_month"] == 730_000_000
    assert status["cut"]["JOB"] == 2


async def test_a_plan_shows_deferred_actions_as_sentences(gate: Front) -> None:
    """Each reason has a sentence and a tag."""
    deferred = Deferred(step="cover_demand", subject="job/j1", reason=NodesLimit(nodes_count=10, nodes_count_max=10))
    fact = ScalingPlanMade(
        plan_id=PlanId("p1"),
        plan=Plan(as_of=T0, parent_sequence=0, deferred=(deferred,)),
        cut=Cut(last_sequences=(("JOB", 4),)),
        policy_digest="p",
        core_digest="c",
    )
    await gate.tell((TimedFact(fact, T0),))

    _, plans = await _get(gate, "/api/v1/plans")
    status, shown = await _get(gate, "/api/v1/plans/p1")

    assert status == 200
    assert plans["items"] == [shown]
    assert shown["deferred"][0]["reason"] == "nodes_limit"
    assert "10" in shown["deferred"][0]["sentence"]
    assert (await _get(gate, "/api/v1/plans/p2"))[0] == 404


async def test_a_plan_shows_its_groups(gate: Front) -> None:
    """One entry a group, with counts, shape and first objects; the first objects are listed like before as well."""
    state = given(*world(700))
    fact = ScalingPlanMade(
        plan_id=PlanId("p1"),
        plan=grouped(plan(state, policy(), T0), state),
        cut=Cut(),
        policy_digest="p",
        core_digest="c",
    )
    await gate.tell((TimedFact(fact, T0),))
    _, shown = await _get(gate, "/api/v1/plans/p1")

    (group,) = [group for group in shown["deferred_groups"] if group["kind"] == "pod"]
    assert (group["objects_count"], group["gpu_count"], group["reason"]) == (701, 701, "offers_unavailable")
    assert group["shape"] == "1 GPU, 1 CPU, 4 GiB"
    assert "387 more" in group["sentence"]
    named = [entry["subject"] for entry in shown["deferred"] if entry["subject"].startswith("pod/")]
    assert (group["subjects"], len(named)) == (named, 3)
    assert shown["deferred_unlisted"] == {}


async def test_a_plan_shows_its_acts_of_upkeep(gate: Front) -> None:
    """Decided acts with subject and reason; deferred ones as a group, and `why` of the node has both."""
    story = (node("n1"), node("n2"))
    made = plan(given(*story), policy(), T0)
    waits = DeferredUpkeep(
        decision="add_finalizer",
        reason=UpkeepRepeated(attempts_count=2, retry_at=T0 + MINUTE),
        objects_count=1,
        subjects=("node/uid-n2",),
    )
    assert made.upkeep is not None
    decided = made.upkeep.decisions[:1]
    made = msgspec.structs.replace(made, upkeep=Upkeep(decisions=decided, deferred=(waits,)))
    fact = ScalingPlanMade(plan_id=PlanId("p1"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    await gate.tell(*story, (TimedFact(fact, T0),))
    _, shown = await _get(gate, "/api/v1/plans/p1")

    (act,) = shown["upkeep"]
    assert (act["decision"], act["subject"], act["reason"]) == ("add_finalizer", "n1", "finalizer_missing")
    assert "lacks our finalizer" in act["sentence"]
    (group,) = [group for group in shown["deferred_groups"] if group["step"] == "add_finalizer"]
    assert (group["kind"], group["reason"], group["subjects"]) == ("node", "upkeep_repeated", ["node/uid-n2"])
    assert "2 attempts had no effect so far" in group["sentence"]
    for name, text in (("n1", "Add our finalizer to node n1."), ("n2", "Deferred for node n2 (step add_finalizer)")):
        _, why = await _get(gate, f"/api/v1/why/node/{name}")
        assert any(text in sentence for sentence in why["sentences"]), why


async def test_every_pod_of_a_group_is_explained(gate: Front) -> None:
    """History and status of a pod that no list names; those of a plan of the last release are the same."""
    stories = world(100)
    state = given(*stories)
    made = plan(state, policy(), T0)
    answers = []
    await gate.tell(tuple(told for story in stories for told in story))
    for number, published in enumerate((grouped(made, state), made)):
        fact = ScalingPlanMade(
            plan_id=PlanId(f"p{number}"), plan=published, cut=Cut(), policy_digest="p", core_digest="c"
        )
        await gate.tell((TimedFact(fact, T0 + number * SECOND),))
        status, why = await _get(gate, "/api/v1/why/pod/train-00077")
        assert status == 200
        answers.append([line for line in why["sentences"] if "The cloud has no capacity" in line])
    assert [len(lines) for lines in answers] == [1, 1], "the second plan adds nothing new"
    assert answers[0] == answers[1]
    assert "(step cover_demand)" in answers[0][0]


async def test_facts_are_the_newest_matching_ones(gate: Front) -> None:
    """Filters use NATS wildcards; frequent telemetry does not displace other streams."""
    await gate.tell(on_sale(), job("j1"), job("j2"))

    _, facts = await _get(gate, "/api/v1/facts?subject=job.*&limit=3")

    assert [item["subject"] for item in facts["items"]] == ["job.queued", "job.requested", "job.queued"]
    assert facts["items"][0]["event"]["specversion"] == "1.0"
    assert (await _get(gate, "/api/v1/facts?subject=job..x"))[0] == 422


async def test_costs_sum_exactly(gate: Front) -> None:
    """Allocated and idle of all spans equal the charges, whatever the width; a repeated charge counts once."""
    charges = (
        _charge("i-1", 0, total=10_000_001, idle=3_333_334),
        _charge("i-2", 0, total=7, idle=7, project=None),
        _charge("i-1", 1, total=5, idle=0),
        _charge("i-1", 0, total=10_000_001, idle=3_333_334),
    )
    await gate.tell(charges)

    for span_seconds in (60, 3600, 7200):
        _, cost = await _get(gate, f"/api/v1/cost?span_seconds={span_seconds}")
        assert cost["allocated_micro_usd"] + cost["idle_micro_usd"] == 10_000_013
        assert cost["idle_micro_usd"] == 3_333_341
        assert sum(span["idle_micro_usd"] for span in cost["spans"]) == cost["idle_micro_usd"]
    _, cost = await _get(gate, "/api/v1/cost")
    assert cost["projects"][0] == {"project_id": "research", "allocated_micro_usd": 6_666_672}
    assert (await _get(gate, "/api/v1/cost?span_seconds=61"))[0] == 422


async def test_costs_wait_until_all_charges_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 until then; no charges are a valid sum."""
    monkeypatch.setattr(recent_facts, "RECONNECT_SECONDS", 0.01)
    async with front(tmp_path, unreadable=frozenset({"COST"})) as gate:
        assert (await _get(gate, "/api/v1/cost"))[0] == 503
        assert (await _get(gate, "/api/v1/status"))[0] == 200

        gate.bus.unreadable = frozenset()

        async with asyncio.timeout(60):
            while (await _get(gate, "/api/v1/cost"))[0] == 503:
                await asyncio.sleep(0.01)


async def test_why_explains_an_object_from_the_streams(gate: Front) -> None:
    """By name or id; an unknown object or kind is 404."""
    await gate.tell(job("j1"), node("n1"))

    status, why = await _get(gate, "/api/v1/why/node/n1")

    assert status == 200
    assert why["sentences"]
    assert why["now"].endswith("No pod uses the node.")
    _, waiting = await _get(gate, "/api/v1/why/job/j1")
    assert waiting["now"].startswith("Waiting: The list of nodes has not been read yet")
    _, listed = await _get(gate, "/api/v1/gpu/jobs?state=queued")
    assert listed["items"][0]["message"] == waiting["now"]
    assert (await _get(gate, "/api/v1/why/node/nobody"))[0] == 404
    assert (await _get(gate, "/api/v1/why/cloud/n1"))[0] == 404


async def test_requests_wait_until_the_state_is_complete(tmp_path: Path) -> None:
    """503 until then; afterwards an unreachable broker does not matter."""
    readiness = Readiness()
    async with front(tmp_path, readiness=readiness) as gate:
        assert (await _get(gate, "/api/v1/nodes"))[0] == 503
        readiness.clear("state")
        assert (await _get(gate, "/api/v1/nodes"))[0] == 200
        readiness.block("state", "not caught up with JOB")
        assert (await _get(gate, "/api/v1/nodes"))[0] == 200


def test_the_openapi_document_is_valid() -> None:
    """Checked by the specification's validator; operation ids are unique."""
    openapi = document()

    validate(openapi)
    names = [operation["operationId"] for path in openapi["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))
    assert "/jobs/{job_id}" in openapi["paths"]


async def test_the_page_loads_only_its_own_files(gate: Front) -> None:
    """The gateway serves every file of the page, under a policy that allows no other source."""
    async with aiohttp.ClientSession() as http:
        for path in ("/", "/app.js", "/panels.js", "/stream.js", "/format.js", "/style.css", "/icon.svg"):
            async with http.get(gate.url + path) as response:
                text = await response.text()
                assert response.status == 200, path
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                assert "https://" not in text, path
                assert "http://www.w3.org" in text or "http://" not in text, path
        async with http.get(gate.url + "/openapi.json") as response:
            assert (await response.json())["openapi"].startswith("3.1")


async def test_a_configured_token_is_required(tmp_path: Path) -> None:
    """401 without, 200 with; the page itself is open because it holds no data."""
    async with front(tmp_path, authenticators=[SharedTokens([TOKEN])]) as gate:
        assert (await _get(gate, "/api/v1/nodes"))[0] == 401
        assert (await _get(gate, "/api/v1/nodes", Authorization="Bearer nobody-knows-this-one"))[0] == 401
        assert (await _get(gate, "/api/v1/nodes", Authorization="Bearer no-utf-8-at-all-\udcff"))[0] == 401
        assert (await _get(gate, "/api/v1/nodes", Authorization=f"Bearer {TOKEN}"))[0] == 200
        assert (await _get(gate, "/openapi.json"))[0] == 200


class _Stranger:
    """Authenticates one caller, who has no rights."""

    async def caller(self, token: str) -> Caller | None:
        return Caller(name="anna") if token == TOKEN else None


async def test_a_caller_without_rights_reads_and_writes_nothing(tmp_path: Path) -> None:
    """403 before the body is judged; a list of all projects is empty."""
    async with (
        front(tmp_path, authenticators=[_Stranger()]) as gate,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        await gate.tell(job("j1"))
        async with http.get(gate.url + "/jobs?state=pending") as response:
            assert (response.status, (await response.json())["items"]) == (200, [])
        async with http.get(gate.url + "/api/v1/nodes") as response:
            assert response.status == 403
        async with http.delete(gate.url + "/jobs/j1") as response:
            assert response.status == 403


async def test_a_foreign_host_name_is_refused(gate: Front) -> None:
    """DNS rebinding does not give other web pages access."""
    for name in ("evil.example", "[", "127.0.0.1.evil.example"):
        assert (await _get(gate, "/api/v1/nodes", Host=name))[0] == 421


def test_a_short_token_is_refused_at_start() -> None:
    """Short tokens can be guessed."""
    with pytest.raises(ConfigError, match="tokens"):
        SharedTokens(["short"])


async def test_spend_budgets_show_spent_reserved_and_left(gate: Front) -> None:
    """By owner and period; unknown figures have a reason."""
    gate.model.use_policy(clusters(day=1000.0, month=5000.0, is_hard=False))
    day, month = (await _get(gate, "/api/v1/budget"))[1]["items"]
    assert (day["owner"], day["period"], day["limit_micro_usd"], day["is_hard"]) == ("cluster", "day", 10**9, False)
    assert "has not been read yet" in day["unknown_reason"]
    assert month["left_micro_usd"] == 5 * 10**9 - month["spent_micro_usd"] - month["reserved_micro_usd"]


async def test_unavailable_offers_show_end_and_reason(gate: Front) -> None:
    """One refused offer and one available offer."""
    now = gate.model.clock.now()
    other = offer(zone="zone-b")
    await gate.tell(on_sale(offer(), other, at=now), bought(purchase("no", at=now), at=now, is_refused=True))
    unavailable, available = (await _get(gate, "/api/v1/offers"))[1]["items"]
    assert unavailable["unavailable_reason"].startswith("InsufficientInstanceCapacity for offer p4d.")
    assert unavailable["unavailable_until"] > now.isoformat()
    assert (available["name"], available["unavailable_until"], available["unavailable_reason"]) == (other.key, None, "")


async def test_offers_show_how_old_their_prices_are(gate: Front) -> None:
    """Source, time, and whether the policy considers the price stale."""
    now = gate.model.clock.now()
    old = msgspec.structs.replace(offer(), price_source="file of prices", priced_at=now - 7 * HOUR)
    await gate.tell(on_sale(old, offer(zone="zone-b"), at=now))
    stale, fresh = (await _get(gate, "/api/v1/offers"))[1]["items"]
    assert (stale["price_source"], stale["is_price_stale"]) == ("file of prices", True)
    assert stale["priced_at"] == (now - 7 * HOUR).isoformat().replace("+00:00", "Z")
    assert (fresh["price_source"], fresh["is_price_stale"]) == (None, False)
