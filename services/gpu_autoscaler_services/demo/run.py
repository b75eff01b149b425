"""The demo from start to report: starts everything, plays a story or a trace, waits until all is quiet, reports."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.format import listed
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.sim.scoring.openb import find_pod_list, read_pods
from gpu_autoscaler_services.demo.narration import Narrator
from gpu_autoscaler_services.demo.player import Script
from gpu_autoscaler_services.demo.promises import jobs_have_ended, money_adds_up, orders_have_ended
from gpu_autoscaler_services.demo.recompute import plans_that_differ
from gpu_autoscaler_services.demo.record import Seen, Record
from gpu_autoscaler_services.demo.report import Report, make_report
from gpu_autoscaler_services.demo.story import story_of
from gpu_autoscaler_services.demo.subscriber import Follower, connect
from gpu_autoscaler_services.local.simulated_world import GroundTruth, SimulatedWorld
from gpu_autoscaler_services.local.system import CloudName, ExternalSystems, LocalSystem

DEMO_POLICY = Path(__file__).with_name("policy.toml")
CLOCK_FACTOR = 15.0
QUIET_SECONDS_MAX = 120.0  # wall time for the cluster to become empty after the last job could have ended
_LOOK_SECONDS = 0.5
_LEFT_BEHIND = (
    "clock",
    "cloud",
    "logs",
    "nats",
    "report.json",
    "store.db",
)  # how the names of what a demo leaves begin


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of the demo is told."""

    folder: Path = Path("out/demo")
    gateway_port: int = 8000
    clock_factor: float = CLOCK_FACTOR
    trace: str | None = None  # openb:FOLDER; None: the story
    pods: int = 100
    speed: float = 600.0
    is_kept_up: bool = False
    cloud: CloudName = "sim"  # whose API the nodes are bought by
    quiet_seconds_max: float = QUIET_SECONDS_MAX


async def run_demo(options: DemoOptions, say: Callable[[str], None], *, on_report: Callable[[Report], None]) -> Report:
    """Run it; the report is also written to `report.json` in the folder. Raises what start-up raises."""
    pods = None if options.trace is None else read_pods(find_pod_list(options.trace), options.pods)
    policy = load_policy(DEMO_POLICY)
    _empty(options.folder)
    clock = Clock(options.clock_factor)
    external = ExternalSystems(cloud=options.cloud)
    system = LocalSystem(
        options.folder, clock=clock, policy=DEMO_POLICY, gateway_port=options.gateway_port, external=external
    )
    began = clock.monotonic_seconds()
    await system.start(say)
    say(f"dashboard: {system.gateway_url}; NATS: {system.nats_url}")
    try:
        bus = await connect(system.nats_url)
        narrator = Narrator()

        def on_seen(seen: Seen) -> None:
            for line in narrator.tell(seen.fact):
                say(line)

        async with SimulatedWorld(system.simcluster_url) as world, Follower(bus, clock, on_seen) as follower:
            script = Script(bus=bus, gateway_url=system.gateway_url, world=world, clock=clock, say=say)
            if pods is None:
                await script.play(story_of(options.cloud))
            else:
                await script.play_trace(pods, options.speed)
            longest_seconds = 0.0 if pods is None else max(pod.duration_seconds for pod in pods) / options.speed
            truth = await wait_until_quiet(follower.record, world, longest_seconds + options.quiet_seconds_max)
            say("making every plan again, from its facts")
            differing = await asyncio.to_thread(plans_that_differ, follower.record, policy)
            report = make_report(
                follower.record,
                truth,
                policy,
                clock_factor=clock.factor,
                wall_seconds=clock.monotonic_seconds() - began,
                broken=differing,
            )
        await bus.close()
        (options.folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
        on_report(report)
        if options.is_kept_up:
            say(f"everything stays up at {system.gateway_url}; Ctrl-C ends it")
            await asyncio.Event().wait()
        return report
    finally:
        await system.stop()


def _empty(folder: Path) -> None:
    """Remove what an earlier demo left there. Raises ConfigError where anything else lies: that is not ours."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("demo", [f"{folder} is no folder; name another with --folder"])
    if others := sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(_LEFT_BEHIND)):
        raise ConfigError("demo", [f"{folder} holds {listed(others)}, which no demo made; name another with --folder"])
    shutil.rmtree(folder)


async def wait_until_quiet(record: Record, world: SimulatedWorld, seconds_max: float) -> GroundTruth:
    """Return the truth once every job has ended, no instance is left and the bill is charged, or after the limit."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds_max
    while True:
        truth = await world.truth()
        has_ended = jobs_have_ended(record) and orders_have_ended(record) and not truth.instances_left
        if (has_ended and not list(money_adds_up(record, truth))) or loop.time() > deadline:
            return truth
        await asyncio.sleep(_LOOK_SECONDS)
