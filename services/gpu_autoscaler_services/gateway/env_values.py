"""Hides the values of environment variables in the events of jobs: they may be secrets of others. Names stay.

They are shown to callers who ask for them, with the right and the setting.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from gpu_autoscaler.events import envelope as envelopes
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobQueued, JobRequested, JobResynced
from gpu_autoscaler.kube.pod_templates.security import CONTAINER_LISTS
from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler_services.api_rights import READ_ENV_VALUES
from gpu_autoscaler_services.gateway.access import Access
from gpu_autoscaler_services.gateway.problems import rule_violated

HIDDEN = "(hidden)"


async def require_env_values(access: Access, *, is_setting_on: bool) -> None:
    """Raise a 403 for a caller without the right, and a 422 where the settings show the values to nobody."""
    await access.require(READ_ENV_VALUES)
    if not is_setting_on:
        reason = "values of environment variables are shown to nobody here; set gateway.are_env_values_shown"
        raise rule_violated("invalid query: correct the parameters listed in violations", Violation("env", reason))


def encoded_event(envelope: Envelope, *, is_env_shown: bool) -> bytes:
    """Return the event as JSON, with the values of environment variables or without them."""
    fact = envelope.fact if is_env_shown else _without_values(envelope.fact)
    return envelopes.encode(envelope if fact is envelope.fact else replace(envelope, fact=fact))


def _without_values(fact: Fact) -> Fact:
    match fact:
        case JobRequested():
            return _request(fact)
        case JobQueued():
            return _queued(fact)
        case JobResynced():
            requested, queued = fact.requested, fact.queued
            return replace(
                fact,
                requested=None if requested is None else _request(requested),
                queued=None if queued is None else _queued(queued),
            )
        case _:
            return fact


def _request(request: JobRequested) -> JobRequested:
    container = replace(request.container, env=dict.fromkeys(request.container.env, HIDDEN))
    template = None if request.pod_template is None else _template(request.pod_template)
    return replace(request, container=container, pod_template=template)


def _queued(queued: JobQueued) -> JobQueued:
    return replace(queued, spec=replace(queued.spec, env=dict.fromkeys(queued.spec.env, HIDDEN)))


def _template(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template of a request, which may be malformed: what is no list of variables is hidden as a whole."""
    spec = template.get("spec")
    if not isinstance(spec, dict):
        return {**template, "spec": HIDDEN} if "spec" in template else dict(template)
    lists = {name: _containers(spec[name]) for name in CONTAINER_LISTS if name in spec}
    return {**template, "spec": {**spec, **lists}}


def _containers(containers: object) -> object:
    if not isinstance(containers, list):
        return HIDDEN
    return [_container(container) if isinstance(container, dict) else HIDDEN for container in containers]


def _container(container: Mapping[str, Any]) -> dict[str, Any]:
    if "env" not in container:
        return dict(container)
    env = container["env"]
    return {**container, "env": [_variable(item) for item in env] if isinstance(env, list) else HIDDEN}


def _variable(variable: object) -> object:
    if not isinstance(variable, dict):
        return HIDDEN
    return {**variable, "value": HIDDEN} if "value" in variable else variable
