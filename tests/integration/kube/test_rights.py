"""Each right, role and entry point: the chart's roles on a real API server, requests over REST and by the command line.

The roles are bound in the namespace of one project and in that of the release, and nowhere else.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import aiohttp
import nats
import nats.js.errors
import pytest
from nats.aio.client import Client
from tests.controlplane.fixtures import kube, plane
from tests.controlplane.plane import ControlPlane
from tests.support.api_roles import (
    BODY_FILE,
    FOREIGN_PROJECT,
    MEMBERS,
    POOL,
    PROJECT,
    STRANGER,
    SYSTEM,
    call_for,
    give_account,
    give_objects,
    give_roles,
    has_right,
    run_command,
    until_known,
    user_of,
)
from tests.support.cluster import until
from tests.support.front import Front, front
from tests.support.oidc import AUDIENCE, serving_provider
from tests.support.stories import policy

from gpu_autoscaler.bus.client_subjects import ALL_CLIENT_REQUESTS, client_token
from gpu_autoscaler.bus.nats.requests import answering
from gpu_autoscaler.bus.permissions import password_variable
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler_services.api_rights import (
    API_GROUP,
    CANCEL_JOBS,
    CANCEL_OWN_JOBS,
    DANGEROUS_FIELDS,
    FREEZE,
    READ_COSTS,
    READ_ENV_VALUES,
    READ_FACTS,
    READ_JOBS,
    READ_PROJECT_COSTS,
    RIGHTS,
    SUBMIT_JOBS,
    ApiRight,
)
from gpu_autoscaler_services.background import background
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.gateway.access import AccessReviews, AccessRules, CheckedNamespaces
from gpu_autoscaler_services.gateway.auth import Authenticator, SharedTokens, TokenReviews
from gpu_autoscaler_services.gateway.client_requests import ClientRequests
from gpu_autoscaler_services.gateway.oidc import OidcOptions, OidcTokens
from gpu_autoscaler_services.gateway.spec import Gateway
from gpu_autoscaler_services.permissions import CLIENT, READER, fresh_passwords, users_file

__all__ = ["kube", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

SHARED = "a-shared-token-of-the-settings"
# Rights that a request needs besides, and that are checked first.
CHECKED_BEFORE = {DANGEROUS_FIELDS: SUBMIT_JOBS, READ_ENV_VALUES: READ_FACTS}
FORBIDDEN = "/problems/right-missing"


@pytest.fixture(scope="module")
def tokens(plane: ControlPlane) -> Mapping[str, str]:
    """A token of each member, with the audience of the gateway."""
    return give_roles(plane)


@asynccontextmanager
async def opened(
    folder: Path, kube: KubeClient, *, accepts_single_right: bool = True, further: Sequence[Authenticator] = ()
) -> AsyncIterator[Front]:
    """A gateway that asks the API server."""
    rules = AccessRules(
        authorizer=AccessReviews(kube, is_single_right_accepted=accepts_single_right),
        namespaces=CheckedNamespaces(namespace=SYSTEM),
    )
    authenticators: list[Authenticator] = [SharedTokens([SHARED]), *further, TokenReviews(kube)]
    pools = policy(pools=[{"name": POOL}])
    async with front(folder, authenticators=authenticators, rules=rules, policy=pools) as entry:
        entry.model.are_dangerous_fields_allowed = entry.model.are_env_values_shown = True
        await until(partial(_has_read_costs, entry))
        yield entry


async def _has_read_costs(entry: Front) -> bool:
    return entry.model.tail.has_read(CostAccrued.stream())


async def ask(entry: Front, token: str, right: ApiRight, project: str = PROJECT) -> tuple[int, dict[str, Any]]:
    """Send what asks for the right over REST; return status and body."""
    call = call_for(right, project)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.request(call.method, f"{entry.url}/api/v1/{call.path}", json=call.body) as response,
    ):
        return response.status, await response.json(content_type=None)


async def command(entry: Front, token: str, right: ApiRight) -> int:
    """Run what asks for the right as a command; return its exit code."""
    call = call_for(right)
    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(call.body))
        file.flush()
        words = (file.name if word == BODY_FILE else word for word in call.command)
        return await asyncio.to_thread(run, (*words, "--gateway", entry.url, "--token", token))


@pytest.mark.parametrize("member", MEMBERS)
async def test_each_role_has_its_rights_over_rest_and_no_others(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path, member: str
) -> None:
    """Every other right is refused, with the right and its namespace; a refused request changes nothing."""
    async with opened(tmp_path, kube) as entry:
        await give_objects(entry, member)
        for right in RIGHTS:
            before = await entry.bus.last_sequence("JOB"), await entry.bus.last_sequence("POLICY")
            status, body = await ask(entry, tokens[member], right)
            if has_right(member, right):
                assert status in {200, 202}, (right, body)
                continue
            assert (status, body["type"]) == (403, FORBIDDEN), (right, body)
            namespace = PROJECT if right.is_by_project else SYSTEM
            required = body["required"]
            assert (required["verb"], required["group"]) == (right.verb, API_GROUP)
            base = CHECKED_BEFORE.get(right, right)
            missing = right if has_right(member, base) else base
            assert (required["resource"], required["namespace"]) == (missing.resource, namespace)
            assert (await entry.bus.last_sequence("JOB"), await entry.bus.last_sequence("POLICY")) == before


@pytest.mark.parametrize("member", MEMBERS)
async def test_each_role_has_its_rights_on_the_command_line_and_no_others(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path, member: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails with the refusal of the gateway."""
    async with opened(tmp_path, kube) as entry:
        await give_objects(entry, member)
        for right in RIGHTS:
            code, told = await command(entry, tokens[member], right), capsys.readouterr()
            if has_right(member, right):
                assert code == Exit.OK, (right, told.err)
            else:
                assert code == Exit.NOT_ALLOWED, right
                assert f"{user_of(member)} may not " in told.err
                assert "grant it: kubectl create rolebinding" in told.err


@pytest.mark.parametrize("member", MEMBERS)
async def test_a_dry_run_needs_the_right_to_submit(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path, member: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over REST and on the command line, in the project; in another one nobody may try a job."""
    submits = has_right(member, SUBMIT_JOBS)
    call = call_for(SUBMIT_JOBS)
    async with opened(tmp_path, kube) as entry, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {tokens[member]}"}
        for project, is_allowed in ((PROJECT, submits), (FOREIGN_PROJECT, False)):
            body = call_for(SUBMIT_JOBS, project).body
            for path, sent in (("gpu/jobs:validate", body), ("plan:simulate", {"jobs": [body]})):
                async with http.post(f"{entry.url}/api/v1/{path}", json=sent, headers=headers) as response:
                    problem = await response.json(content_type=None)
                assert (response.status == 200) == is_allowed, problem
                if not is_allowed:
                    assert (response.status, problem["type"]) == (403, FORBIDDEN)
                    assert problem["required"]["namespace"] == project
        words = (*call.command, "--dry-run", "--gateway", entry.url, "--token", tokens[member])
        code, told = await asyncio.to_thread(run, words), capsys.readouterr()
        assert code == (Exit.OK if submits else Exit.NOT_ALLOWED), told.err
        assert submits or f"{user_of(member)} may not " in told.err
        assert await entry.bus.last_sequence("JOB") == 0


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("right", [right for right in RIGHTS if right.is_by_project])
async def test_a_role_in_one_project_is_none_in_another(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path, member: str, right: ApiRight
) -> None:
    """Not even for jobs that the member submitted there once. Whoever reads all spend reads that of each project."""
    is_granted = right == READ_PROJECT_COSTS and has_right(member, READ_COSTS)
    async with opened(tmp_path, kube) as entry:
        await give_objects(entry, member)
        status, body = await ask(entry, tokens[member], right, FOREIGN_PROJECT)
        if is_granted:
            assert status == 200
            assert [project["project_id"] for project in body["projects"]] == [FOREIGN_PROJECT]
        else:
            assert (status, body["required"]["namespace"]) == (403, FOREIGN_PROJECT)


@pytest.mark.parametrize("right", RIGHTS)
async def test_a_shared_token_has_all_rights_and_an_unknown_one_none(
    kube: KubeClient, tmp_path: Path, right: ApiRight
) -> None:
    """A token of the settings as in 0.2; a made-up one is no caller."""
    async with opened(tmp_path, kube) as entry:
        await give_objects(entry, STRANGER)
        assert (await ask(entry, "made-up", right))[0] == 401
        assert (await ask(entry, SHARED, right))[0] in {200, 202}


async def test_a_list_holds_the_projects_that_the_caller_may_read(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """Without a project those of readable ones, from memory and from the store; `mine` those of the caller."""
    async with opened(tmp_path, kube) as entry, aiohttp.ClientSession() as http:
        await give_objects(entry, "viewer")

        async def listed(member: str, query: str) -> set[str]:
            headers = {"Authorization": f"Bearer {tokens[member]}"}
            async with http.get(f"{entry.url}/jobs?{query}", headers=headers) as response:
                assert response.status == 200, await response.text()
                return {job["job_id"] for job in (await response.json())["items"]}

        for query in ("", "state=queued"):
            assert await listed("viewer", query) == {f"own-{PROJECT}", f"other-{PROJECT}"}
            assert await listed("viewer", f"{query}&mine=true") == {f"own-{PROJECT}"}
            assert await listed("viewer", f"{query}&submitted_by=somebody") == {f"other-{PROJECT}"}
            assert await listed(STRANGER, query) == set()
        assert (await ask(entry, tokens[STRANGER], READ_JOBS))[0] == 403


async def test_who_submitted_a_job_is_recorded_and_shown(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """The caller's name replaces whatever the request says; the submitter may cancel, another one may not."""
    async with opened(tmp_path, kube) as entry, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {tokens['submitter']}"}
        body = {**call_for(SUBMIT_JOBS).body, "submitted_by": "somebody"}
        async with http.post(f"{entry.url}/jobs", json=body, headers=headers) as response:
            accepted = await response.json()
        assert accepted["submitted_by"] == user_of("submitter")
        row = await entry.model.store.job(JobId(accepted["job_id"]))
        assert row is not None
        assert row.spec.submitted_by == user_of("submitter")
        async with http.delete(f"{entry.url}/jobs/{row.spec.job_id}", headers=headers) as response:
            assert response.status == 202
        assert (await ask(entry, tokens["submitter"], FREEZE))[0] == 403
        acts = [row.document for row in (await entry.model.store.audit(is_oldest_first=True)).rows]
        assert {(act["who"], act["authentication"]) for act in acts} == {(user_of("submitter"), "kubernetes")}
        assert [(act["verb"], act["outcome"]) for act in acts] == [
            ("submit", "allowed"), ("cancel", "allowed"), ("freeze", "refused")
        ]  # fmt: skip


async def test_a_job_is_explained_to_readers_of_its_project(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """By its id to them; by its name, which any project may use, to readers of the cluster."""
    async with opened(tmp_path, kube) as entry, aiohttp.ClientSession() as http:
        await give_objects(entry, "submitter")

        async def explained(member: str, name: str) -> int:
            headers = {"Authorization": f"Bearer {tokens[member]}"}
            async with http.get(f"{entry.url}/api/v1/why/job/{name}", headers=headers) as response:
                return response.status

        assert await explained("submitter", f"other-{PROJECT}") == 200
        assert await explained("submitter", f"other-{FOREIGN_PROJECT}") == 403
        assert await explained("submitter", "a-name") == 403
        assert await explained("viewer", f"other-{FOREIGN_PROJECT}") == 200


async def test_the_command_of_a_refusal_is_all_that_was_missing(
    plane: ControlPlane, kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """Run as it is, it binds the smallest role of the chart that has the right; the next request is answered."""
    for number, (right, role) in enumerate(
        ((CANCEL_OWN_JOBS, "submitter"), (CANCEL_JOBS, "operator"), (READ_JOBS, "submitter"), (FREEZE, "operator"))
    ):
        member = f"newcomer-{number}"
        token = give_account(plane, member)
        async with opened(tmp_path, kube) as entry:
            await give_objects(entry, member)
            _, body = await ask(entry, token, right)
            grant = body["required"]["grant"]
            assert grant in body["detail"]
            assert f"--clusterrole=gpu-autoscaler-{role} " in grant
            await run_command(plane, grant)
            until_known(plane, member, right, PROJECT if right.is_by_project else SYSTEM)
        async with opened(tmp_path, kube) as entry:
            await give_objects(entry, member)
            assert (await ask(entry, token, right))[0] in {200, 202}


async def test_the_single_right_of_0_2_keeps_working_until_it_is_switched_off(
    plane: ControlPlane, kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """A ClusterRoleBinding to the roles of 0.2 grants all reading, or everything, in every project."""
    holders = {name: give_account(plane, f"holder-{name}") for name in ("view", "edit")}
    for name in holders:
        account = f"--serviceaccount=default:holder-{name}"
        role = f"--clusterrole=gpu-autoscaler-jobs-{name}"
        plane.kubectl("create", "clusterrolebinding", f"holder-{name}", role, account)
        await until(partial(has_single_right, kube, f"holder-{name}", "create" if name == "edit" else "get"))
    for name, token in holders.items():
        async with opened(tmp_path, kube) as entry:
            await give_objects(entry, "nobody")
            for right in RIGHTS:
                expected = {200, 202} if name == "edit" or right.verb == "get" else {403}
                assert (await ask(entry, token, right, FOREIGN_PROJECT))[0] in expected, (name, right)
        async with opened(tmp_path, kube, accepts_single_right=False) as entry:
            await give_objects(entry, "nobody")
            for right in RIGHTS:
                assert (await ask(entry, token, right, FOREIGN_PROJECT))[0] == 403, (name, right)


async def has_single_right(kube: KubeClient, member: str, verb: str) -> bool:
    """Whether the server knows the right of 0.2; it hears of new roles a moment later."""
    attributes = {"group": "gpu-autoscaler.io", "resource": "jobs", "verb": verb}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
    spec = {"user": user_of(member), "resourceAttributes": attributes}
    answer = await kube.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", {**review, "spec": spec})
    return bool(answer["status"].get("allowed"))


async def test_a_role_of_a_project_is_not_the_single_right(
    plane: ControlPlane, kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """Bound in all namespaces, the submitter's role submits in every project, and freezes nothing."""
    token = give_account(plane, "everywhere")
    bound = ("--clusterrole=gpu-autoscaler-submitter", "--serviceaccount=default:everywhere")
    plane.kubectl("create", "clusterrolebinding", "everywhere", *bound)
    until_known(plane, "everywhere", SUBMIT_JOBS, FOREIGN_PROJECT)
    async with opened(tmp_path, kube) as entry:
        assert (await ask(entry, token, SUBMIT_JOBS, FOREIGN_PROJECT))[0] == 202
        assert (await ask(entry, token, FREEZE))[0] == 403


class Login(NamedTuple):
    """A user of a broker. Names with a colon do not fit into an address."""

    url: str
    user: str
    password: str

    async def connect(self, **options: Any) -> Client:  # noqa: ANN401 - as the client takes them
        """Connect once."""
        return await nats.connect(
            self.url, user=self.user, password=self.password, allow_reconnect=False, connect_timeout=20, **options
        )


@asynccontextmanager
async def opened_broker(entry: Front, kube: KubeClient, folder: Path) -> AsyncIterator[Mapping[str, Login]]:
    """A broker whose clients the gateway answers; yields logins: each member, trusted clients, readers."""
    names = [user_of(member) for member in MEMBERS]
    passwords = fresh_passwords() | {f"NATS_PASSWORD_CLIENT_{number}": f"p{number}" for number in range(len(names))}
    server = NatsServer(folder / "nats", settings=(users_file(clients=names),), variables=passwords)
    await server.start()
    try:
        users = {member: (user_of(member), f"p{number}") for number, member in enumerate(MEMBERS)}
        users |= {user: (user, passwords[password_variable(user)]) for user in (CLIENT, READER)}
        answers = server.url.replace("://", f"://{Gateway.name}:{passwords[password_variable(Gateway.name)]}@")
        rules = AccessRules(authorizer=AccessReviews(kube), namespaces=CheckedNamespaces(namespace=SYSTEM))
        requests = ClientRequests(entry.model, rules)
        receivers = {ALL_CLIENT_REQUESTS: requests.receive}
        async with (
            background(requests.run(), "client requests"),
            answering([answers], name="gateway-answers", group="gateway", receivers=receivers),
        ):
            yield {name: Login(server.url, *login) for name, login in users.items()}
    finally:
        await server.stop()


async def published(login: Login, subject: str, body: Mapping[str, Any]) -> int:
    """Publish as a client does; return 0 if it was acknowledged, the error's code, or 1: denied by the broker."""
    denied = asyncio.Event()

    async def on_error(error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            denied.set()

    client = await login.connect(error_cb=on_error)
    try:
        publishing = asyncio.create_task(client.jetstream().publish(subject, json.dumps(body).encode(), timeout=20))
        refusing = asyncio.create_task(denied.wait())
        await asyncio.wait({publishing, refusing}, return_when=asyncio.FIRST_COMPLETED)
        if denied.is_set():
            publishing.cancel()
            return 1
        refusing.cancel()
        try:
            await publishing
        except nats.js.errors.APIError as error:
            return error.code or -1
        return 0
    finally:
        await client.close()


def cancel_event(job_id: str) -> Mapping[str, Any]:
    """The cancellation of a job, as an event."""
    data = {"job_id": job_id, "requested_by": "somebody"}
    return {"specversion": "1.0", "id": f"c-{job_id}", "source": "/t", "type": "job.cancel_requested.v1", "data": data}


@pytest.mark.parametrize("member", MEMBERS)
async def test_each_role_has_its_rights_on_the_broker_and_no_others(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path, member: str
) -> None:
    """A client with a name of its own has the rights of the name; in another project none, and never another name."""
    async with opened(tmp_path, kube) as entry, opened_broker(entry, kube, tmp_path) as logins:
        await give_objects(entry, member)
        login, token, other = logins[member], client_token(user_of(member)), client_token("somebody")
        body = call_for(SUBMIT_JOBS).body
        asked = {
            SUBMIT_JOBS: (f"job.requested.{token}", {**body, "submitted_by": "somebody"}),
            DANGEROUS_FIELDS: (f"job.requested.{token}", call_for(DANGEROUS_FIELDS).body),
            CANCEL_OWN_JOBS: (f"job.cancel_requested.{token}", cancel_event(f"own-{PROJECT}")),
            CANCEL_JOBS: (f"job.cancel_requested.{token}", cancel_event(f"other-{PROJECT}")),
        }
        before = await entry.bus.last_sequence("JOB")
        for right, (subject, sent) in asked.items():
            assert await published(login, subject, sent) == (0 if has_right(member, right) else 403), right
        granted_count = sum(has_right(member, right) for right in asked)
        facts = [await fact_at(entry, before + number) for number in range(1, granted_count + 1)]
        for fact in facts:
            by = fact.submitted_by if isinstance(fact, JobRequested) else getattr(fact, "requested_by", None)
            assert by == user_of(member)
        assert await entry.bus.last_sequence("JOB") == before + granted_count

        foreign = call_for(SUBMIT_JOBS, FOREIGN_PROJECT).body
        assert await published(login, f"job.requested.{token}", foreign) == 403
        for subject in (
            *(f"{root}.{other}" for root in ("job.requested", "job.cancel_requested")),
            *(f"client_request.{kind}.{other}" for kind in ("job_requested", "job_cancel_requested")),
            "job.requested", "job.cancel_requested", "demand.reported", "policy.directive_given",
        ):  # fmt: skip
            assert await published(login, subject, body) == 1, subject
        assert await published(login, f"job.requested.{token}", {**body, "members": -1}) in {403, 422}


async def test_trusted_clients_name_nobody_and_readers_ask_for_nothing(
    kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """The user `client` publishes on the subjects of 0.2 as before, and in no name; `reader` on none."""
    named = tuple(f"{root}.{client_token('anna')}" for root in ("job.requested", "job.cancel_requested"))
    plain = ("job.requested", "job.cancel_requested", "demand.reported")
    async with opened(tmp_path, kube) as entry, opened_broker(entry, kube, tmp_path) as logins:
        operator = await logins[CLIENT].connect()
        for subject in plain:  # no stream here: the broker lets it pass, and nobody acknowledges
            await operator.publish(subject, b"{}")
        await operator.flush()
        assert operator.last_error is None
        await operator.close()
        for user, denied in ((CLIENT, (*named, "policy.directive_given")), (READER, (*named, *plain))):
            for subject in denied:
                assert await published(logins[user], subject, {}) == 1, (user, subject)


async def fact_at(entry: Front, sequence: int) -> Fact:
    """The fact on the stream of jobs."""
    message = await entry.bus.message_at("JOB", sequence)
    assert message is not None
    return decode_message(message, entry.model.clock).fact


async def test_users_and_groups_of_an_identity_provider_have_the_roles_that_are_bound_to_them(
    plane: ControlPlane, kube: KubeClient, tokens: Mapping[str, str], tmp_path: Path
) -> None:
    """By their prefixed names, beside tokens of Kubernetes; a group of Kubernetes' own cannot be claimed."""
    for kind, name in (("user", "oidc:anna"), ("group", "oidc:operators")):
        role = "submitter" if kind == "user" else "operator"
        for namespace in (PROJECT, SYSTEM):
            names = (f"--namespace={namespace}", f"--clusterrole=gpu-autoscaler-{role}", f"--{kind}={name}")
            plane.kubectl("create", "rolebinding", name.replace(":", "-"), *names)
    async with serving_provider(tmp_path) as provider:
        options = OidcOptions(issuer=provider.url, audience=AUDIENCE, ca_path=str(provider.ca))
        async with opened(tmp_path, kube, further=(OidcTokens(options),)) as entry:
            await give_objects(entry, "nobody")
            anna, bob = provider.token(), provider.token(sub="bob", groups=["operators"])
            mallory = provider.token(sub="mallory", groups=["system:masters", "masters"])
            await until(partial(_is_answered, entry, bob, FREEZE))
            for right in RIGHTS:
                for token, role in ((anna, "submitter"), (bob, "operator"), (mallory, STRANGER)):
                    is_foreign = right == CANCEL_OWN_JOBS and role == "submitter"  # the job is somebody else's
                    expected = {200, 202} if has_right(role, right) and not is_foreign else {403}
                    assert (await ask(entry, token, right))[0] in expected, (role, right)
            for refused in (provider.token(exp=1), provider.token(aud="elsewhere")):
                assert (await ask(entry, refused, READ_JOBS))[0] == 401
            assert (await ask(entry, tokens["viewer"], READ_JOBS))[0] == 200
            status, job = await ask(entry, anna, SUBMIT_JOBS)
            assert (status, job["submitted_by"]) == (202, "oidc:anna")
            (last,) = (await entry.model.store.audit(count_max=1)).rows
            assert (last.document["who"], last.document["authentication"]) == ("oidc:anna", "oidc")


async def _is_answered(entry: Front, token: str, right: ApiRight) -> bool:
    """Whether the right is granted; a refusal is remembered for some seconds."""
    return (await ask(entry, token, right))[0] != 403


async def test_a_token_for_the_api_server_is_accepted_unless_switched_off(
    plane: ControlPlane, kube: KubeClient, tokens: Mapping[str, str]
) -> None:
    """A token of our audience is no token of the API server, which refuses it."""
    clusters = plane.kubectl("create", "token", "viewer").strip()
    for token, accepts, is_known in ((tokens["viewer"], False, True), (clusters, True, True), (clusters, False, False)):
        caller = await TokenReviews(kube, is_cluster_token_accepted=accepts).caller(token)
        assert (caller is not None and caller.name == user_of("viewer")) is is_known
    assert (
        await TokenReviews(kube, audience="elsewhere.example", is_cluster_token_accepted=False).caller(tokens["viewer"])
        is None
    )
