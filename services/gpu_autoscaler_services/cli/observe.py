"""`gpu-autoscaler observe`: beside whatever runs on a cluster, with the right to read and no other."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from cyclopts import Parameter

from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.sentences import decision_sentence, held_back_sentence
from gpu_autoscaler.core.state import EMPTY_STATE
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.kube.client import KubeClient, read_only
from gpu_autoscaler.kube.connection import from_environment
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.tools.history import Stored
from gpu_autoscaler.tools.observed import Observed, observed
from gpu_autoscaler.tools.recording import Head, Recording, save
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.figures import figures
from gpu_autoscaler_services.cli.output import Columns, Output, show, words

_LOOK_SECONDS = 1.0
_COLUMNS: Columns = (
    ("", lambda row: row["name"]),
    ("THEIRS", lambda row: row["theirs"]),
    ("OURS, MODELLED", lambda row: row["ours"]),
    ("DIFFERENCE", lambda row: row["difference"]),
)


def observe(
    *,
    kubeconfig: Annotated[Path | None, Parameter(help="Of the cluster; else KUBECONFIG or ~/.kube/config.")] = None,
    policy: Annotated[Path | None, Parameter(help="TOML file of the scaling policy; else the defaults.")] = None,
    offers: Annotated[Path | None, Parameter(help="JSON file of what could be bought, with prices.")] = None,
    report_seconds: Annotated[float, Parameter(help="Between two comparisons.")] = 600.0,
    for_seconds: Annotated[float | None, Parameter(name="--for", help="Seconds until it ends; else Ctrl-C.")] = None,
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
    watching = Watching(load_policy(policy), Clock(1.0))

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
        await system.start(words)
        try:
            words(f"dashboard and API: {system.gateway_url}; nothing is written to the cluster; Ctrl-C ends it")
            bus = await connect(system.nats_url)
            async with contextlib.AsyncExitStack() as open_things:
                open_things.push_async_callback(bus.close)
                follower = Follower(bus, watching.clock, lambda seen: watching.add(seen.recorded, seen.stored_at))
                await open_things.enter_async_context(follower)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(for_seconds):
                        await _look_on(watching, ended, report_seconds, output)
            await _report(watching, output)
            words(f"the record: {watching.kept(folder)}; gpu-autoscaler replay reads it")
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

    def __init__(self, policy: ScalingPolicy, clock: Clock) -> None:
        self.clock = clock
        self._policy = policy
        self._from_at = clock.now()
        self._facts: list[Stored] = []
        self._new: list[Recorded] = []
        self._state = EMPTY_STATE
        self._said: frozenset[str] = frozenset()

    def add(self, recorded: Recorded, stored_at: datetime) -> None:
        """Take a fact in."""
        self._facts.append(Stored(at=self.clock.at(stored_at), recorded=recorded))
        self._new.append(recorded)

    def look(self) -> Iterator[str]:
        """Yield in a sentence each what we would do or hold back now, where that is news."""
        self._state, self._new = fold(self._state, self._new), []
        now = self.clock.now()
        # No instance there is of ours: that is known, and as fresh as this moment.
        made = plan(msgspec.structs.replace(self._state, instances_listed_at=now), self._policy, now)
        said = [decision_sentence(each) for each in made.decisions]
        said += [held_back_sentence(each) for each in made.held_back]
        yield from (sentence for sentence in said if sentence not in self._said)
        self._said = frozenset(said)

    def recording(self) -> Recording:
        """Return everything that was seen."""
        head = Head(policy=self._policy, from_at=self._from_at, to_at=self.clock.now())
        facts = sorted(self._facts, key=lambda each: (each.at, each.recorded.stream, each.recorded.sequence))
        return Recording(head=head, facts=tuple(facts))

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
            words(f"{watching.clock.now():%H:%M:%S} we would: {sentence}")
        if loop.time() >= report_at:
            await _report(watching, output)
            report_at = loop.time() + report_seconds


async def _report(watching: Watching, output: Output) -> None:
    try:
        # In a thread of its own: the model has an event loop of virtual time.
        found = await asyncio.to_thread(watching.compared)
    except ConfigError as exc:
        words("; ".join(exc.mistakes))
        return
    rows = list(figures({"theirs": found.theirs, "ours": found.ours}))
    show(msgspec.to_builtins(found), rows, _COLUMNS, lambda row: str(row["name"]), output)
    words("assumed:")
    for sentence in found.assumed:
        words(f"  - {sentence}")
