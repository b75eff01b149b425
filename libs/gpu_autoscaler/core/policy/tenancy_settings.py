"""Namespaces, cost centers and quotas of projects. Without them all jobs are in one namespace."""

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.ranges import about
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.resources import parse_quantity_milli

PLACEHOLDER = "{project}"
QUOTA_NAME = "gpu-autoscaler"  # ResourceQuota of created namespaces
JOB_ACCOUNT = "gpu-jobs"  # service account of the jobs in created namespaces
_NAMESPACE_LENGTH_MAX = 63
# Kubernetes documentation, "Object Names and IDs", "Labels and Selectors" (read 2026-11-23).
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_OF_KUBERNETES = "kube-"

_Name = Annotated[str, Meta(min_length=1, max_length=63)]
_Quota = dict[str, str]


class ProjectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One project."""

    name: Annotated[_Name, about("Name of the project, as in project_id of its jobs.", "#projects-and-namespaces")]
    namespace: Annotated[
        str | None,
        about(
            "Existing namespace of the project's jobs, which gpu-autoscaler leaves as it is; unset: by "
            "namespace_template.",
            "#projects-and-namespaces",
        ),
    ] = None
    cost_center: Annotated[
        str | None,
        about("Value of the label gpu-cost-center of the project's jobs; unset: none.", "#projects-and-namespaces"),
    ] = None
    quota: Annotated[
        _Quota,
        about(
            "Amounts of the ResourceQuota of a created namespace; they override tenancy.quota.",
            "#projects-and-namespaces",
        ),
    ] = {}


class TenancyPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How projects are kept apart in Kubernetes."""

    namespace_template: Annotated[
        str,
        about(
            "Namespace of each project without one of its own, with {project} for its name, such as gpu-{project}; the "
            "scheduler creates it. Empty: the namespace of all jobs (kube.namespace).",
            "#projects-and-namespaces",
        ),
    ] = ""
    quota: Annotated[
        _Quota,
        about(
            "Amounts of the ResourceQuota of every created namespace, such as requests.nvidia.com/gpu. Of GPUs, "
            "gpu_count_max of limits.projects is the default.",
            "#projects-and-namespaces",
        ),
    ] = {}
    admitted_namespaces: Annotated[
        tuple[str, ...],
        about(
            "Namespaces whose pods may connect to pods of a created namespace, for checkpoint hooks and monitoring.",
            "#projects-and-namespaces",
        ),
    ] = ()
    priority_class_prefix: Annotated[
        str,
        about(
            "The pods of a job get the PriorityClass with this prefix and -low, -medium or -high, by the priority of "
            "the job; empty: none.",
            "#projects-and-namespaces",
        ),
    ] = ""
    projects: Annotated[
        tuple[ProjectSettings, ...], about("Settings of single projects, by name.", "#projects-and-namespaces")
    ] = ()

    def project(self, name: str) -> ProjectSettings:
        """Return the settings of the project, with all defaults where it has none."""
        return next((project for project in self.projects if project.name == name), ProjectSettings(name=name))

    def place(self, project_id: str) -> "ProjectPlace":
        """Return where the project's jobs are created."""
        namespace = self.project(project_id).namespace
        if namespace is not None:
            return ProjectPlace(namespace=namespace, is_created=False)
        if not self.namespace_template:
            return ProjectPlace(namespace="", is_created=False)
        return ProjectPlace(self.namespace_template.replace(PLACEHOLDER, project_id), is_created=True)

    def priority_class(self, priority: int) -> str:
        """Return the PriorityClass of the next lower named priority, of the lowest for those below; empty: none."""
        if not self.priority_class_prefix:
            return ""
        names = sorted(PRIORITY_NAMES, key=PRIORITY_NAMES.__getitem__)
        reached = [name for name in names if PRIORITY_NAMES[name] <= priority]
        return f"{self.priority_class_prefix}-{(reached or names[:1])[-1]}"


class ProjectPlace(NamedTuple):
    """Where the jobs of a project are created."""

    namespace: str  # empty: the namespace of all jobs
    is_created: bool  # by the scheduler, from the template

    def problem(self) -> str:
        """Return why no such namespace can exist or be used; empty: it can."""
        return namespace_problem(self.namespace) if self.namespace else ""


def namespace_problem(name: str) -> str:
    """Return why a name is no namespace for jobs; empty: it is one."""
    if len(name) > _NAMESPACE_LENGTH_MAX or not _DNS_LABEL.fullmatch(name):
        return (
            f"{name!r} is not a DNS label: at most {_NAMESPACE_LENGTH_MAX} lower-case letters, digits and `-`, with a "
            "letter or digit at both ends"
        )
    return f"{name!r} belongs to Kubernetes" if name.startswith(_OF_KUBERNETES) else ""


def tenancy_violations(tenancy: TenancyPolicy) -> Iterator[str]:
    """Yield a sentence for each name and amount that Kubernetes would refuse."""
    template = tenancy.namespace_template
    if template and (template.count(PLACEHOLDER) != 1 or template == PLACEHOLDER):
        yield (
            f"tenancy.namespace_template: {template!r} must have {PLACEHOLDER} once, and other characters that keep "
            f"these namespaces apart from others; use gpu-{PLACEHOLDER}"
        )
    elif template and (problem := namespace_problem(template.replace(PLACEHOLDER, "p"))):
        yield f"tenancy.namespace_template: for project p, {problem}; correct it"
    for namespace in tenancy.admitted_namespaces:
        if not _DNS_LABEL.fullmatch(namespace):
            yield f"tenancy.admitted_namespaces: {namespace!r} is not a namespace; correct it"
    yield from _quota_violations("tenancy.quota", tenancy.quota)
    for index, project in enumerate(tenancy.projects):
        at = f"tenancy.projects[{index}]"
        if project.namespace is not None and (problem := namespace_problem(project.namespace)):
            yield f"{at}.namespace: of project {project.name}, {problem}; choose another one"
        if project.cost_center is not None and not _LABEL_VALUE.fullmatch(project.cost_center):
            yield (
                f"{at}.cost_center: {project.cost_center!r} of project {project.name} is not a label value; use at "
                "most 63 letters, digits, `-`, `_` and `.`"
            )
        if project.namespace is not None and project.quota:
            yield (
                f"{at}.quota: has no effect in namespace {project.namespace} of project {project.name}, which is left "
                "as it is; remove quota and create a ResourceQuota there, or remove namespace"
            )
        yield from _quota_violations(f"{at}.quota", project.quota)


def _quota_violations(at: str, quota: _Quota) -> Iterator[str]:
    for key, amount in sorted(quota.items()):
        try:
            is_negative = parse_quantity_milli(amount) < 0
        except ValueError as exc:
            yield f"{at}: {key}: {exc}"
            continue
        if is_negative:
            yield f"{at}: {key}: {amount} is negative; a quota is zero or more"
