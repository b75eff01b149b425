"""Run the demo: start the system, play a scenario or a trace, wait until the cluster is empty, report."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu_autoscaler.core.checked_plan import recomputed_plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.format import listed
from gpu_autoscaler.replay.retrace import RecordedState
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.history import Stored
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.sim.scoring.traces import find_pod_list, read_pods
from gpu_autoscaler_services.demo.narration import Narrator
from gpu_autoscaler_services.demo.player import Player
from gpu_autoscaler_services.demo.promises import charge_differences, jobs_have_ended, orders_have_ended
from gpu_autoscaler_services.demo.record import Record, Seen
from gpu_autoscaler_services.demo.report import Report, make_report
from gpu_autoscaler_services.demo.story import story_of
from gpu_autoscaler_services.demo.subscriber import Subscriber, connect
from gpu_autoscaler_services.local.simulated_world import GroundTruth, SimulatedWorld
from gpu_autoscaler_services.local.system import CloudName, ExternalSystems, LocalSystem

DEMO_POLICY = Path(__file__).with_name("policy.toml")
CLOCK_FACTOR = 15.0
QUIET_SECONDS_MAX = 120.0  # wall time until the cluster is empty, after the last job could have ended
_POLL_SECONDS = 0.5
_DEMO_FILES = ("clock", "cloud", "logs", "nats", "report.json", "store.db")  # name prefixes of files that a demo leaves


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the demo."""

    folder: Path = Path("out/demo")
    gateway_port: int = 8000
    clock_factor: float = CLOCK_FACTOR
    trace: str | None = None  # openb:FOLDER; None: the scenario
    pods: int = 100
    speed: float = 600.0
    is_kept_up: bool = False
    cloud: CloudName = "sim"  # cloud API to buy nodes from
    quiet_seconds_max: float = QUIET_SECONDS_MAX


async def run_demo(
    options: DemoOptions, print_line: Callable[[str], None], *, on_report: Callable[[Report], None]
) -> Report:
    """Run the demo; the report is also written to `report.json` in the folder. Raises errors of the start."""
    pods = None if options.trace is None else read_pods(find_pod_list(options.trace), options.pods)
    policy = load_policy(DEMO_POLICY)
    _empty(options.folder)
    clock = Clock(options.clock_factor)
    teams = [project.name for project in policy.tenancy.projects]
    own_projects = tuple(f"{team}={team}" for team in teams)  # of the team's user of the broker
    external = ExternalSystems(cloud=options.cloud, client_projects=(*own_projects, "*=*"))
    system = LocalSystem(
        options.folder, clock=clock, policy=DEMO_POLICY, gateway_port=options.gateway_port, external=external
    )
    began = clock.monotonic_seconds()
    await system.start(print_line)
    print_line(f"dashboard: {system.gateway_url}; NATS: {system.nats_url}")
    try:
        bus = await connect(system.nats_url)
        narrator = Narrator()

        def on_seen(seen: Seen) -> None:
            for line in narrator.lines(seen.fact):
                print_line(line)

        async with SimulatedWorld(system.simcluster_url) as world, Subscriber(bus, clock, on_seen) as subscriber:
            player = Player(bus=bus, gateway_url=system.gateway_url, world=world, clock=clock, print_line=print_line)
            for team in teams:
                await world.create_namespace(policy.tenancy.place(team).namespace)
            if pods is None:
                await player.play(story_of(options.cloud))
            else:
                await player.play_trace(pods, options.speed)
            longest_seconds = 0.0 if pods is None else max(pod.duration_seconds for pod in pods) / options.speed
            truth = await wait_until_quiet(subscriber.record, world, longest_seconds + options.quiet_seconds_max)
            print_line("recomputing every plan from its facts")
            differing = await asyncio.to_thread(differing_plans, subscriber.record, policy)
            report = make_report(
                subscriber.record,
                truth,
                policy,
                clock_factor=clock.factor,
                wall_seconds=clock.monotonic_seconds() - began,
                broken=(*player.broken, *differing),
                refused=player.refused,
            )
        await bus.close()
        (options.folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
        on_report(report)
        if options.is_kept_up:
            print_line(f"still running at {system.gateway_url}; Ctrl-C stops it")
            await asyncio.Event().wait()
        return report
    finally:
        await system.stop()


def _empty(folder: Path) -> None:
    """Remove files of an earlier demo. Raises ConfigError if the folder contains anything else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("demo", [f"{folder} is not a folder; choose another with --folder"])
    if others := sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(_DEMO_FILES)):
        raise ConfigError(
            "demo", [f"{folder} contains {listed(others)}, which no demo created; choose another with --folder"]
        )
    shutil.rmtree(folder)


async def wait_until_quiet(record: Record, world: SimulatedWorld, seconds_max: float) -> GroundTruth:
    """Return the truth once all jobs have ended, no instance is left and all costs are charged, or at the limit."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds_max
    while True:
        truth = await world.truth()
        has_ended = jobs_have_ended(record) and orders_have_ended(record) and not truth.instances_left
        if (has_ended and not list(charge_differences(record, truth))) or loop.time() > deadline:
            return truth
        await asyncio.sleep(_POLL_SECONDS)


def differing_plans(record: Record, policy: ScalingPolicy) -> tuple[str, ...]:
    """Return a sentence for each recorded plan that this code and policy do not reproduce byte for byte."""
    recorded = RecordedState(Stored(at=seen.stored_at, recorded=seen.recorded) for seen in record.seen)
    core, own_policy = core_digest(), policy_digest(policy)
    differing = []
    for fact, _ in record.of(ScalingPlanMade):
        if (fact.core_digest, fact.policy_digest) != (core, own_policy):
            differing.append(f"plan {fact.plan_id} was made by another core or another policy")
            continue
        recorded.to_cut(fact.cut)
        recomputed = recomputed_plan(fact.plan, recorded.state, policy)
        if msgspec.json.encode(recomputed) != msgspec.json.encode(fact.plan):
            differing.append(
                f"plan {fact.plan_id} differs when recomputed; see: gpu-autoscaler recompute {fact.plan_id}"
            )
    return tuple(differing)
