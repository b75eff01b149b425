"""Bad input at every entry point: all violations at once, each with field and remedy, and nothing half-created.

A row is an entry point, a column a kind of bad input. `text` holds what the sender reads.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml
from tests.services.gateway.test_client_requests import asked
from tests.services.gateway.test_jobs import BODY
from tests.support.cluster import running_cluster
from tests.support.front import Front, front
from tests.support.kube_policies import policy as autoscaling_policy
from tests.support.sdk_clients import ClientKind, sdk
from tests.support.stories import T0, given, pod, policy

from gpu_autoscaler.bus.client_subjects import client_subjects
from gpu_autoscaler.core.explain.kube_events import announcements
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.events import ingress
from gpu_autoscaler.events.envelope import recorded
from gpu_autoscaler.events.job import JobRejected
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.document_errors import ERRORS_COUNT_MAX
from gpu_autoscaler.model.errors import ConfigError, InvalidFact
from gpu_autoscaler.runtime.config import load_settings
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.gateway.access import AccessRules, Caller
from gpu_autoscaler_services.gateway.client_requests import ClientRequests
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import Scheduler
from gpu_manager_sdk.errors import GPUManagerError

WRITER, READER = "writer", "reader"
UNTIL = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
QUOTA = policy(quotas={"project_default": {"gpu_count_max": 4, "job_duration_hours_max": 30.0}})


class Case(NamedTuple):
    """Bad input, and how it is refused."""

    payload: bytes
    type: str  # name of the problem's type
    fields: tuple[str, ...] = ()  # every one that is wrong


def _case(kind: str, body: Mapping[str, Any], *fields: str) -> Case:
    return Case(json.dumps(body).encode(), kind, fields)


_GPUS = {"gpu_count": 4, "gpu_type": "A100"}
JOBS: Mapping[str, Case] = {
    "unreadable": Case(b'{"job_name": ', "malformed-request"),
    "fields": _case(
        "invalid-request",
        {**{key: BODY[key] for key in BODY if key != "project_id"}, "preemptable": True, "members": "two",
         "gpu_requirements": {"gpu_count": 1.5, "gpu_kind": "A100"}},
        "project_id", "preemptable", "members", "gpu_requirements.gpu_count", "gpu_requirements.gpu_kind",
    ),
    # Valid otherwise: what is misspelled would be lost.
    "unknown": _case(
        "invalid-request", {**BODY, "max_duration_hour": 1, "gpu_requirements": {**_GPUS, "gpu_kind": "A100"}},
        "max_duration_hour", "gpu_requirements.gpu_kind",
    ),
    "rules": _case(
        "rule-violated",
        {**BODY, "job_name": " ", "members": 0, "priority": "urgent", "resources": {"cpu": "lots"},
         "budget_limit_usd": -1, "pod_labels": {"app.kubernetes.io/name": "x"},
         "pod_annotations": {labels.EXPECTED_END: "tomorrow"}, "dangerous_fields_allowed": True},
        "job_name", "members", "priority", "resources.cpu", "budget_limit_usd", "pod_labels", "pod_annotations",
    ),
    "quota": _case(
        "quota-exceeded", {**BODY, "gpu_requirements": {**_GPUS, "gpu_count": 5}, "max_duration_hours": 40},
        "gpu_requirements.gpu_count", "max_duration_hours",
    ),
    "right": _case("right-missing", BODY),
}  # fmt: skip
_REPORT = {"source": "kafka", "shape": {"gpu_count": 1}, "count": 1, "until": UNTIL}
DEMAND: Mapping[str, Case] = {
    "unreadable": Case(b"[", "malformed-request"),
    "fields": _case("invalid-request", {"source": "kafka", "shape": {"gpus": 1, "gpu_count": "one"}, "count": 0.5},
                    "until", "shape.gpus", "shape.gpu_count", "count"),
    "unknown": _case("invalid-request", {**_REPORT, "nodes": 1, "shape": {"gpu_count": 1, "gpu_kind": "A100"}},
                     "nodes", "shape.gpu_kind"),
    "rules": _case(
        "rule-violated",
        {"source": "", "shape": {"gpu_count": -1, "cpu": "lots"}, "count": -1, "until": "2020-01-01T00:00:00Z"},
        "source", "shape.gpu_count", "shape.cpu", "count", "until",
    ),
    "right": _case("right-missing", _REPORT),
}  # fmt: skip
_FREEZE = {"directive": {"directive": "freeze"}, "reason": "maintenance", "until": UNTIL}
DIRECTIVES: Mapping[str, Case] = {
    "unreadable": Case(b"\xff", "malformed-request"),
    "fields": _case("invalid-request", {"directive": {"directive": "pause", "pol": "a"}, "why": "x", "until": 3},
                    "directive.pool", "directive.pol", "why", "reason", "until"),
    "rules": _case(
        "rule-violated",
        {"directive": {"directive": "override", "pool": "nowhere", "gpu_model": "H10", "nodes_count_min": 2,
                       "nodes_count_max": 1}, "reason": " ", "until": "2020-01-01T00:00:00Z"},
        "directive.pool", "directive.gpu_model", "directive.nodes_count_min", "reason", "until",
    ),
    "right": _case("right-missing", _FREEZE),
}  # fmt: skip


class Refusal(NamedTuple):
    """What the sender of bad input learns. `type`: of the problem; empty where the entry point has no types."""

    type: str
    reasons: Mapping[str, str]  # by field, where violations are structured
    text: str


class Here(NamedTuple):
    """A gateway, and where the command line reads and writes."""

    gate: Front
    folder: Path
    output: pytest.CaptureFixture[str]


Send = Callable[[Here, bytes, str], Awaitable[Refusal]]  # the payload and the caller's name


class _Roles:
    """Grants everything to the writer and nothing to the reader."""

    async def caller(self, token: str) -> Caller | None:
        return Caller(name=token)

    async def allows(self, caller: Caller, right: object, namespace: str) -> bool:  # noqa: ARG002 - of everybody
        return caller.name == WRITER


ROLES = _Roles()


@pytest.fixture
async def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Here]:
    """A gateway with quotas and rights, which the command line finds."""
    async with front(tmp_path, policy=QUOTA, authenticators=[ROLES], rules=AccessRules(authorizer=ROLES)) as opened:
        monkeypatch.setenv("GPU_AUTOSCALER_GATEWAY", opened.url)
        yield Here(opened, tmp_path, capsys)


def _refusal(problem: Mapping[str, Any]) -> Refusal:
    reasons = {violation["field"]: violation["reason"] for violation in problem.get("violations", ())}
    return Refusal(problem["type"].rpartition("/")[2], reasons, json.dumps(problem))


def over_rest(path: str, around: Callable[[bytes], bytes] = bytes) -> Send:
    """Return a POST to the path."""

    async def send(here: Here, payload: bytes, caller: str) -> Refusal:
        headers = {"Authorization": f"Bearer {caller}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{here.gate.url}/api/v1/{path}", data=around(payload), headers=headers) as response,
        ):
            return _refusal(await response.json(content_type=None))

    return send


async def by_named_client(here: Here, payload: bytes, caller: str) -> Refusal:
    """Send on `job.requested.<client>`."""
    requests = ClientRequests(here.gate.model, AccessRules(authorizer=ROLES))
    answer = await asked(requests, client_subjects(caller)[0], payload)
    refusal = _refusal(answer["problem"])
    # Clients of JetStream show the description alone: it has the type and every field, too.
    assert answer["error"]["description"].endswith(f"(/problems/{refusal.type})")
    assert all(f"{field}: {why}" in answer["error"]["description"] for field, why in refusal.reasons.items())
    return refusal


def on_stream(subject: str) -> Send:
    """Return how a trusted publisher's message is refused: by the reader, or by the scheduler."""

    async def send(here: Here, payload: bytes, caller: str) -> Refusal:
        now = here.gate.model.clock.now()
        try:
            envelope = ingress.read(subject, payload, message_id="m", arrived_at=lambda: now)
        except InvalidFact as error:
            return Refusal("", {}, str(error))
        async with running_cluster(clock_factor=1.0) as cluster:
            binder = Binder(cluster.kube, "default")
            scheduler = Scheduler(StateView(), QUOTA, here.gate.model.store, binder, lambda: now)
            outcome = await scheduler.on_fact(recorded(envelope, subject.partition(".")[0].upper(), 1, now))
        assert isinstance(outcome, Outcome)
        assert outcome.set_aside_reason is not None
        rejected = [fact for fact in outcome.facts if isinstance(fact, JobRejected)]
        assert len(rejected) == len(outcome.facts) == (subject == "job.requested")
        violations = [violation for fact in rejected for violation in fact.violations]
        is_quota = bool(violations) and all(violation.kind == "quota" for violation in violations)
        reasons = {violation.field: violation.reason for violation in violations}
        return Refusal("quota-exceeded" if is_quota else "", reasons, outcome.set_aside_reason)

    return send


def by_sdk(kind: ClientKind, method: str) -> Send:
    """Return a call of the SDK's client."""

    async def send(here: Here, payload: bytes, caller: str) -> Refusal:
        arguments = json.loads(payload)
        named = (arguments.pop("directive"),) if method == "direct" else (arguments,)
        options = arguments if method == "direct" else {}
        async with sdk(kind, here.gate.url, token=caller) as client:
            with pytest.raises(GPUManagerError) as refused:
                await client.do(method, *named, **options)
        error = refused.value
        reasons = {violation.field: violation.reason for violation in error.violations}
        assert error.is_quota == error.type.endswith("quota-exceeded")
        return Refusal(error.type.rpartition("/")[2], reasons, str(error))

    return send


_EXITS = {Exit.QUOTA_EXCEEDED: "quota-exceeded", Exit.NOT_ALLOWED: "right-missing", Exit.USAGE: ""}


def by_command(*options: str) -> Send:
    """Return a command line. Its exit code tells quotas and rights from errors in the request."""

    async def send(here: Here, payload: bytes, caller: str) -> Refusal:
        (here.folder / "request.json").write_bytes(payload)
        file = ("-f", str(here.folder / "request.json")) if options[0] == "jobs" else ()
        code = await asyncio.to_thread(run, [*options, *file, "--token", caller])
        read = here.output.readouterr()
        assert read.out == ""
        return Refusal(_EXITS[Exit(code)], {}, read.err)

    return send


def _in_list(payload: bytes) -> bytes:
    return b'{"jobs": [' + payload + b"]}"


REPORT = ("demand", "report", "", "--count", "-1", "--gpus", "-1", "--cpu", "lots", "--seconds", "-60")
OVERRIDE = ("override", "--pool", "nowhere", "--gpu-type", "H10", "--at-least", "2", "--at-most", "1", "--for", "40d",
            "--reason", " ")  # fmt: skip
# Entry point -> how it is used, its bad input, the columns without a cell and why.
ENTRY_POINTS: Mapping[str, tuple[Send, Mapping[str, Case], tuple[str, ...]]] = {
    "POST /gpu/jobs": (over_rest("gpu/jobs"), JOBS, ()),
    "POST /gpu/jobs:validate": (over_rest("gpu/jobs:validate"), JOBS, ()),
    "POST /plan:simulate": (over_rest("plan:simulate", _in_list), JOBS, ()),
    "POST /demand": (over_rest("demand"), DEMAND, ()),
    "POST /directives": (over_rest("directives"), DIRECTIVES, ()),
    # Only trusted users of the broker may publish on these two.
    "NATS job.requested": (on_stream("job.requested"), JOBS, ("right",)),
    "NATS demand.reported": (on_stream("demand.reported"), DEMAND, ("right",)),
    "NATS job.requested.<client>": (by_named_client, JOBS, ()),
    # Python objects are always readable.
    "SDK submit": (by_sdk("blocking", "submit"), JOBS, ("unreadable",)),
    "SDK submit, asynchronous": (by_sdk("asynchronous", "submit"), JOBS, ("unreadable",)),
    "SDK validate": (by_sdk("blocking", "validate"), JOBS, ("unreadable",)),
    "SDK simulate": (by_sdk("blocking", "simulate"), JOBS, ("unreadable",)),
    "SDK report_demand": (by_sdk("blocking", "report_demand"), DEMAND, ("unreadable",)),
    "SDK direct": (by_sdk("blocking", "direct"), DIRECTIVES, ("unreadable", "fields")),  # its arguments are the fields
    "CLI jobs submit": (by_command("jobs", "submit"), JOBS, ()),
    "CLI jobs submit --dry-run": (by_command("jobs", "submit", "--dry-run"), JOBS, ()),
    # Options are the form.
    "CLI demand report": (by_command(*REPORT), DEMAND, ("unreadable", "fields", "unknown")),
    "CLI override": (by_command(*OVERRIDE), DIRECTIVES, ("unreadable", "fields")),
}
# The valid form, or the next step.
REMEDY = re.compile(r"; |: |must be |\b(?:set|use|add|remove|correct|request|raise|at most|at least)\b")


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
async def test_bad_input_is_refused_with_every_violation(here: Here, entry_point: str) -> None:
    """By field, with its remedy and the type of the refusal; nothing is published, stored or in force afterwards."""
    send, cases, left_out = ENTRY_POINTS[entry_point]
    for column in cases.keys() - set(left_out):
        case = cases[column]
        refusal = await send(here, case.payload, READER if column == "right" else WRITER)
        cell = f"{entry_point}, {column}: {refusal}"
        if refusal.type or column in ("quota", "right"):
            assert refusal.type == case.type, cell
        reasons = {field.removeprefix("jobs[0]."): reason for field, reason in refusal.reasons.items()}
        for field in case.fields:
            assert field in reasons or (not reasons and f"{field}: " in refusal.text), cell
        assert all(REMEDY.search(reason) for reason in reasons.values()), cell
        bus, store = here.gate.model.bus, here.gate.model.store
        assert [await bus.last_sequence(stream) for stream in ("JOB", "DEMAND", "POLICY")] == [0, 0, 0], cell
        assert not await store.unfinished_jobs(), cell


async def test_of_any_number_of_violations_the_first_are_listed(here: Here) -> None:
    """And the sender reads that there are more."""
    refusal = await over_rest("gpu/jobs")(here, json.dumps(dict.fromkeys(map(str, range(10_000)), 1)).encode(), WRITER)
    assert refusal.type == "invalid-request"
    assert len(refusal.reasons) == ERRORS_COUNT_MAX
    assert "(more are not listed)" in refusal.text


# ---- files, manifests, settings: read before anything runs

POLICY_FILE = """
idle_second = 6
nodes_count_max = "many"
[[pools]]
nmae = "a"
[[pools]]
name = 1
"""
CONTRADICTORY_POLICY = """
nodes_count_min = 5
nodes_count_max = 2
boot_seconds_max = 0
[[pools]]
name = "a"
gpu_models = ["H10"]
"""
SETTINGS = '[nats]\nulr = "x"\n[gateway]\nport = 70000\n[log]\nlevel = 3\n[storage]\nx = 1\n'
READ: Mapping[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "policy file, fields": (
        load_policy, POLICY_FILE,
        ("did you mean 'idle_seconds'?", "nodes_count_max: Expected `int`, got `str`", "pools[0].name: missing",
         "pools[0].nmae: unknown key 'nmae'; did you mean 'name'?", "pools[1].name: Expected `str`, got `int`"),
    ),
    "policy file, rules": (load_policy, CONTRADICTORY_POLICY, ("nodes_count_min", "boot_seconds_max",
                                                               "pools[0].gpu_models")),
    "policy file, unreadable": (load_policy, "= what", ("invalid TOML",)),
    "settings, fields": (
        lambda path: load_settings(path, {"GPU_AUTOSCALER_HTTP_PORT": "many", "GPU_AUTOSCALER_NATS_ULR": "x"}),
        SETTINGS,
        ("nats.ulr: unknown key 'ulr'; did you mean 'url'?", "gateway.port: Expected `int` <= 65535",
         "log.level: Expected `str`, got `int`", "storage: unknown key 'storage'; did you mean 'store'?",
         "GPU_AUTOSCALER_HTTP_PORT: Expected `int`",
         "GPU_AUTOSCALER_NATS_ULR: unknown key 'NATS_ULR'; did you mean 'NATS_URL'?"),
    ),
    "settings, rules": (
        lambda path: load_settings(path, {"GPU_AUTOSCALER_GATEWAY_OIDC_ISSUER": "http://a",
                                          "GPU_AUTOSCALER_STORE_URL": "mysql://x"}),
        '[gateway]\nproject_namespaces = ["research"]\n[kube]\nurl = "a:1"\n',
        ("gateway.oidc_issuer", "store.url", "gateway.project_namespaces", "kube.url"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_bad_file_is_refused_with_every_violation(name: str, tmp_path: Path) -> None:
    """By key, with its remedy; the process that reads it does not start, or keeps what it had."""
    read, text, fields = READ[name]
    (tmp_path / "file.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "file.toml")
    _assert_all(refused.value.violations, fields)


MANIFESTS: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fields": ({"maxNode": 3, "scaleUpThreshold": "high", "nodePools": [{"nmae": "a"}]},
               ("spec.maxNode", "spec.scaleUpThreshold", "spec.nodePools[0].nmae", "spec.nodePools[0].name")),
    "rules": ({"minNodes": 5, "maxNodes": 2, "scaleUpThreshold": 0.2, "scaleDownThreshold": 0.8,
               "nodePools": [{"name": "a", "minSize": 3, "maxSize": 1}, {"name": "b", "gpuType": "H10"}]},
              ("minNodes", "scaleDownThreshold", "minSize", "nodePools b")),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANIFESTS)
async def test_a_bad_manifest_is_refused_with_every_violation(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `policy check`, which has the rules of the API server and of the policy watcher."""
    spec, fields = MANIFESTS[kind]
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(autoscaling_policy("team", **spec)))
    assert run(["policy", "check", str(tmp_path / "file.yaml")]) == Exit.USAGE
    _assert_all(capsys.readouterr().err.splitlines()[1:], fields)


def _assert_all(violations: Sequence[str], fields: Sequence[str]) -> None:
    for field in fields:
        assert any(field in violation for violation in violations), (field, violations)
    assert all(REMEDY.search(violation) for violation in violations), violations


# ---- annotations of pods that others create

ANNOTATIONS = {
    labels.CHECKPOINTED_AT: "yesterday",
    labels.CHECKPOINT_HOOK: "/save",
    labels.DO_NOT_DISRUPT: "forever",
    labels.EVICTION_PRIORITY: "urgent",
    labels.EXPECTED_END: "2026-11-27T18:00:00",
    labels.IDLE_ALLOWED: "yes",
    labels.POD_GROUP_TOTAL_COUNT: "all",
    labels.SAFE_TO_EVICT: "1",
    labels.START_BY: "soon",
}


def test_bad_annotations_are_named_by_why_and_an_event() -> None:
    """All of them, each with its form; a pod with valid ones has neither."""
    state = given(pod("bad", annotations=ANNOTATIONS), pod("good", annotations={labels.DO_NOT_DISRUPT: "1h30m"}))
    status = StatusView.of(state, DEFAULT_POLICY, T0, None)
    (event,) = (entry for entry in announcements(status) if entry.reason == "InvalidAnnotation")
    assert (event.name, event.is_warning) == ("bad", True)
    for key, value in ANNOTATIONS.items():
        for text in (event.message, pod_line("bad", status)):
            assert re.search(rf"Annotation {re.escape(key)} is '{re.escape(value)}'; (?:must be|use) ", text), text
    assert "Annotation" not in pod_line("good", status)
