"""`gpu-autoscaler observe`: beside whatever runs on a cluster, with the right to read and no other."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from cyclopts import Parameter

from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import EMPTY_STATE
from gpu_autoscaler.core.words.sentences import decision_sentence, held_back_sentence
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.kube.client import KubeClient, read_only
from gpu_autoscaler.kube.connection import from_environment
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.tools.observed import Observed, observed
from gpu_autoscaler.tools.recording import Recording, save
from gpu_autoscaler.tools.window import FACTS_COUNT_MAX, Window
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.figures import figures
from gpu_autoscaler_services.cli.output import Columns, Output, show, print_message

_LOOK_SECONDS = 1.0
FACTS_COUNT_MIN = 1000  # a price list and a few pods
_COLUMNS: Columns = (
    ("", lambda row: row["name"]),
    ("THEIRS", lambda row: row["theirs"]),
    ("OURS, MODELLED", lambda row: row["ours"]),
    ("DIFFERENCE", lambda row: row["difference"]),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Span:
    """How long it looks on, how often it compares, and how far back."""

    report_seconds: Annotated[float, Parameter(help="Between two comparisons.")] = 600.0
    for_seconds: Annotated[float | None, Parameter(name="--for", help="Seconds until it ends; else Ctrl-C.")] = None
    facts_max: Annotated[int, Parameter(help="So many facts are compared; older ones leave.")] = FACTS_COUNT_MAX


UNTIL_ENDED = Span()


def observe(
    *,
    kubeconfig: Annotated[Path | None, Parameter(help="Of the cluster; else KUBECONFIG or ~/.kube/config.")] = None,
    policy: Annotated[Path | None, Parameter(help="TOML file of the scaling policy; else the defaults.")] = None,
    offers: Annotated[Path | None, Parameter(help="JSON file of what could be bought, with prices.")] = None,
    span: Span = UNTIL_ENDED,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 takes a free one.")] = 8000,
    folder: Annotated[Path, Parameter(help="Where streams, logs and the record are kept.")] = Path("out/observe"),
    output: Output = "table",
) -> int:
    """Say live what we would do on a cluster that somebody else scales, and what it would have saved or cost.

    Needs get, list and watch on nodes and pods; whatever else the credentials may do is not used: every write is
    refused before it leaves this machine. NATS, watchers and dashboard run here; nothing of ours decides or acts.
    """
    # What the services of the model log of its world is no word to the person who asked.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if span.facts_max < FACTS_COUNT_MIN:
        raise ConfigError("observe", [f"--facts-max {span.facts_max} shows nothing; name {FACTS_COUNT_MIN} at least"])
    watching = Watching(load_policy(policy), Clock(1.0), span.facts_max)

    async def run() -> None:
        from gpu_autoscaler_services.demo.follow import Follower, connect  # noqa: PLC0415 - with the whole system
        from gpu_autoscaler_services.local.system import Elsewhere, LocalSystem  # noqa: PLC0415 - the whole system

        await can_read(kubeconfig, watching.clock)
        there = Elsewhere(kubeconfig=kubeconfig, is_only_watched=True)
        system = LocalSystem(
            folder,
            clock=watching.clock,
            policy=policy,
            gateway_port=gateway_port,
            offers=offers,
            elsewhere=there,
        )
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await system.start(print_message)
        try:
            print_message(f"dashboard and API: {system.gateway_url}; nothing is written to the cluster; Ctrl-C ends it")
            bus = await connect(system.nats_url)
            async with contextlib.AsyncExitStack() as open_things:
                open_things.push_async_callback(bus.close)
                follower = Follower(
                    bus, watching.clock, lambda seen: watching.add(seen.recorded, seen.stored_at), is_kept=False
                )
                await open_things.enter_async_context(follower)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(span.for_seconds):
                        await _look_on(watching, ended, span.report_seconds, output)
            await _report(watching, output)
            print_message(f"the record: {watching.kept(folder)}; gpu-autoscaler replay reads it")
        finally:
            await system.stop()

    asyncio.run(run())
    return Exit.OK


async def can_read(kubeconfig: Path | None, clock: Clock) -> None:
    """Return once nodes and pods could be listed. Raises what says which right is missing, and who can grant it."""
    path = None if kubeconfig is None else str(kubeconfig)
    client = KubeClient(from_environment(path), now=clock.now, before_write=read_only)
    try:
        await client.cluster()
        for kind in (NODES, PODS):
            await anext(aiter(client.watch(kind)))
    finally:
        await client.close()


class Watching:
    """What was seen of the cluster, and what we would make of it."""

    def __init__(self, policy: ScalingPolicy, clock: Clock, facts_count_max: int = FACTS_COUNT_MAX) -> None:
        self.clock = clock
        self._policy = policy
        self._window = Window(clock.now(), facts_count_max)
        self._has_dropped = False
        self._new: list[Recorded] = []
        self._state = EMPTY_STATE
        self._said: frozenset[str] = frozenset()

    def add(self, recorded: Recorded, stored_at: datetime) -> None:
        """Take a fact in."""
        self._has_dropped |= self._window.add(recorded, self.clock.at(stored_at))
        self._new.append(recorded)

    def look(self) -> Iterator[str]:
        """Yield in a sentence each what we would do or hold back now, where that is news."""
        self._state, self._new = fold(self._state, self._new), []
        now = self.clock.now()
        # No instance there is of ours: that is known, and as fresh as this moment.
        made = plan(msgspec.structs.replace(self._state, instances_listed_at=now), self._policy, now)
        said = [decision_sentence(each) for each in made.decisions]
        said += [held_back_sentence(each) for each in made.deferred]
        yield from (sentence for sentence in said if sentence not in self._said)
        self._said = frozenset(said)

    def dropped(self) -> str:
        """Return from when on is still compared, where that has changed since it was last asked; else nothing."""
        has_dropped, self._has_dropped = self._has_dropped, False
        if not has_dropped:
            return ""
        count, from_at = self._window.facts_count_max, self._window.from_at
        return (
            f"more than {count:,} facts were seen: record and comparison begin at {from_at:%Y-%m-%d %H:%M:%S}Z by now,"
            " with what was there then; --facts-max keeps more"
        )

    def recording(self) -> Recording:
        """Return what was seen, as far back as it is kept."""
        return self._window.recording(self._policy, self.clock.now())

    def compared(self) -> Observed:
        """Return what they did and what we would have done. Raises ConfigError while there is nothing to compare."""
        from gpu_autoscaler_services.simulation import ROLES  # noqa: PLC0415 - every service

        return observed(self.recording(), self._policy, ROLES)

    def kept(self, folder: Path) -> Path:
        """Write what was seen to a file; return its path."""
        path = folder / "history.xz"
        save(self.recording(), path)
        return path


async def _look_on(watching: Watching, ended: asyncio.Event, report_seconds: float, output: Output) -> None:
    loop = asyncio.get_running_loop()
    report_at = loop.time() + report_seconds
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)
        for sentence in watching.look():
            print_message(f"{watching.clock.now():%H:%M:%S} we would: {sentence}")
        if told := watching.dropped():
            print_message(told)
        if loop.time() >= report_at:
            await _report(watching, output)
            report_at = loop.time() + report_seconds


async def _report(watching: Watching, output: Output) -> None:
    try:
        # In a thread of its own: the model has an event loop of virtual time.
        found = await asyncio.to_thread(watching.compared)
    except ConfigError as exc:
        print_message("; ".join(exc.mistakes))
        return
    rows = list(figures({"theirs": found.theirs, "ours": found.ours}))
    show(msgspec.to_builtins(found), rows, _COLUMNS, lambda row: str(row["name"]), output)
    print_message("assumed:")
    for sentence in found.assumed:
        print_message(f"  - {sentence}")
