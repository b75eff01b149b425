"""The settings of the gateway and the effective policy, to read. They change in the chart and in files, not here."""

import msgspec
from aiohttp import web

from gpu_autoscaler.runtime.config import shown
from gpu_autoscaler_services.api_rights import READ_SETTINGS
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.routes import Route, answer


async def show_settings_handler(request: web.Request) -> web.Response:
    """Show the gateway's settings, secrets hidden, and the policy that is in force."""
    model = request.app[READ_MODEL]
    items = tuple(schema.Setting(key=key, value=value, is_default=known) for key, value, known in shown(model.settings))
    return answer(request, schema.Settings(items=items, policy=msgspec.to_builtins(model.policy)))


ROUTES = (Route("GET", "/api/v1/settings", show_settings_handler, "settings", schema.Settings, (READ_SETTINGS,)),)
