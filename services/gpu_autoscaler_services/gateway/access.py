"""What an authenticated caller may do: each right is checked in the namespace of its project, or of the release.

Kubernetes decides, by SubjectAccessReview. Bearers of shared tokens, and callers of a gateway on loopback without
authentication, have all rights.
"""

import asyncio
import re
import shlex
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from aiohttp import web

from gpu_autoscaler.model.audit import Authentication, EntryPoint
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.api_rights import API_GROUP, ApiRight, smallest_role
from gpu_autoscaler_services.gateway.problems import FORBIDDEN_TYPE, Problem, RequiredRight

# Cache times of a review. A refusal is asked again soon, so that a new grant takes effect; Kubernetes' own webhook
# cache keeps grants for 5 minutes and refusals for 30 s.
GRANT_SECONDS_MAX = 60.0
REFUSAL_SECONDS_MAX = 5.0
REVIEWS_COUNT_MAX = 10_000
REVIEWS_AT_ONCE_MAX = 16  # calls of the API server
_ALL_NAMESPACES = ""
# The single right of 0.2, in all namespaces: `get` reads everything; `create` beside it writes everything.
_SINGLE_GROUP, _SINGLE_RESOURCE = "gpu-autoscaler.io", "jobs"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated caller."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: dict[str, tuple[str, ...]] = {}
    has_all_rights: bool = False
    authentication: Authentication = "none"  # how the name is known
    token_number: int = 0  # of a shared token, from 1; 0: the caller has a name of its own

    @property
    def key(self) -> str:
        """The user, or the shared token: bearers of several shared tokens have one name."""
        return f"{self.name} {self.token_number}" if self.token_number else self.name


class KubernetesReviews(Protocol):
    """The Kubernetes client call that reviews need."""

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST an object and return the answer. Raises TransientError if the API server is unreachable."""


class Authorizer(Protocol):
    """Decides about one right of a caller without all rights."""

    async def allows(self, caller: Caller, right: ApiRight, namespace: str) -> bool:
        """Return whether the caller has the right in the namespace; empty: in all. Raises TransientError."""


class AccessReviews:
    """Asks Kubernetes, and remembers its answers for a while.

    Source: Kubernetes API reference, "SubjectAccessReview v1" (read 2026-11-21).
    """

    def __init__(self, kubernetes: KubernetesReviews, *, is_single_right_accepted: bool = True) -> None:
        """`is_single_right_accepted`: the right of 0.2 grants everything, as it did."""
        self._kubernetes = kubernetes
        self._is_single_right_accepted = is_single_right_accepted
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._turns = asyncio.Semaphore(REVIEWS_AT_ONCE_MAX)

    async def allows(self, caller: Caller, right: ApiRight, namespace: str) -> bool:
        main, _, sub = right.resource.partition("/")
        attributes = {"group": API_GROUP, "resource": main, "verb": right.verb}
        attributes |= ({"subresource": sub} if sub else {}) | ({"namespace": namespace} if namespace else {})
        if await self._reviewed(caller, attributes):
            return True
        if not self._is_single_right_accepted:
            return False
        single = {"group": _SINGLE_GROUP, "resource": _SINGLE_RESOURCE}
        verbs = ("get",) if right.verb == "get" else ("get", "create")
        for verb in verbs:
            if not await self._reviewed(caller, {**single, "verb": verb}):
                return False
        return True

    async def _reviewed(self, caller: Caller, attributes: Mapping[str, str]) -> bool:
        spec = {
            "user": caller.name,
            "groups": caller.groups,
            "uid": caller.uid,
            "extra": caller.extra,
            "resourceAttributes": attributes,
        }
        key = msgspec.json.encode(spec, order="sorted")
        known_at, is_allowed = self._known.get(key, (float("-inf"), False))
        age_seconds = Clock.monotonic_seconds() - known_at
        if age_seconds <= (GRANT_SECONDS_MAX if is_allowed else REFUSAL_SECONDS_MAX):
            self._known.move_to_end(key)
            return is_allowed
        async with self._turns:
            review = await self._kubernetes.create(
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec},
            )
        is_allowed = bool(review.get("status", {}).get("allowed", False))
        self._known[key] = (Clock.monotonic_seconds(), is_allowed)
        self._known.move_to_end(key)
        if len(self._known) > REVIEWS_COUNT_MAX:
            self._known.popitem(last=False)
        return is_allowed


class CheckedNamespaces(msgspec.Struct, frozen=True, kw_only=True):
    """Where rights are checked, and the names of the chart's roles."""

    namespace: str = "default"  # of the release: for everything that belongs to no project
    by_project: dict[str, str] = {}  # project -> namespace; `*`: of all other projects
    role_prefix: str = "gpu-autoscaler"

    def of(self, right: ApiRight, project_id: str | None) -> str:
        """Return the namespace in which a right is checked; a project's default is its own name."""
        if not right.is_by_project or project_id is None:
            return self.namespace
        return self.by_project.get(project_id) or self.by_project.get("*") or project_id


class AccessRules(msgspec.Struct, frozen=True, kw_only=True):
    """How rights are checked: shared by all requests."""

    authorizer: Authorizer | None = None  # None: only callers with all rights have any
    namespaces: CheckedNamespaces = CheckedNamespaces()
    # Without an authorizer: projects in which a client of the broker submits jobs; `*`: in all, or any other client.
    client_projects: Mapping[str, frozenset[str]] = {}

    def is_client_of(self, client: str, project_id: str) -> bool:
        """Return whether the settings let a client of the broker submit jobs of the project."""
        projects = self.client_projects.get(client) or self.client_projects.get("*", frozenset())
        return not projects.isdisjoint({project_id, "*"})


NO_ACCESS_RULES = AccessRules()


class Access:
    """The rights of one caller; None: a caller of a gateway without authentication."""

    def __init__(
        self, caller: Caller | None, rules: AccessRules, *, entry_point: EntryPoint = "rest", agent: str = ""
    ) -> None:
        """`agent`: the client's program, as it says."""
        self.caller = caller
        self.entry_point = entry_point
        self.agent = agent
        self._rules = rules

    @property
    def name(self) -> str:
        """The caller's name; empty: unknown."""
        return "" if self.caller is None else self.caller.name

    @property
    def key(self) -> str:
        """The caller, or the shared token; empty: unknown."""
        return "" if self.caller is None else self.caller.key

    async def allows(self, right: ApiRight, project_id: str | None = None) -> bool:
        """Return whether the caller has the right, for this project. Raises a 503 if nobody can tell."""
        return await self._allows(right, self._rules.namespaces.of(right, project_id))

    async def allows_everywhere(self, right: ApiRight) -> bool:
        """Return whether the caller has the right in all namespaces."""
        return await self._allows(right, _ALL_NAMESPACES)

    async def _allows(self, right: ApiRight, namespace: str) -> bool:
        if self.caller is None or self.caller.has_all_rights:
            return True
        authorizer = self._rules.authorizer
        try:
            return authorizer is not None and await authorizer.allows(self.caller, right, namespace)
        except PermanentError as error:  # the gateway's own rights, not the request
            detail = f"the right {right.qualified} cannot be checked: {error}"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise Problem(status, detail, retry_after_seconds=GRANT_SECONDS_MAX) from error

    async def require(self, right: ApiRight, project_id: str | None = None) -> None:
        """Raise a 403 that names the missing right, and the command that grants it."""
        if not await self.allows(right, project_id):
            raise self.refusal(right, project_id)

    def refusal(self, right: ApiRight, project_id: str | None = None) -> Problem:
        """Return the 403 of a missing right."""
        checked = self._rules.namespaces
        namespace = checked.of(right, project_id)
        command = granting(self.name, right, namespace, checked.role_prefix)
        of_project = f" of project {project_id!r}" if right.is_by_project and project_id is not None else ""
        return Problem(
            HTTPStatus.FORBIDDEN,
            f"{self.name} may not {right.meaning}: no right to {right.qualified} in namespace {namespace!r}"
            f"{of_project}; grant it: {command}",
            kind=FORBIDDEN_TYPE,
            required=RequiredRight(
                verb=right.verb, resource=right.resource, group=API_GROUP, namespace=namespace, grant=command
            ),
        )


ACCESS: web.RequestKey[Access] = web.RequestKey("access", Access)


def granting(user: str, right: ApiRight, namespace: str, role_prefix: str) -> str:
    """Return the command that binds the smallest of the chart's roles with this right to the user."""
    role = f"{role_prefix}-{smallest_role(right)}"
    account = user.removeprefix("system:serviceaccount:")
    name = re.sub(r"[^a-z0-9.-]+", "-", f"{role}-{account}".lower()).strip("-.")
    subject = f"--user={user}" if account == user else f"--serviceaccount={account}"
    return " ".join(
        map(
            shlex.quote,
            ("kubectl", "create", "rolebinding", name, f"--namespace={namespace}", f"--clusterrole={role}", subject),
        )
    )


def client_projects_of(entries: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return the projects by client of entries as `anna=research`, which the settings have validated."""
    projects: defaultdict[str, set[str]] = defaultdict(set)
    for client, _, project in (entry.rpartition("=") for entry in entries):
        projects[client].add(project)
    return {client: frozenset(names) for client, names in projects.items()}


def namespaces_of(entries: Sequence[str]) -> dict[str, str]:
    """Return the namespaces by project of entries as `research=team-r`, which the settings have validated."""
    return {project: namespace for project, _, namespace in (entry.rpartition("=") for entry in entries)}
