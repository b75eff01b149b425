"""Jobs are validated, and the next plan with them is shown, without anything being published or stored."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.services.gateway.test_jobs import BODY
from tests.support.front import Front, front
from tests.support.pod_templates import templated_body
from tests.support.stories import HOUR, SECOND, Story, job, offer, on_sale, policy, synced

from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.api_rights import DANGEROUS_FIELDS, READ_CLUSTER, ROLES, SUBMIT_JOBS, ApiRight
from gpu_autoscaler_services.gateway.access import AccessRules, Caller
from gpu_autoscaler_services.gateway.problems import QUOTA_TYPE

VALIDATE, SIMULATE = "/api/v1/gpu/jobs:validate", "/api/v1/plan:simulate"
SMALL: dict[str, Any] = {**BODY, "resources": {"cpu": "1", "memory": "1Gi"}}


def cluster_for_sale() -> tuple[Story, ...]:
    """Nothing runs, and nodes with four GPUs are offered."""
    now = Clock().now()
    sold = offer(gpus=4, model="A100", gpu_memory_gib=80)
    resources = msgspec.structs.replace(sold.resources, ephemeral_storage_bytes=2**40)
    return on_sale(msgspec.structs.replace(sold, resources=resources), at=now), synced((), as_of=now)


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway of an empty cluster that can buy nodes."""
    async with front(tmp_path) as opened:
        await opened.tell(*cluster_for_sale())
        yield opened


async def _post(gate: Front, path: str, body: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 - any JSON
    async with aiohttp.ClientSession() as http, http.post(gate.url + path, json=body) as response:
        return response.status, await response.json(content_type=None)


async def _is_untouched(gate: Front) -> bool:
    return await gate.model.bus.last_sequence("JOB") == 0 and not await gate.model.store.unfinished_jobs()


@pytest.mark.parametrize("path", [VALIDATE, "/jobs:validate"])
async def test_a_valid_job_is_answered_with_its_estimate(gate: Front, path: str) -> None:
    """As the submission would answer, but nothing is published or stored."""
    status, job = await _post(gate, path, SMALL)

    assert (status, job["status"], job["queue_position"]) == (200, "pending", 1)
    assert "can be bought now" in job["estimate_basis"]
    assert await _is_untouched(gate)


async def test_a_deadline_before_the_estimate_is_refused_with_it(gate: Front) -> None:
    """By the dry run as by the submission; a later one is accepted."""
    now = gate.model.clock.now()
    late = {**SMALL, "start_by_at": (now + HOUR).isoformat(), "finish_by_at": (now + 100 * HOUR).isoformat()}
    assert (await _post(gate, VALIDATE, late))[0] == 200

    soon = {**SMALL, "start_by_at": (now + SECOND).isoformat(), "finish_by_at": (now + HOUR).isoformat()}
    for path in (VALIDATE, "/api/v1/gpu/jobs"):
        status, problem = await _post(gate, path, soon)
        assert (status, [found["field"] for found in problem["violations"]]) == (422, ["start_by_at", "finish_by_at"])
        assert "is expected to start at" in problem["violations"][0]["reason"]
    assert await _is_untouched(gate)


async def test_the_plan_with_two_jobs_is_shown(gate: Front) -> None:
    """What would be bought for each, each node once, and its price."""
    status, plan = await _post(gate, SIMULATE, {"jobs": [{**SMALL, "job_id": "one"}, {**SMALL, "job_id": "two"}]})

    assert status == 200
    assert [(job["job_id"], job["outcome"]) for job in plan["jobs"]] == [("one", "purchase"), ("two", "purchase")]
    (purchase,) = plan["purchases"]
    assert purchase["count"] == 2
    assert plan["price_micro_usd_per_hour"] == 2 * purchase["price_micro_usd_per_hour"] > 0
    assert "Buy " in plan["jobs"][0]["message"]
    assert await _is_untouched(gate)


async def test_a_job_that_would_wait_has_its_reason(tmp_path: Path) -> None:
    """The limit is named."""
    async with front(tmp_path, policy=policy(gpu_count_max=2)) as gate:
        await gate.tell(*cluster_for_sale())
        status, plan = await _post(gate, SIMULATE, {"jobs": [SMALL]})

    assert (status, plan["jobs"][0]["outcome"], plan["purchases"]) == (200, "deferred", [])
    assert "GPU" in plan["jobs"][0]["message"]


async def test_violations_of_all_jobs_are_named(gate: Front) -> None:
    """By the number of the job; an id counts once."""
    bad = {**SMALL, "priority": "urgent"}

    _, problem = await _post(gate, SIMULATE, {"jobs": [{**SMALL, "job_id": "a"}, bad, {**SMALL, "job_id": "a"}, bad]})

    fields = [violation["field"] for violation in problem["violations"]]
    assert fields == ["jobs[1].priority", "jobs[3].priority", "jobs"]


@pytest.mark.parametrize("jobs", [[], [SMALL] * 101])
async def test_the_number_of_jobs_is_limited(gate: Front, jobs: list[dict[str, Any]]) -> None:
    """One plan is made for at most a hundred."""
    status, problem = await _post(gate, SIMULATE, {"jobs": jobs})

    assert (status, [violation["field"] for violation in problem["violations"]]) == (422, ["jobs"])


async def test_quotas_refuse_a_dry_run_as_the_submission(tmp_path: Path) -> None:
    """With the type of quotas, by the number of the job; a full queue says when to retry."""
    rules = policy(quotas={"project_default": {"gpu_count_max": 1, "queue_count_max": 1}})
    two = {**SMALL, "gpu_requirements": {"gpu_count": 2}}
    one = {**SMALL, "gpu_requirements": {"gpu_count": 1}}
    async with front(tmp_path, policy=rules) as gate:
        for path, body, field in (
            (VALIDATE, two, "gpu_requirements.gpu_count"),
            (SIMULATE, {"jobs": [one, two]}, "jobs[1].gpu_requirements.gpu_count"),
        ):
            status, problem = await _post(gate, path, body)
            assert (status, problem["type"]) == (422, QUOTA_TYPE)
            assert [(each["field"], each["kind"]) for each in problem["violations"]] == [(field, "quota")]
        await gate.tell(job("first", project_id=SMALL["project_id"]))
        for path, body in ((VALIDATE, one), (SIMULATE, {"jobs": [one]})):
            status, problem = await _post(gate, path, body)
            assert (status, problem["type"]) == (429, QUOTA_TYPE)


class _Roles:
    """Grants the rights of a role of the chart, by the name of the caller."""

    async def caller(self, token: str) -> Caller | None:
        """Whoever asks is named by the token."""
        return Caller(name=token)

    async def allows(self, caller: Caller, right: ApiRight, namespace: str) -> bool:  # noqa: ARG002 - in each
        """Return whether the role has the right."""
        return right in ROLES[caller.name]


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_that_submits_may_try_a_job_and_no_other(tmp_path: Path, role: str) -> None:
    """Changes of other objects in the plan are shown to readers of the cluster alone."""
    roles = _Roles()
    async with (
        front(tmp_path, authenticators=[roles], rules=AccessRules(authorizer=roles)) as opened,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {role}"}) as http,
    ):
        await opened.tell(*cluster_for_sale())
        for path, sent in ((VALIDATE, SMALL), (SIMULATE, {"jobs": [SMALL]})):
            async with http.post(opened.url + path, json=sent) as response:
                answer = await response.json(content_type=None)
            if SUBMIT_JOBS in ROLES[role]:
                assert response.status == 200, answer
                assert path == VALIDATE or (answer["others"] is not None) == (READ_CLUSTER in ROLES[role])
            else:
                assert (response.status, answer["required"]["resource"]) == (403, "jobs")
        assert await _is_untouched(opened)


class _SubmitsOnly(_Roles):
    """Grants everything but fields that reach beyond the pod."""

    async def allows(self, caller: Caller, right: ApiRight, namespace: str) -> bool:  # noqa: ARG002 - of everybody
        """Return whether it is any other right."""
        return right != DANGEROUS_FIELDS


async def test_a_dry_run_needs_the_rights_of_the_job(tmp_path: Path) -> None:
    """Also that to fields which reach beyond the pod; it is no act, so the audit trail has no entry."""
    submits = _SubmitsOnly()
    body = templated_body(hostNetwork=True)
    async with (
        front(tmp_path, authenticators=[submits], rules=AccessRules(authorizer=submits)) as opened,
        aiohttp.ClientSession(headers={"Authorization": "Bearer anna"}) as http,
    ):
        opened.model.are_dangerous_fields_allowed = True
        for path, sent in ((VALIDATE, body), (SIMULATE, {"jobs": [body]})):
            async with http.post(opened.url + path, json=sent) as response:
                problem = await response.json(content_type=None)
            assert (response.status, problem["required"]["resource"]) == (403, "jobs/dangerousfields")
        assert (await opened.model.store.audit()).rows == ()
        async with http.post(f"{opened.url}/jobs", json=body) as response:
            assert response.status == 403
        (refused,) = (await opened.model.store.audit()).rows
        assert "create jobs.api.gpu-autoscaler.io/dangerousfields" in refused.document["reason"]
        assert await _is_untouched(opened)
