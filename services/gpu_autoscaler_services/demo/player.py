"""Plays a scenario to a running system: submits what users submit, through NATS and REST."""

import asyncio
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.sim.scoring.traces import TracePod, as_request
from gpu_autoscaler_services.demo.story import Input, Moment
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld

NOTICE_SECONDS = 120.0  # EC2 User Guide, "Spot Instance interruption notices": two minutes
_NOTICE_TRIES = 120
_NOTICE_TRY_SECONDS = 0.5
_SOURCE = "/gpu-autoscaler/demo"


class Player:
    """Acts on the system as its users and its cloud do."""

    def __init__(
        self, *, bus: Bus, gateway_url: str, world: SimulatedWorld, clock: Clock, print_line: Callable[[str], None]
    ) -> None:
        self._bus = bus
        self._gateway_url = gateway_url
        self._world = world
        self._clock = clock
        self._print_line = print_line

    async def play(self, story: Sequence[Moment]) -> None:
        """Play each event at its time; a late event is played immediately."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for moment in story:
            await asyncio.sleep(max(0.0, began + moment.at_seconds - loop.time()))
            self._print_line(moment.line)
            await self._play(moment)

    async def _play(self, moment: Moment) -> None:
        if moment.request is not None:
            await self.submit(moment.request, moment.input)
        if moment.refuse is not None:
            await self._world.refuse(moment.refuse)
        if moment.cancel is not None:
            await self._publish(JobCancelRequested(job_id=moment.cancel, requested_by="demo"))
        if moment.send_notice:
            await self._send_notice()

    async def play_trace(self, pods: Sequence[TracePod], speed: float) -> None:
        """Submit each pod of a trace as a job, with arrivals and durations divided by `speed`."""
        loop = asyncio.get_running_loop()
        began, first_seconds = loop.time(), pods[0].created_seconds
        for number, pod in enumerate(pods):
            at_seconds = (pod.created_seconds - first_seconds) / speed
            await asyncio.sleep(max(0.0, began + at_seconds - loop.time()))
            run_seconds = pod.duration_seconds / speed * self._clock.factor
            await self.submit(as_request(pod, run_seconds=run_seconds, number=number), "nats")

    async def submit(self, request: JobRequested, input_: Input) -> None:
        if input_ == "nats":
            await self._publish(request)
        else:
            await self._post(request)

    async def _publish(self, fact: Fact) -> None:
        fact_id = FactId(fact.condition() or derive_id("demo", fact.type_name(), fact.entity()))
        envelope = Envelope(id=fact_id, source=_SOURCE, time=self._clock.now(), fact=fact)
        await self._bus.publish(fact.subject(), encode(envelope), message_id=envelope.id)

    async def _post(self, request: JobRequested) -> None:
        url = f"{self._gateway_url}/api/v1/gpu/jobs"
        body = msgspec.json.encode(request)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
                session.post(url, data=body, headers={"Content-Type": "application/json"}) as response,
            ):
                if response.status != 202:
                    raise PermanentError(f"POST {url}: {response.status} {(await response.text())[:300]}")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise TransientError(f"POST {url}: {exc!r}; check that the gateway is running") from exc

    async def _send_notice(self) -> None:
        """Interrupt a busy spot node; wait for one up to a limit, because nodes boot slowly."""
        for _ in range(_NOTICE_TRIES):
            if (name := await self._world.send_notice(NOTICE_SECONDS)) is not None:
                self._print_line(f"the cloud sent an interruption notice for {name}")
                return
            await asyncio.sleep(_NOTICE_TRY_SECONDS)
        self._print_line("no busy spot node to reclaim")
