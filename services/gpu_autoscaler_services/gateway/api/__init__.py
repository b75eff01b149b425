"""Handlers of the REST API. `ROUTES` are all routes in the order of the OpenAPI document."""

from gpu_autoscaler_services.gateway.api import (
    audit,
    demand,
    directives,
    dry_runs,
    events,
    jobs,
    logs,
    offers,
    plans,
    settings,
    shadow,
    views,
)

ROUTES = (
    *jobs.ROUTES,
    *dry_runs.ROUTES,
    *logs.ROUTES,
    *demand.ROUTES,
    *directives.ROUTES,
    *views.ROUTES,
    *plans.ROUTES,
    *offers.ROUTES,
    *shadow.ROUTES,
    *settings.ROUTES,
    *audit.ROUTES,
    *events.ROUTES,
)
