"""Plays a story to a running system: publishes what users publish, through the doors that users have."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

import aiohttp
import msgspec

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.sim.scoring.openb import TracePod, as_request
from gpu_autoscaler_services.demo.story import Door, Moment
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld

NOTICE_SECONDS = 120.0  # EC2 User Guide, "Spot Instance interruption notices": two minutes
_NOTICE_TRIES = 120
_NOTICE_TRY_SECONDS = 0.5
_SOURCE = "/gpu-autoscaler/demo"


class Script:
    """Speaks to the system as its users and its world do."""

    def __init__(
        self, *, bus: Bus, gateway_url: str, world: SimulatedWorld, clock: Clock, say: Callable[[str], None]
    ) -> None:
        self._bus = bus
        self._gateway_url = gateway_url
        self._world = world
        self._clock = clock
        self._say = say

    async def play(self, story: Sequence[Moment]) -> None:
        """Let every moment happen at its time; a moment that comes late happens at once."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for moment in story:
            await asyncio.sleep(max(0.0, began + moment.at_seconds - loop.time()))
            self._say(moment.say)
            await self._happen(moment)

    async def _happen(self, moment: Moment) -> None:
        if moment.request is not None:
            await self.request(moment.request, moment.door)
        if moment.refuse is not None:
            await self._world.refuse_next(moment.refuse)
        if moment.cancel is not None:
            await self._publish(JobCancelRequested(job_id=moment.cancel, requested_by="demo"))
        if moment.send_notice:
            await self._send_notice()

    async def play_trace(self, pods: Sequence[TracePod], speed: float) -> None:
        """Ask for each pod of a trace, arrivals and durations `speed` times faster than they were."""
        loop = asyncio.get_running_loop()
        began, first_seconds = loop.time(), pods[0].created_seconds
        for number, pod in enumerate(pods):
            at_seconds = (pod.created_seconds - first_seconds) / speed
            await asyncio.sleep(max(0.0, began + at_seconds - loop.time()))
            run_seconds = pod.duration_seconds / speed * self._clock.factor
            await self.request(as_request(pod, run_seconds=run_seconds, number=number), "nats")

    async def request(self, request: JobRequested, door: Door) -> None:
        """Ask for a job through this door."""
        if door == "nats":
            await self._publish(request)
        else:
            await self._post(request)

    async def _publish(self, fact: Fact) -> None:
        fact_id = FactId(fact.condition() or derive_id("demo", fact.type_name(), fact.entity()))
        envelope = Envelope(id=fact_id, source=_SOURCE, time=self._now(), fact=fact)
        await self._bus.publish(fact.subject(), encode(envelope), message_id=envelope.id)

    async def _post(self, request: JobRequested) -> None:
        url = f"{self._gateway_url}/api/v1/gpu/jobs"
        body = msgspec.json.encode(request)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
                session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer,
            ):
                if answer.status != 202:
                    raise PermanentError(f"POST {url}: {answer.status} {(await answer.text())[:300]}")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise TransientError(f"POST {url}: {exc!r}; is the gateway running?") from exc

    async def _send_notice(self) -> None:
        """Take back a busy spot node; boots take their time, so wait for one within a limit."""
        for _ in range(_NOTICE_TRIES):
            if (name := await self._world.send_notice(NOTICE_SECONDS)) is not None:
                self._say(f"the cloud sent a notice to {name}")
                return
            await asyncio.sleep(_NOTICE_TRY_SECONDS)
        self._say("no busy spot node was there to be taken back")

    def _now(self) -> datetime:
        return self._clock.now()
