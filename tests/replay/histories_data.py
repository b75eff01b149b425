"""Recorded histories: one simulated day of each kind, and the expected differences of the current code.

Histories are recorded once and kept, like real ones. Record again only for a new kind of day, not for a change of
decisions.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec

from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.ids import FactId, JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.replay.recording import STREAMS, Head, Recording, load
from gpu_autoscaler.replay.retrace import RetraceResult, report_lines, retrace
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.history import Stored
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler.sim.virtual_time import ORIGIN
from gpu_autoscaler_services.simulation import ROLES

FOLDER = Path(__file__).parent / "histories"
HOURS = 0.75
AFTERWARDS = timedelta(minutes=15)  # without new work, so that nodes are removed
EXAMPLES_COUNT_MAX = 20


class Day(msgspec.Struct, frozen=True):
    """A kind of day."""

    about: str
    seed: int
    script: Callable[[Simulation], None]


def _nothing(world: Simulation) -> None:
    """No incident."""


def _burst(world: Simulation) -> None:
    """Forty jobs at once, a quarter of them gangs."""
    world.loop.call_later(900.0, _submit, world, 40)


def _submit(world: Simulation, count: int) -> None:
    for number in range(count):
        name = f"burst-{number}"
        request = JobRequested(
            job_name=name,
            job_id=JobId(name),
            project_id="burst",
            gpu_requirements=GpuRequirements(gpu_count=1 + number % 2, gpu_type=("T4", "L4", None)[number % 3]),
            container=ContainerRequest(image="work:1"),
            priority=("low", "medium", "high")[number % 3],
            members=3 if number % 4 == 0 else 1,
            run_seconds=300.0 + 20.0 * number,
        )
        world.bus.publish(Envelope(id=FactId(name), source="/burst", time=world.loop.now(), fact=request))


def _storm(world: Simulation) -> None:
    """The cloud reclaims all spot machines twice: with 120 s, then with 30 s of notice."""
    world.loop.call_later(1200.0, _warn, world, 120.0)
    world.loop.call_later(2100.0, _warn, world, 30.0)


def _warn(world: Simulation, seconds: float) -> None:
    for machine in world.cloud.spot():
        world.cloud.warn(machine, seconds)


def _outage(world: Simulation) -> None:
    """The broker is unreachable for 4 min; later scaler and pod watcher crash."""
    world.loop.call_later(900.0, setattr, world.bus, "is_away", True)
    world.loop.call_later(1140.0, _return_broker, world)
    world.loop.call_later(1800.0, world.process_pool.kill, "scaler")
    world.loop.call_later(1805.0, world.process_pool.kill, "pod_watcher")


def _return_broker(world: Simulation) -> None:
    world.bus.is_away = False
    world.process_pool.pump()


DAYS = {
    "quiet": Day("no incident", 31, _nothing),
    "burst": Day("forty jobs at once", 32, _burst),
    "storm": Day("the cloud reclaims all spot machines twice", 33, _storm),
    "outage": Day("the broker is unreachable, then scaler and pod watcher crash", 34, _outage),
}


def history_of(name: str) -> Path:
    """Return the path of the history."""
    return FOLDER / f"{name}.jsonl.xz"


def expected_of(name: str) -> Path:
    """Return the path of the expected report."""
    return FOLDER / f"{name}.expected.txt"


def record(name: str) -> Recording:
    """Simulate the day and return its history."""
    day = DAYS[name]
    world = Simulation(Setting(seed=day.seed, hours=HOURS, kinds=()), ROLES)
    facts: list[Stored] = []

    def keep(recorded: Recorded) -> None:
        if recorded.stream in STREAMS and not isinstance(recorded.fact, GpuNodeSampled):
            facts.append(Stored(at=world.loop.now(), recorded=recorded))

    world.bus.listen(keep)
    day.script(world)
    result = world.run()
    assert not result.violations, f"{name}: {result.violations}"
    to_at = ORIGIN + timedelta(hours=HOURS) + AFTERWARDS
    head = Head(
        about=day.about,
        policy=world.policies.now,
        policy_digest=policy_digest(world.policies.now),
        from_at=ORIGIN,
        to_at=to_at,
    )
    return Recording(head=head, facts=tuple(stored for stored in facts if stored.at <= to_at))


def replayed(name: str) -> RetraceResult:
    """Plan the history again with the current code."""
    return retrace(load(history_of(name)))


def report_of(result: RetraceResult) -> str:
    """Return the report as it is kept."""
    return "\n".join(report_lines(result, EXAMPLES_COUNT_MAX)) + "\n"
