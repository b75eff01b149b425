"""What happens to the system during the soak: a schedule drawn from the seed, and who carries it out."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import aiohttp
import msgspec
from tests.soak.population import CHURN_TYPE, SimApi, job
from tests.soak.system import SoakSystem

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler_services.demo.player import Player
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld

Kind = Literal["kill", "launch", "notices", "quota_storm"]
BROKER, POSTGRES = "broker", "postgres"

KILL_EVERY_SECONDS = 20.0
LAUNCH_EVERY_SECONDS = 15.0
NOTICES_EVERY_SECONDS = 30.0
STORM_EVERY_SECONDS = 120.0
DOWN_SECONDS_MIN, DOWN_SECONDS_MAX = 2.0, 10.0  # of a broker or the database
STORM_SECONDS = 40.0
SEEN_SECONDS_MAX = 120.0  # until the scaler knows that the pods are gone: with the quota back it would buy for them
STORM_PODS_RATIO = 0.07  # of all pods: how many wait whose launches a quota of zero refuses
NOTICES_COUNT_MAX = 5
NOTICE_SECONDS = 120.0  # as EC2; wall time
RUN_SECONDS_MIN, RUN_SECONDS_MAX = 20.0, 60.0
TRIES_COUNT_MAX = 60
TRY_SECONDS = 1.0


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the schedule."""

    at_seconds: float  # after the first service was ready
    kind: Kind
    name: str = ""  # of what is killed, or of a job
    count: int = 1
    seconds: float = 0.0  # that it lasts


def schedule(seed: str, services: Sequence[str], seconds: float, *, pods_count: int) -> tuple[Disturbance, ...]:
    """Return what happens within this time. Everything is killed once before anything is killed again."""
    draw = random.Random(f"soak/{seed}")  # noqa: S311 - repeatable, no secret
    events: list[Disturbance] = []
    victims: list[str] = []
    for at in _times(draw, KILL_EVERY_SECONDS, seconds):
        if not victims:
            victims = [*services, BROKER, POSTGRES]
            draw.shuffle(victims)
        down = draw.uniform(DOWN_SECONDS_MIN, DOWN_SECONDS_MAX)
        events.append(
            Disturbance(at_seconds=at, kind="kill", name=victims.pop(), count=draw.randrange(3), seconds=down)
        )
    for number, at in enumerate(_times(draw, LAUNCH_EVERY_SECONDS, seconds)):
        run = draw.uniform(RUN_SECONDS_MIN, RUN_SECONDS_MAX)
        members = draw.randint(1, 4)
        events.append(Disturbance(at_seconds=at, kind="launch", name=f"churn-{number}", count=members, seconds=run))
    events += [
        Disturbance(at_seconds=at, kind="notices", count=draw.randint(1, NOTICES_COUNT_MAX))
        for at in _times(draw, NOTICES_EVERY_SECONDS, seconds)
    ]
    events += [
        Disturbance(
            at_seconds=at,
            kind="quota_storm",
            name=f"storm-{number}",
            count=round(pods_count * STORM_PODS_RATIO),
            seconds=STORM_SECONDS,
        )
        for number, at in enumerate(_times(draw, STORM_EVERY_SECONDS, seconds))
    ]
    return tuple(sorted(events, key=lambda event: event.at_seconds))


def _times(draw: random.Random, every_seconds: float, seconds: float) -> list[float]:
    count = int(seconds // every_seconds)
    return [(number + draw.uniform(0.2, 0.8)) * every_seconds for number in range(count)]


class NotAccepted(Exception):
    """A request that users would see as lost."""


class Disturber:
    """Carries out a schedule."""

    def __init__(
        self,
        system: SoakSystem,
        api: SimApi,
        world: SimulatedWorld,
        bus: Bus,
        player: Player,
        say: Callable[[str], None],
    ) -> None:
        self.kills: list[str] = []
        self.failures: list[str] = []  # promises that a disturbance found broken
        self.skipped: list[str] = []  # disturbances that this machine could not carry out
        self._system = system
        self._api = api
        self._world = world
        self._bus = bus
        self._player = player
        self._say = say
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, events: Sequence[Disturbance]) -> None:
        """Let each event happen at its time; return when the last has ended."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            for event in events:
                await asyncio.sleep(max(0.0, began + event.at_seconds - loop.time()))
                task = asyncio.create_task(self._act(event))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _act(self, event: Disturbance) -> None:
        try:
            match event.kind:
                case "kill":
                    await self._kill(event)
                case "launch":
                    await self._submit(event)
                case "notices":
                    await self._give_notices(event.count)
                case "quota_storm":
                    await self._storm(event)
        except NotAccepted as exc:
            self.failures.append(str(exc))
            self._say(str(exc))
        except (AutoscalerError, AssertionError, aiohttp.ClientError, TimeoutError, OSError) as exc:
            self.skipped.append(f"{event.kind} {event.name} at {event.at_seconds:.0f} s: {exc!r}")
            self._say(f"skipped: {self.skipped[-1]}")

    async def _kill(self, event: Disturbance) -> None:
        self._say(f"kill {event.name}")
        self.kills.append(event.name)
        if event.name == POSTGRES:
            await asyncio.to_thread(self._system.postgres.kill)
            await asyncio.sleep(event.seconds)
            await asyncio.to_thread(self._system.postgres.start)
        elif event.name == BROKER:
            member = self._system.brokers.members[event.count]
            await member.kill()
            await asyncio.sleep(event.seconds)
            await member.start()
        else:
            self._system.children[event.name].kill()

    async def _submit(self, event: Disturbance) -> None:
        """Submit a job of our own, which needs new nodes."""
        request = JobRequested(
            job_id=JobId(event.name),
            job_name=event.name,
            project_id="soak",
            gpu_requirements=GpuRequirements(gpu_type="A10G", gpu_count=4),
            container=ContainerRequest(image="soak:1", command=("work",)),
            resources=ResourceRequest(cpu="16", memory="64Gi"),
            members=event.count,
            run_seconds=event.seconds,
        )
        for number in range(TRIES_COUNT_MAX):
            with contextlib.suppress(AutoscalerError):
                await self._player.submit(request, "rest" if number % 2 else "nats")
                return
            await asyncio.sleep(TRY_SECONDS)
        raise NotAccepted(f"job {event.name} was accepted neither by NATS nor by the gateway")

    async def _give_notices(self, count: int) -> None:
        names = [await self._world.send_notice(NOTICE_SECONDS) for _ in range(count)]
        self._say(f"{sum(name is not None for name in names)} interruption notices")

    async def _storm(self, event: Disturbance) -> None:
        """Let many pods wait for capacity that a quota of zero refuses; cancel the work, then restore the quota."""
        self._say(f"quota of zero, {event.count} pods wait")
        refusal = {"offer": f"{CHURN_TYPE}/*", "code": "VcpuLimitExceeded", "retry_after_seconds": 15.0}
        await self._api.call("POST", "/admin/refusals", msgspec.json.encode(refusal))
        try:
            manifest = job(event.name, event.count, gpus=4)
            manifest["spec"]["template"]["spec"]["nodeSelector"] = {"node.kubernetes.io/instance-type": CHURN_TYPE}
            await self._api.create_job(manifest)
            await asyncio.sleep(event.seconds)
            await self._api.delete_job(event.name)
            await self._until_forgotten(event.count)
        finally:
            await self._api.call("DELETE", "/admin/refusals")
        self._say("the waiting pods are deleted, quota restored")

    async def _until_forgotten(self, count: int) -> None:
        """Wait until the last plan defers fewer objects than this. Raises TimeoutError."""
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            while True:
                with contextlib.suppress(AutoscalerError):
                    message = await self._bus.last_message(ScalingPlanMade.stream(), ScalingPlanMade.subject_root())
                    fact = None if message is None else FACT_CATALOG.decode(message.payload).fact
                    if isinstance(fact, ScalingPlanMade) and sum(_deferred_counts(fact.plan)) < count:
                        return
                await asyncio.sleep(TRY_SECONDS)


def _deferred_counts(plan: Plan) -> Iterator[int]:
    yield from (group.objects_count for group in plan.deferred_groups)
    yield from (count for _, count in plan.deferred_unlisted)
