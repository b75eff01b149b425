"""The chart's API roles on a real API server, service accounts that have them, and what asks for each right."""

import asyncio
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import yaml
from tests.chart.charting import RELEASE, of_kind, rendered
from tests.controlplane.plane import ControlPlane
from tests.support.front import Front
from tests.support.outside import request_body
from tests.support.pod_templates import templated_body
from tests.support.stories import TimedFact, job

from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler_services import api_rights
from gpu_autoscaler_services.api_rights import ROLES, ApiRight
from gpu_autoscaler_services.gateway.auth import TOKEN_AUDIENCE

# The project's namespace has the project's name; what belongs to no project is checked in the release's.
PROJECT, FOREIGN_PROJECT, SYSTEM = "research", "vision", "gpu-system"
STRANGER = "stranger"  # has no role
MEMBERS = (*ROLES, STRANGER)
KNOWN_SECONDS_MAX = 60.0
POOL = "general"
BODY_FILE = "the file of the body"  # in a command


def user_of(member: str) -> str:
    """The user name of a member's service account."""
    return f"system:serviceaccount:default:{member}"


def has_right(member: str, right: ApiRight) -> bool:
    """Whether the member may do this to an object of the project; who cancels any job cancels an own one as well."""
    granted = ROLES.get(member, ())
    return right in granted or (right == api_rights.CANCEL_OWN_JOBS and api_rights.CANCEL_JOBS in granted)


def give_roles(plane: ControlPlane) -> Mapping[str, str]:
    """Make the chart's roles, and a service account for each that has it in both namespaces; return their tokens."""
    roles = [one for one in rendered("cluster") if one["kind"] == "ClusterRole"]
    plane.kubectl("apply", "--filename", "-", text=yaml.safe_dump_all(list(of_kind(roles, "ClusterRole").values())))
    for namespace in (PROJECT, FOREIGN_PROJECT, SYSTEM):
        plane.kubectl("create", "namespace", namespace)
    tokens = {}
    for member in MEMBERS:
        tokens[member] = give_account(plane, member)
        for namespace in (PROJECT, SYSTEM) if member in ROLES else ():
            bind(plane, member, role=member, namespace=namespace)
    return tokens


def give_account(plane: ControlPlane, name: str) -> str:
    """Make a service account; return a token of it for the gateway."""
    plane.kubectl("create", "serviceaccount", name)
    return plane.kubectl("create", "token", name, f"--audience={TOKEN_AUDIENCE}").strip()


def bind(plane: ControlPlane, member: str, *, role: str, namespace: str) -> None:
    """Bind a role of the chart in a namespace; returns when the server knows it."""
    account, names = f"--serviceaccount=default:{member}", f"--namespace={namespace}"
    plane.kubectl("create", "rolebinding", f"{member}-{role}", names, f"--clusterrole={RELEASE}-{role}", account)
    until_known(plane, member, ROLES[role][0], namespace)


def until_known(plane: ControlPlane, member: str, right: ApiRight, namespace: str) -> None:
    """Wait until the server lets the member do this: it hears of new roles a moment later."""
    main, _, sub = right.resource.partition("/")
    deadline = time.monotonic() + KNOWN_SECONDS_MAX
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user_of(member),
            "resourceAttributes": {
                "verb": right.verb,
                "resource": main,
                "subresource": sub,
                "group": api_rights.API_GROUP,
                "namespace": namespace,
            },
        },
    }
    while True:
        answer = plane.kubectl("create", "--filename", "-", "--output=json", text=json.dumps(review))
        if json.loads(answer)["status"].get("allowed"):
            return
        assert time.monotonic() < deadline, f"the server does not know the right of {member} to {right.qualified}"
        time.sleep(0.05)


async def give_objects(gate: Front, member: str) -> None:
    """Record a node's worth of objects: jobs of both projects by somebody else and by the member, and a freeze."""
    now = gate.model.clock.now()
    for project in (PROJECT, FOREIGN_PROJECT):
        for owner, submitted_by in (("own", user_of(member)), ("other", "somebody")):
            story = job(f"{owner}-{project}", project_id=project, submitted_by=submitted_by, at=now)
            await gate.tell(story)
            (queued,) = (told.fact for told in story if isinstance(told.fact, JobQueued))
            await gate.model.store.accept_job(queued.spec, request_digest=owner, accepted_at=now)
    given = PolicyDirectiveGiven(
        directive=Freeze(), reason="upkeep", given_by="anna", given_at=now, until=now + timedelta(hours=1)
    )
    await gate.tell((TimedFact(given, now),))


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request over REST that needs one right, and the command line that sends the same."""

    method: str
    path: str
    body: Any = None
    command: Sequence[str] = ()


def _in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


def _directive(**directive: object) -> Mapping[str, object]:
    return {"directive": directive, "reason": "upkeep", "until": _in_an_hour()}


def call_for(right: ApiRight, project: str = PROJECT) -> Call:
    """Return what asks for this right."""
    submit = ("jobs", "submit", "--name", "t", "--project", project, "--image", "registry.example/t:1", "--gpus", "1")
    demand = {"source": "kafka", "shape": {"gpu_count": 1}, "count": 1, "until": _in_an_hour()}
    until = ("--reason", "upkeep", "--for", "1h")
    over = {"directive": "override", "nodes_count_max": 3}
    own, other = f"gpu/jobs/own-{project}", f"gpu/jobs/other-{project}"
    calls = {
        api_rights.READ_JOBS: Call(method="GET", path=other, command=("jobs", "show", f"other-{project}")),
        api_rights.SUBMIT_JOBS: Call(
            method="POST", path="gpu/jobs", body=request_body(project_id=project), command=submit
        ),
        api_rights.DANGEROUS_FIELDS: Call(
            method="POST",
            path="gpu/jobs",
            body={**templated_body(hostNetwork=True), "project_id": project},
            command=("jobs", "submit", "--file", BODY_FILE),
        ),
        api_rights.CANCEL_OWN_JOBS: Call(method="DELETE", path=own, command=("jobs", "cancel", f"own-{project}")),
        api_rights.CANCEL_JOBS: Call(method="DELETE", path=other, command=("jobs", "cancel", f"other-{project}")),
        api_rights.READ_DIRECTIVES: Call(method="GET", path="directives", command=("directives",)),
        api_rights.FREEZE: Call(
            method="POST", path="directives", body=_directive(directive="freeze"), command=("freeze", *until)
        ),
        api_rights.PAUSE: Call(
            method="POST",
            path="directives",
            body=_directive(directive="pause", pool=POOL),
            command=("pause", POOL, *until),
        ),
        api_rights.OVERRIDE: Call(
            method="POST",
            path="directives",
            body=_directive(**over),
            command=("override", "--at-most", "3", "--unit", "nodes", *until),
        ),
        api_rights.RESUME: Call(method="DELETE", path="directives/freeze", command=("resume", "--reason", "done")),
        api_rights.READ_DEMAND: Call(method="GET", path="demand", command=("demand", "list")),
        api_rights.REPORT_DEMAND: Call(
            method="POST",
            path="demand",
            body=demand,
            command=("demand", "report", "kafka", "--count", "1", "--gpus", "1"),
        ),
        api_rights.READ_COSTS: Call(method="GET", path="budget", command=("budget",)),
        api_rights.READ_PROJECT_COSTS: Call(
            method="GET", path=f"cost?project_id={project}", command=("cost", "--project", project)
        ),
        api_rights.READ_SETTINGS: Call(method="GET", path="shadow", command=("shadow",)),
        api_rights.READ_CLUSTER: Call(method="GET", path="nodes", command=("nodes",)),
        api_rights.READ_FACTS: Call(method="GET", path="facts", command=("events",)),
        api_rights.READ_ENV_VALUES: Call(method="GET", path="facts?env=true", command=("events", "--env")),
        api_rights.READ_AUDIT: Call(method="GET", path="audit", command=("audit", "list")),
    }
    return calls[right]


async def run_command(plane: ControlPlane, command: str) -> None:
    """Run a kubectl command of a refusal as it is."""
    await asyncio.to_thread(plane.kubectl, *shlex.split(command)[1:])
