"""`gpu-autoscaler observe`: run read-only beside another autoscaler and compare."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from gpu_autoscaler.core.explain.names import decision_sentence, deferred_sentence, names_in_state
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.kube.client import KubeClient, read_only
from gpu_autoscaler.kube.connection import from_environment
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.replay.observation import FACTS_COUNT_MAX, FleetComparison, Window, compare_fleets
from gpu_autoscaler.replay.recording import Recording, save
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.runtime.signals import stop_event
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.figures import figures
from gpu_autoscaler_services.cli.options import DurationOrSeconds
from gpu_autoscaler_services.cli.output import Columns, Output, print_message, show
from gpu_autoscaler_services.cli.running import silence_logs

_LOOK_SECONDS = 1.0
FACTS_COUNT_MIN = 1000  # a price list and a few pods
_COLUMNS: Columns = (
    ("", lambda row: row["name"]),
    ("OBSERVED", lambda row: row["theirs"]),
    ("OURS, MODELED", lambda row: row["ours"]),
    ("DIFFERENCE", lambda row: row["difference"]),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Span:
    """Options for duration, report interval and memory."""

    report_seconds: Annotated[float, Parameter(help="Seconds between reports.")] = 600.0
    for_seconds: Annotated[
        DurationOrSeconds | None, Parameter(name="--for", help="Time to run: 45m, 1h. Default: until Ctrl-C.")
    ] = None
    facts_max: Annotated[int, Parameter(help="Facts kept to compare; older ones are dropped.")] = FACTS_COUNT_MAX


UNTIL_ENDED = Span()


def observe(
    *,
    kubeconfig: Annotated[Path | None, Parameter(help="Default: KUBECONFIG or ~/.kube/config.")] = None,
    policy: Annotated[Path | None, Parameter(help="Policy file (TOML). Default: the built-in policy.")] = None,
    offers: Annotated[Path | None, Parameter(help="Available offers with prices (JSON file).")] = None,
    span: Span = UNTIL_ENDED,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 picks a free one.")] = 8000,
    folder: Annotated[Path, Parameter(help="Folder of streams, logs and the recording.")] = Path("out/observe"),
    output: Output = "table",
) -> int:
    """Print what our policy would do on a cluster that another autoscaler scales, and the difference in cost."""
    silence_logs()
    if span.facts_max < FACTS_COUNT_MIN:
        raise ConfigError("observe", [f"--facts-max: {span.facts_max} is too small; set at least {FACTS_COUNT_MIN}"])
    watching = Watching(load_policy(policy), Clock(1.0), span.facts_max)

    async def run() -> None:
        from gpu_autoscaler_services.demo.subscriber import Subscriber, connect  # noqa: PLC0415 - imports the whole system
        from gpu_autoscaler_services.local.system import ExternalSystems, LocalSystem  # noqa: PLC0415 - imports the whole system

        await can_read(kubeconfig, watching.clock)
        there = ExternalSystems(kubeconfig=kubeconfig, is_observe_only=True)
        system = LocalSystem(
            folder, clock=watching.clock, policy=policy, gateway_port=gateway_port, offers=offers, external=there
        )
        ended = stop_event()
        await system.start(print_message)
        try:
            print_message(f"dashboard and API: {system.gateway_url}; the cluster is only read; Ctrl-C stops it")
            bus = await connect(system.nats_url)
            async with contextlib.AsyncExitStack() as open_things:
                open_things.push_async_callback(bus.close)
                subscriber = Subscriber(
                    bus, watching.clock, lambda seen: watching.add(seen.recorded, seen.stored_at), is_kept=False
                )
                await open_things.enter_async_context(subscriber)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(span.for_seconds):
                        await _follow(watching, ended, span.report_seconds, output)
            await _report(watching, output)
            print_message(f"recording: {(path := watching.save(folder))}; replay it with: gpu-autoscaler replay {path}")
        finally:
            await system.stop()

    asyncio.run(run())
    return Exit.OK


async def can_read(kubeconfig: Path | None, clock: Clock) -> None:
    """Return once nodes and pods were listed. Raises an error that names the missing right."""
    path = None if kubeconfig is None else str(kubeconfig)
    client = KubeClient(from_environment(path), now=clock.now, before_write=read_only)
    try:
        await client.cluster()
        for kind in (NODES, PODS):
            await anext(aiter(client.watch(kind)))
    finally:
        await client.close()


class Watching:
    """Facts observed in the cluster, and what our policy would do."""

    def __init__(self, policy: ScalingPolicy, clock: Clock, facts_count_max: int = FACTS_COUNT_MAX) -> None:
        self.clock = clock
        self._policy = policy
        self._window = Window(clock.now(), facts_count_max)
        self._has_dropped = False
        self._new: list[Recorded] = []
        self._state = EMPTY_STATE
        self._printed: frozenset[str] = frozenset()

    def add(self, recorded: Recorded, stored_at: datetime) -> None:
        self._has_dropped |= self._window.add(recorded, self.clock.at(stored_at))
        self._new.append(recorded)

    def look(self) -> Iterator[str]:
        """Yield a sentence per decision or deferred action that is new since the last call."""
        self._state, self._new = fold(self._state, self._new), []
        now = self.clock.now()
        # None of the instances is ours: this is known and current.
        plan_now = plan(msgspec.structs.replace(self._state, instances_listed_at=now), self._policy, now)
        names = names_in_state(self._state)
        sentences = [
            decision_sentence(decision, names) for decision in (*plan_now.decisions, *plan_now.upkeep_decisions)
        ]
        of_upkeep = [deferral for act in plan_now.upkeep_deferred for deferral in act.each()]
        sentences += [deferred_sentence(deferred, names) for deferred in (*plan_now.deferred, *of_upkeep)]
        yield from (sentence for sentence in sentences if sentence not in self._printed)
        self._printed = frozenset(sentences)

    def dropped_notice(self) -> str:
        """Return a notice if facts were dropped since the last call, with the new start; else an empty string."""
        has_dropped, self._has_dropped = self._has_dropped, False
        if not has_dropped:
            return ""
        count, from_at = self._window.facts_count_max, self._window.from_at
        return (
            f"more than {count:,} facts observed: recording and comparison now begin at {from_at:%Y-%m-%d %H:%M:%S}Z;"
            " to keep more, raise --facts-max"
        )

    def recording(self) -> Recording:
        return self._window.recording(self._policy, self.clock.now())

    def compared(self) -> FleetComparison:
        """Return the observed outcome and ours. Raises ConfigError while there is nothing to compare."""
        from gpu_autoscaler_services.simulation import ROLES  # noqa: PLC0415 - imports every service

        return compare_fleets(self.recording(), self._policy, ROLES)

    def save(self, folder: Path) -> Path:
        path = folder / "history.xz"
        save(self.recording(), path)
        return path


async def _follow(watching: Watching, ended: asyncio.Event, report_seconds: float, output: Output) -> None:
    loop = asyncio.get_running_loop()
    report_at = loop.time() + report_seconds
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)
        for sentence in watching.look():
            print_message(f"{watching.clock.now():%H:%M:%S} would: {sentence}")
        if notice := watching.dropped_notice():
            print_message(notice)
        if loop.time() >= report_at:
            await _report(watching, output)
            report_at = loop.time() + report_seconds


async def _report(watching: Watching, output: Output) -> None:
    try:
        # In a separate thread, because the model runs its own event loop in virtual time.
        comparison = await asyncio.to_thread(watching.compared)
    except ConfigError as exc:
        print_message("; ".join(exc.violations))
        return
    rows = list(figures({"theirs": comparison.theirs, "ours": comparison.ours}))
    show(msgspec.to_builtins(comparison), rows, _COLUMNS, lambda row: str(row["name"]), output)
    print_message("assumptions:")
    for sentence in comparison.assumptions:
        print_message(f"  - {sentence}")
