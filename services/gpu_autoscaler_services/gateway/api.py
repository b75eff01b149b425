"""Every route of the REST API, in the order of the OpenAPI document."""

from gpu_autoscaler_services.gateway import api_demand, api_directives, api_jobs, api_market, api_shadow, api_views, sse

ROUTES = (
    *api_jobs.ROUTES,
    *api_demand.ROUTES,
    *api_directives.ROUTES,
    *api_views.ROUTES,
    *api_market.ROUTES,
    *api_shadow.ROUTES,
    *sse.ROUTES,
)
