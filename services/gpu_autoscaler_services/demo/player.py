"""Plays a scenario to a running system: submits what users submit, through NATS and REST."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from http import HTTPStatus

import aiohttp
import msgspec

from gpu_autoscaler.bus.client_subjects import client_token
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import FactId, JobId, derive_id
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.sim.scoring.traces import TracePod, as_request
from gpu_autoscaler_services.demo.story import Input, Moment
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld

NOTICE_SECONDS = 120.0  # EC2 User Guide, "Spot Instance interruption notices": two minutes
_TRIES = 120
_TRY_SECONDS = 0.5
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
        self.refused: list[tuple[str, str]] = []  # project and problem type of each refused request
        self.broken: list[str] = []  # requests that were accepted, or refused with another type

    async def play(self, story: Sequence[Moment]) -> None:
        """Play each event at its time; a late event is played immediately."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for moment in story:
            await asyncio.sleep(max(0.0, began + moment.at_seconds - loop.time()))
            if moment.after is not None:
                before = loop.time()
                await self._wait_until_running(moment.after)
                began += loop.time() - before
            self._print_line(moment.line)
            await self._play(moment)

    async def _play(self, moment: Moment) -> None:
        if moment.request is not None and moment.refused_as:
            await self._submit_in_vain(moment.request, moment)
        elif moment.request is not None:
            await self.submit(moment.request, moment.input)
        if moment.refuse is not None:
            await self._world.refuse(moment.refuse)
        if moment.cancel is not None:
            await self._publish(JobCancelRequested(job_id=moment.cancel, requested_by="demo"))
        if moment.send_notice:
            await self._send_notice()
        if moment.shows_queue:
            await self._show_queue()

    async def _wait_until_running(self, job_id: JobId) -> None:
        """Wait for the start of the job up to a limit, because nodes boot slowly."""
        for _ in range(_TRIES):
            if msgspec.json.decode(await self._read(f"jobs/{job_id}"))["status"] == "running":
                return
            await asyncio.sleep(_TRY_SECONDS)

    async def play_trace(self, pods: Sequence[TracePod], speed: float) -> None:
        """Submit each pod of a trace as a job, with arrivals and durations divided by `speed`."""
        loop = asyncio.get_running_loop()
        began, first_seconds = loop.time(), pods[0].created_seconds
        for number, pod in enumerate(pods):
            at_seconds = (pod.created_seconds - first_seconds) / speed
            await asyncio.sleep(max(0.0, began + at_seconds - loop.time()))
            run_seconds = pod.duration_seconds / speed * self._clock.factor
            await self.submit(as_request(pod, run_seconds=run_seconds, number=number), "nats")

    async def submit(self, request: JobRequested, input_: Input, client: str = "") -> None:
        """Submit a job. Raises PermanentError with the problem type if it is refused, TransientError."""
        if input_ == "nats":
            await self._publish(request, client)
        else:
            await self._call("POST", "jobs", msgspec.json.encode(request))

    async def _submit_in_vain(self, request: JobRequested, moment: Moment) -> None:
        try:
            await self.submit(request, moment.input, moment.client)
        except PermanentError as exc:
            self._print_line(f"job {request.job_name} refused: {exc}")
            if f"/problems/{moment.refused_as}" in str(exc):
                self.refused.append((moment.client or request.project_id, moment.refused_as))
            else:
                self.broken.append(f"job {request.job_name} was not refused as {moment.refused_as}: {exc}")
        else:
            self.broken.append(f"job {request.job_name} was accepted, not refused as {moment.refused_as}")

    async def _publish(self, fact: Fact, client: str = "") -> None:
        fact_id = FactId(fact.condition() or derive_id("demo", fact.type_name(), fact.entity()))
        envelope = Envelope(id=fact_id, source=_SOURCE, time=self._clock.now(), fact=fact)
        subject = f"{fact.subject_root()}.{client_token(client)}" if client else fact.subject()
        await self._bus.publish(subject, encode(envelope), message_id=envelope.id)

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the answer of the gateway. Raises PermanentError with the problem type, TransientError."""
        url = f"{self._gateway_url}/api/v1/gpu/{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
                session.request(method, url, data=body, headers={"Content-Type": "application/json"}) as response,
            ):
                content = await response.read()
                if response.status >= 400:
                    problem = msgspec.json.decode(content)
                    reasons = [f"{item['field']}: {item['reason']}" for item in problem.get("violations", ())]
                    error = TransientError if response.status == HTTPStatus.SERVICE_UNAVAILABLE else PermanentError
                    raise error(f"{'; '.join(reasons) or problem['detail']} ({problem['type']})")
                return content
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise TransientError(f"{method} {url}: {exc!r}; check that the gateway is running") from exc

    async def _read(self, path: str) -> bytes:
        """Return the answer to a GET; while the gateway restarts, try again up to a limit. Raises as `_call`."""
        for _ in range(_TRIES):
            with contextlib.suppress(TransientError):
                return await self._call("GET", path)
            await asyncio.sleep(_TRY_SECONDS)
        return await self._call("GET", path)

    async def _show_queue(self) -> None:
        for item in msgspec.json.decode(await self._read("jobs"))["items"]:
            if item["queue_position"] is not None:
                self._print_line(f"job {item['job_name']} of {item['project_id']} waits: {item['message']}")

    async def _send_notice(self) -> None:
        """Interrupt a busy spot node; wait for one up to a limit, because nodes boot slowly."""
        for _ in range(_TRIES):
            if (name := await self._world.send_notice(NOTICE_SECONDS)) is not None:
                self._print_line(f"the cloud sent an interruption notice for {name}")
                return
            await asyncio.sleep(_TRY_SECONDS)
        self._print_line("no busy spot node to reclaim")
