"""The services of the system, each by the name of its folder, whose `spec.py` declares it."""

from functools import cache
from importlib import import_module

from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.service_spec import ServiceSpec

NAMES = (
    "pod_watcher",  # the state of Kubernetes: pods, nodes, disruption budgets, jobs
    "dcgm_ingest",  # GPU telemetry
    "spot_watcher",  # offers, prices and interruption notices of the cloud
    "node_gateway",  # the entry point for the watchers on nodes
    "scheduler",  # which jobs are admitted, and when each may start
    "scaler",  # plans the cluster's size; its executor orders, drains and terminates nodes
    "shadow",  # plans under another policy and acts on nothing
    "policy_watcher",  # which AutoscalingPolicy objects are active
    "announcer",  # Kubernetes Events: why pods wait and nodes come and go
    "cost_tracker",  # costs, by owner
    "gateway",  # the entry point for people and programs: REST, events, the live page
)


@cache
def spec_of(name: str) -> ServiceSpec:
    """Return the declaration of a service. Loads only this service, so that a process loads only its own."""
    spec: ServiceSpec = import_module(f"{__package__}.{name}.spec").SPEC
    return spec


def specs() -> tuple[ServiceSpec, ...]:
    """Return all declarations, in the order of NAMES."""
    return tuple(map(spec_of, NAMES))


def services() -> tuple[type[Service], ...]:
    """Return the classes of all services, in the order of NAMES."""
    return tuple(spec.service for spec in specs())
