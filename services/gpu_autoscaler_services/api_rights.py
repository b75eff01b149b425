"""Rights at the entry points, by verb and resource, and the roles that the chart makes of them.

The resources are virtual: no API server serves them, and Kubernetes RBAC grants them by name. The API group is not that
of the single right of 0.2, `jobs.gpu-autoscaler.io`, which grants everything: a role for one project must not grant it.
"""

from collections import defaultdict
from typing import Any

import msgspec

API_GROUP = "api.gpu-autoscaler.io"


class ApiRight(msgspec.Struct, frozen=True):
    """A verb on a virtual resource, with its subresource as in `jobs/own`."""

    verb: str
    resource: str
    meaning: str  # completes "the caller may ..."
    is_by_project: bool = False  # checked in the project's namespace; else in that of the release

    @property
    def qualified(self) -> str:
        """The right as `kubectl auth can-i` takes it: `create jobs.<group>`."""
        main, _, sub = self.resource.partition("/")
        return f"{self.verb} {main}.{API_GROUP}{'/' if sub else ''}{sub}"


READ_JOBS = ApiRight("get", "jobs", "list, show and explain jobs", is_by_project=True)
SUBMIT_JOBS = ApiRight("create", "jobs", "submit jobs", is_by_project=True)
DANGEROUS_FIELDS = ApiRight(
    "create", "jobs/dangerousfields", "submit jobs with fields that reach beyond the pod", is_by_project=True
)
CANCEL_OWN_JOBS = ApiRight("delete", "jobs/own", "cancel jobs that the caller submitted", is_by_project=True)
CANCEL_JOBS = ApiRight("delete", "jobs", "cancel any job", is_by_project=True)
READ_DIRECTIVES = ApiRight("get", "directives", "list directives")
FREEZE = ApiRight("create", "directives/freeze", "freeze all scaling")
PAUSE = ApiRight("create", "directives/pause", "pause a pool")
OVERRIDE = ApiRight("create", "directives/override", "set a minimum or maximum for a while")
RESUME = ApiRight("create", "directives/resume", "end a directive early, and resume after the brake has tripped")
READ_DEMAND = ApiRight("get", "demand", "list reported demand")
REPORT_DEMAND = ApiRight("create", "demand", "report demand")
READ_COSTS = ApiRight("get", "costs", "read spend, and spend budgets")
READ_PROJECT_COSTS = ApiRight("get", "costs/project", "read the spend of one project", is_by_project=True)
READ_SETTINGS = ApiRight("get", "settings", "read settings and policy, and how the shadow policy differs")
READ_CLUSTER = ApiRight("get", "cluster", "read status, nodes, offers and plans, and explain nodes and pods")
READ_FACTS = ApiRight("get", "facts", "read all recorded facts, those about jobs of every project included")
READ_ENV_VALUES = ApiRight("get", "facts/env", "see the values of environment variables in recorded facts")
READ_AUDIT = ApiRight("get", "audit", "read the audit trail: who did what")

_VIEWER = (
    READ_JOBS,
    READ_DIRECTIVES,
    READ_DEMAND,
    READ_COSTS,
    READ_PROJECT_COSTS,
    READ_SETTINGS,
    READ_CLUSTER,
    READ_FACTS,
)
_SUBMITTER = (READ_JOBS, SUBMIT_JOBS, CANCEL_OWN_JOBS, READ_PROJECT_COSTS)
_OPERATOR = (*_VIEWER, CANCEL_JOBS, FREEZE, PAUSE, OVERRIDE, RESUME, REPORT_DEMAND)
RIGHTS = (
    READ_JOBS,
    SUBMIT_JOBS,
    DANGEROUS_FIELDS,
    CANCEL_OWN_JOBS,
    CANCEL_JOBS,
    READ_DIRECTIVES,
    FREEZE,
    PAUSE,
    OVERRIDE,
    RESUME,
    READ_DEMAND,
    REPORT_DEMAND,
    READ_COSTS,
    READ_PROJECT_COSTS,
    READ_SETTINGS,
    READ_CLUSTER,
    READ_FACTS,
    READ_ENV_VALUES,
    READ_AUDIT,
)
# Least first: a refusal names the first role that has the right.
ROLES: dict[str, tuple[ApiRight, ...]] = {
    "viewer": _VIEWER,
    "submitter": _SUBMITTER,
    "operator": _OPERATOR,
    "admin": RIGHTS,
}


def smallest_role(right: ApiRight) -> str:
    """Return the role with the fewest rights that has this one."""
    return min((name for name, rights in ROLES.items() if right in rights), key=lambda name: len(ROLES[name]))


def role_rules(role: str) -> list[dict[str, Any]]:
    """Return the RBAC rules of a role."""
    verbs: defaultdict[str, list[str]] = defaultdict(list)
    for right in ROLES[role]:
        verbs[right.resource].append(right.verb)
    resources: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for resource, granted in verbs.items():
        resources[tuple(granted)].append(resource)
    return [
        {"apiGroups": [API_GROUP], "resources": names, "verbs": list(granted)} for granted, names in resources.items()
    ]
