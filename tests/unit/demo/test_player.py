"""What the player does when the gateway is away: as any caller of REST, it tries again."""

import asyncio
from typing import cast

from aiohttp import web
from aiohttp.test_utils import TestServer

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.demo.player import Player
from gpu_autoscaler_services.demo.story import Moment
from gpu_autoscaler_services.local.child import free_port
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld

QUEUE = {"items": [{"job_name": "train", "project_id": "a", "queue_position": 1, "message": "its turn comes"}]}


async def answer_queue(_: web.Request) -> web.Response:
    """One job waits."""
    return web.json_response(QUEUE)


async def test_the_queue_is_read_once_the_restarted_gateway_listens() -> None:
    """Nothing listens when it is to be shown first."""
    port, lines = free_port(), list[str]()
    gateway_url, unused_bus, unused_world = f"http://127.0.0.1:{port}", cast("Bus", None), cast("SimulatedWorld", None)
    player = Player(bus=unused_bus, gateway_url=gateway_url, world=unused_world, clock=Clock(), print_line=lines.append)
    shown = asyncio.create_task(player.play([Moment(at_seconds=0, line="the queue", shows_queue=True)]))
    await asyncio.sleep(0.1)  # its first try is refused

    gateway = web.Application()
    gateway.router.add_get("/api/v1/gpu/jobs", answer_queue)
    async with TestServer(gateway, port=port):
        await shown

    assert lines == ["the queue", "job train of a waits: its turn comes"]
