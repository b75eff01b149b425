"""The processes of a run: starting, killing and restarting them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from datetime import datetime, timedelta
from typing import Any, cast

from gpu_autoscaler.bus.memory_broker import MemoryConsumer
from gpu_autoscaler.bus.protocol import refuse_gap
from gpu_autoscaler.bus.streams import ConsumerSpec, consumers_for, lane_durable
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.model.errors import ConfigError, PermanentError, RequestRefused, StalePlan, TransientError
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.loops.effects import STALE_SECONDS
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import as_outcome, is_parent_discarded, wrap_in_envelopes
from gpu_autoscaler.runtime.resync import Resync
from gpu_autoscaler.runtime.service import (
    FactInput,
    FoldInput,
    MemoryInput,
    Outcome,
    Outputs,
    ResyncInput,
    Service,
    Step,
    TickInput,
    WatchInput,
    lanes_of,
    urgency_filter,
)
from gpu_autoscaler.runtime.steps import take_steps
from gpu_autoscaler.runtime.urgency import Urgency
from gpu_autoscaler.sim.adapters.bus import DeadLetter, SimBus
from gpu_autoscaler.sim.adapters.call_boundary import CallBoundary
from gpu_autoscaler.sim.adapters.snapshots import SnapshotDiffers, Start, keep, resume
from gpu_autoscaler.sim.faults.injection import SNAPSHOT_FAULTS, Faults
from gpu_autoscaler.sim.invariants.readability import StateUnreadable, living_differences
from gpu_autoscaler.sim.virtual_time import VirtualClock, VirtualLoop

TRANSIT_SECONDS = 0.002  # from the broker to a consumer
DELAYED_SECONDS = (0.2, 20.0)
BUG = "bug"

BugHandler = Callable[[str, Exception], None]
ServiceFactory = Callable[["Process"], Service]


class FoldingView(StateView):
    """Folds the facts that have arrived when the state is read: between two reads they are one batch.

    The state does not depend on batches, and most services read it less often than facts arrive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrived: list[Recorded] = []

    @property
    def state(self) -> ClusterState:
        """The state with all facts that have arrived."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._state = fold(self._state, arrived)
        return self._state

    def add(self, facts: list[Recorded], last_sequences: Mapping[str, int]) -> None:
        """Advance to these sequences; `facts` are those that are folded."""
        self._arrived += facts
        self.advance(self._state, last_sequences)


class Process:
    """A running service, until it is killed."""

    def __init__(
        self,
        role: str,
        *,
        loop: VirtualLoop,
        faults: Faults,
        bus: SimBus,
        clock: VirtualClock,
        on_kill: Callable[["Process"], None],
        on_bug: BugHandler,
        tick_inputs: Callable[[StateView, datetime], Hashable] | None = None,
    ) -> None:
        self.role = role
        self.is_dead = False
        self.suspension: asyncio.Future[None] | None = None  # until it ends, none of its code runs
        self.clock = clock
        self.view = FoldingView()
        self.seed = EMPTY_STATE  # the last snapshot state of streams that were lost
        self.boundary = CallBoundary(loop, faults, self)
        self.boundary_apart = CallBoundary(loop, faults.apart("snapshots", SNAPSHOT_FAULTS), self)
        self.delayed_until: dict[str, float] = {}  # by stream: no fact of it arrives earlier
        self._loop = loop
        self._faults = faults
        self.bus = bus
        self._on_kill = on_kill
        self._on_bug = on_bug
        self._tick_inputs = tick_inputs
        self._last_inputs: Hashable = None  # of the last tick that a repetition would add nothing to
        self._next_change_at: datetime | None = None  # when time alone may change what that tick would publish
        self._published: tuple[str, int] | None = None  # by that tick: the repetition reads it
        self._limits = Limits()
        self._service: Service
        self._fold_input: FoldInput | None = None
        self._fact_input: FactInput | None = None  # checked once: isinstance with a protocol is slow
        self._folds: frozenset[Any] = frozenset()
        self._is_urgent: Callable[[Any], bool] = bool
        self._streams: frozenset[str] = frozenset()
        self._arriving: set[str] = set()
        self._consumers: dict[str, tuple[ConsumerSpec, MemoryConsumer]] = {}
        self._consumed: frozenset[str] = frozenset()  # names of streams
        self._in_progress: dict[tuple[str, int], MemoryConsumer] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self._concurrency = 1  # of all facts without a lane
        self._lane_concurrency: dict[str, int] = {}  # by durable
        self._is_pumping = False
        self._waking: asyncio.Future[None] | None = None
        self._urgency = Urgency(self._limits.batch_window)
        self._has_failed = False  # of the last tick
        self._folded = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._resync: Resync | None = None

    # ---- life cycle

    def begin(self, factory: ServiceFactory, start: Start | None) -> None:
        """Start the service, from the newest snapshot or, if `start` is None, from the oldest facts."""
        if start is None:
            self.start(factory(self))
        else:
            self._spawn(self._resume(factory, start))

    async def _resume(self, factory: ServiceFactory, start: Start) -> None:
        service = factory(self) if start.has_memory else None
        snapshots = start.snapshots(cast("MemoryInput | None", service))
        boundary = self.boundary_apart if start.has_memory else self.boundary
        await resume(snapshots, boundary, waits=start.waits)
        self.seed = snapshots.lost_state
        self.start(service or factory(self))
        if start.keeps:
            self._spawn(keep(snapshots, boundary))

    def start(self, service: Service) -> None:
        """Read the streams, then start consumers, ticks and sources."""
        self._service = service
        self._fold_input = service if isinstance(service, FoldInput) else None
        self._folds = frozenset(service.folds)
        self._is_urgent = urgency_filter(service)
        self._streams = frozenset(fact.stream() for fact in service.folds)
        self._concurrency = getattr(service, "concurrency_max", 1)
        places = dict(self.view.cut.last_sequences)
        self._catch_up(service)
        if self._fold_input is not None:
            self._fold_input.on_folded(self.bus.since(places, self._folds))
        lanes = lanes_of(service)
        for spec in consumers_for(service.name, service.consumes, lanes):
            if not spec.lanes:  # else it delivers nothing to this version
                self._consumers[spec.durable] = (spec, self.bus.consumer(spec))
        self._lane_concurrency = {lane_durable(service.name, lane): lane.concurrency_max for lane in lanes}
        self._consumed = frozenset(spec.stream for spec, _ in self._consumers.values())
        self._fact_input = service if isinstance(service, FactInput) else None
        if isinstance(service, ResyncInput):
            self._resync = Resync(service)
            self._spawn(self._resync_forever(self._resync))
        if service.tick_seconds is not None:
            assert isinstance(service, TickInput)  # noqa: S101 - like the runner
            self._spawn(self._tick_forever(service, service.tick_seconds))
        if isinstance(service, WatchInput):
            semaphore = asyncio.Semaphore(1)
            for source in service.sources():
                self._spawn(self._watch_forever(service, source, semaphore))
        self.pump()

    def _catch_up(self, service: Service) -> None:
        """Fold the stored facts, from a snapshot only later ones.

        The result must equal the fold of all facts ever; where streams have discarded some, what is alive in it.
        """
        places = dict(self.view.cut.last_sequences)
        every = self.bus.folded(service.folds)
        state = every
        if places or self.bus.discards:
            state = fold(self.view.state, self.bus.since(places, self._folds))
        if self.bus.discards:
            if differences := living_differences(every, state, self._folds):
                self._on_bug(self.role, StateUnreadable("; ".join(differences)))
        elif state != every:
            self._on_bug(
                self.role, SnapshotDiffers("the snapshot and later facts fold to another state than all facts")
            )
        self.view.advance(state, self.bus.ends(service.folds))

    def kill(self) -> None:
        """Stop at once; messages in progress are redelivered after their ack wait."""
        if not self.is_dead:
            self.end()
            self._on_kill(self)

    def end(self) -> None:
        """Stop: none of its code runs again."""
        self.is_dead = True
        self._loop.graveyard.append(self)

    def suspend(self) -> None:
        """Run none of its code until `resume`, like a paused container or virtual machine."""
        self.suspension = self.suspension or self._loop.create_future()

    def resume(self) -> None:
        """Continue where `suspend` stopped it."""
        if self.suspension is not None:
            self.suspension.set_result(None)
            self.suspension = None
            self.pump()

    def close(self) -> None:
        self.is_dead = True
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(self._loop.spawn(work))

    # ---- folding

    def stream_advanced(self, stream: str) -> None:
        """The stream has a new fact."""
        if stream in self._streams and stream not in self._arriving:
            self._arriving.add(stream)
            at = max(self._loop.time() + self._transit_seconds(), self.delayed_until.get(stream, 0.0))
            self._loop.call_at(at, self._fold, stream)

    def _transit_seconds(self) -> float:
        if not self._faults.strikes("message_delayed", self.role):
            return TRANSIT_SECONDS
        seconds = self._faults.seconds("message_delayed", *DELAYED_SECONDS)
        self._faults.disturb(seconds, self.role)
        return seconds

    def _fold(self, stream: str) -> None:
        if self.is_dead:
            return
        self._arriving.discard(stream)
        if self.bus.is_away or self.suspension is not None:
            return  # `pump` resumes when the broker, or this process, is back
        read_up_to, first_sequence = self.view.last_sequence(stream), self.bus.span(stream).first_sequence
        try:
            refuse_gap(stream, read_up_to, first_sequence)
        except ConfigError:
            self.bus.unread_discarded.append((self.role, stream))
            self.kill()  # the runner ends the process, which starts again and rebuilds its state
            return
        if 0 < read_up_to < first_sequence - 1:
            what = f"{stream} has discarded what follows {read_up_to}, and the process reads on from {first_sequence}"
            self._on_bug(self.role, StateUnreadable(what))
        facts = self.bus.facts[stream]
        unread = facts[max(read_up_to, first_sequence - 1) :]
        new_facts = [recorded for recorded in unread if type(recorded.envelope.fact) in self._folds]
        self.view.add(new_facts, {stream: len(facts)})
        if new_facts and self._fold_input is not None:
            self._fold_input.on_folded(new_facts)
        self._folded.set()
        self._folded.clear()
        if new_facts and (count := sum(map(self._is_urgent, (recorded.envelope.fact for recorded in new_facts)))):
            self._urgency.record(count, self._loop.time())
            self._schedule_urgent_tick()

    def living_differences(self) -> list[str]:
        """Return how its state differs in living objects from the fold of all facts; none while facts are on their way
        to it.
        """
        if any(self.view.last_sequence(stream) < len(self.bus.facts[stream]) for stream in self._streams):
            return []
        every, own = self.bus.folded(self._folds), self.view.state
        ended = living_differences(own, every, self._folds)
        return [*living_differences(every, own, self._folds), *(f"taken for alive: {line}" for line in ended)]

    async def _until_folded(self, stream: str, sequence: int) -> bool:
        """Wait until the state includes this fact. Return False on timeout."""
        until = self._loop.time() + self._limits.fold_seconds_max
        while self.view.last_sequence(stream) < sequence:
            try:
                async with asyncio.timeout_at(until):
                    await self._folded.wait()
            except TimeoutError:
                await self.boundary.continue_if_alive()
                return False
        await self.boundary.continue_if_alive()
        return True

    # ---- ticks

    async def _tick_forever(self, service: TickInput, tick_seconds: float) -> None:
        failures_count = stale_count = 0
        while True:
            interval = tick_seconds
            self._urgency.start_tick(self._loop.time())
            now = self.clock.now()
            try:
                inputs = None if self._tick_inputs is None else self._tick_inputs(self.view, now)
                if inputs is None or inputs != self._last_inputs or self._is_due(now):
                    interval = await self._tick(service, now, inputs) or tick_seconds
                failures_count = stale_count = 0
            except StalePlan:
                failures_count, stale_count = 0, stale_count + 1
            except TransientError:
                failures_count += 1
            except Exception as exc:  # noqa: BLE001 - any error of a service is reported and retried
                failures_count += 1
                self._on_bug(self.role, exc)
            await self.boundary.continue_if_alive()
            if tries_count := failures_count or stale_count:
                interval = min(tick_seconds, self._backoff_seconds(tries_count, None))
            self._urgency.end_tick(self._loop.time())
            self._has_failed = failures_count > 0
            await self._wait_for_tick(interval)

    def _is_due(self, now: datetime) -> bool:
        if self._published is not None and self.view.last_sequence(self._published[0]) < self._published[1]:
            return True
        return self._next_change_at is not None and now >= self._next_change_at

    async def _tick(self, service: TickInput, now: datetime, inputs: Hashable) -> float | None:
        self._last_inputs = None
        outcome = as_outcome(await service.on_tick(now))
        sequence = await self._publish(outcome, None)
        if outcome.expected_last_sequence is not None:
            await self._until_folded(outcome.facts[0].stream(), sequence)
        if outcome.next_tick_seconds is None and (not outcome.facts or outcome.next_change_at is not None):
            self._next_change_at = outcome.next_change_at
            self._published = (outcome.facts[0].stream(), sequence) if outcome.facts else None
            self._last_inputs = inputs  # a service that wants its next tick sooner is called each time
        return outcome.next_tick_seconds

    async def _wait_for_tick(self, seconds: float) -> None:
        """Wait for the next regular tick, or an earlier one for urgent facts."""
        self._waking = self._loop.create_future()
        timer = self._loop.call_later(seconds, _wake, self._waking)
        self._schedule_urgent_tick()
        await self._waking
        timer.cancel()
        await self.boundary.continue_if_alive()

    def _schedule_urgent_tick(self) -> None:
        """Schedule the tick that urgent facts wait for; further urgent facts may postpone it."""
        due_at, waking = self._urgency.due_at, self._waking
        if waking is not None and not waking.done() and due_at is not None and not self._has_failed:
            self._loop.call_at(max(due_at, self._loop.time()), self._tick_if_due, waking)

    def _tick_if_due(self, waking: "asyncio.Future[None]") -> None:
        due_at = self._urgency.due_at
        if due_at is not None and due_at <= self._loop.time():
            _wake(waking)

    # ---- sources

    async def _watch_forever(
        self, service: WatchInput, source: AsyncIterator[Any], semaphore: asyncio.Semaphore
    ) -> None:
        async for item in source:
            await self.boundary.continue_if_alive()
            tries = 0
            while True:
                try:
                    async with semaphore:
                        outcome = as_outcome(await service.on_item(item))
                    await self._publish(outcome, None)
                    break
                except TransientError as exc:
                    tries += 1
                    await self.boundary.sleep(self._backoff_seconds(tries, exc))
                except PermanentError:
                    break
                except Exception as exc:  # noqa: BLE001 - as in ticks
                    self._on_bug(self.role, exc)
                    break

    # ---- effects

    def schedule_pump(self, stream: str) -> None:
        """The stream has a new fact that one of the consumers may want."""
        if stream in self._consumed and not self._is_pumping:
            self._is_pumping = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Take messages from the broker up to the limit of concurrent handlers."""
        self._is_pumping = False
        if self.is_dead or self.bus.is_away or self.suspension is not None:
            return
        for stream in sorted(self._streams):
            if self.view.last_sequence(stream) < len(self.bus.facts[stream]):
                self.stream_advanced(stream)
        for spec, consumer in self._consumers.values():
            free_count = self._free_count(spec)
            if free_count > 0:
                for message, _ in consumer.deliver(free_count, self._loop.now()):
                    key = (spec.durable, message.sequence)
                    self._in_progress[key] = consumer
                    self._loop.call_later(self._limits.heartbeat_seconds, self._keep_alive, key)
                    self._spawn(self._handle(self.bus.at(spec.stream, message.sequence), spec, consumer))

    def _free_count(self, spec: ConsumerSpec) -> int:
        """Return how many more messages of this consumer may be handled now."""
        lane = self._lane_concurrency
        if spec.durable in lane:
            return lane[spec.durable] - sum(durable == spec.durable for durable, _ in self._in_progress)
        return self._concurrency - sum(durable not in lane for durable, _ in self._in_progress)

    async def _handle(self, recorded: Recorded, spec: ConsumerSpec, consumer: MemoryConsumer) -> None:
        key, sequence = (spec.durable, recorded.sequence), recorded.sequence
        await self.boundary.sleep(self._transit_seconds())
        again_seconds = await self._attempt(recorded, key)
        self._in_progress.pop(key, None)  # after a suspension it was delivered again, and may be handled twice
        if self._faults.strikes("message_repeated", self.role):
            again_seconds = spec.ack_wait_seconds  # handled, but the acknowledgment was lost
        if again_seconds is None:
            self._tries.pop(key, None)
            consumer.complete(sequence)
        else:
            consumer.postpone(sequence, self._loop.now() + timedelta(seconds=again_seconds))
            self._loop.call_later(again_seconds, self.pump)
        self.pump()

    async def _attempt(self, recorded: Recorded, key: tuple[str, int]) -> float | None:
        """Try once. Return the seconds until the next attempt, None when done."""
        try:
            return await self._effect(recorded)
        except StalePlan:
            return STALE_SECONDS
        except TransientError as exc:
            return self._failed(key, exc)
        except PermanentError as exc:
            self.bus.dead_letters.append(DeadLetter(recorded, self._service.name, exc))
            return None
        except Exception as exc:  # noqa: BLE001 - as in ticks
            self._on_bug(self.role, exc)
            return self._failed(key, exc)

    async def _effect(self, recorded: Recorded) -> float | None:
        """Call the service and publish its outcome. Return the seconds after which it wants the fact again, or None."""
        assert self._fact_input is not None  # noqa: S101 - like the runner
        if type(recorded.fact) in self._folds and not await self._until_folded(recorded.stream, recorded.sequence):
            raise TransientError("the state does not include the fact yet")
        outcome = as_outcome(await self._fact_input.on_fact(recorded))
        await self._publish(outcome, recorded.envelope)
        if outcome.set_aside_reason is not None:
            raise RequestRefused(outcome.set_aside_reason)
        again_seconds = outcome.redeliver_after_seconds
        if outcome.steps:
            again_seconds = await take_steps(outcome, _take, lambda part: self._publish(part, recorded.envelope))
        if self._faults.strikes("killed_before_ack", self.role):
            self.kill()
        await self.boundary.continue_if_alive()
        return again_seconds

    def _failed(self, key: tuple[str, int], error: Exception) -> float:
        self._tries[key] = self._tries.get(key, 0) + 1
        return self._backoff_seconds(self._tries[key], error)

    def _keep_alive(self, key: tuple[str, int]) -> None:
        """Send progress heartbeats to the broker while work continues."""
        consumer = self._in_progress.get(key)
        if consumer is not None and not self.is_dead:
            if self.suspension is None:
                consumer.progress(key[1], self._loop.now())
            self._loop.call_later(self._limits.heartbeat_seconds, self._keep_alive, key)

    # ---- publishing

    async def _publish(self, outcome: Outcome | Outputs, cause: Envelope | None) -> int:
        """Publish the facts of an outcome. Return the last sequence. Raises StalePlan, TransientError."""
        await self.boundary.continue_if_alive()
        normalized = as_outcome(outcome)
        if not normalized.facts:
            return 0
        if self._faults.strikes("killed_before_publish", self.role):
            self.kill()
            await self.boundary.continue_if_alive()
        sequence = 0
        source = f"/gpu-autoscaler/{self._service.name}/{self.role}"
        for envelope in wrap_in_envelopes(
            normalized.facts, cause, service=self._service.name, source=source, at=self.clock.now()
        ):
            stored = self._store(envelope, normalized)
            sequence = max(sequence, stored)
            self._note_published(envelope, stored)
            if self._faults.strikes("publish_answer_lost", self.role):
                raise TransientError("publish_answer_lost: the fact is stored, but the response is lost")
        return sequence

    def _note_published(self, envelope: Envelope, sequence: int) -> None:
        if self._resync is not None:
            self._resync.published(envelope.fact, sequence, stored_at=self._loop.now(), time=envelope.time)

    async def _resync_forever(self, resync: Resync) -> None:
        while True:
            await self.boundary.sleep(self._limits.resync_seconds)
            if self.bus.is_away:
                continue
            for stream in resync.streams:
                for fact, at in resync.due(self.bus.span(stream), stream, self._loop.now()):
                    name, source = self._service.name, f"/gpu-autoscaler/{self._service.name}/{self.role}"
                    (envelope,) = wrap_in_envelopes((fact,), None, service=name, source=source, at=at)
                    self._note_published(envelope, self.bus.publish(envelope).sequence)

    def _store(self, envelope: Envelope, outcome: Outcome) -> int:
        """Store one fact behind the fence of its outcome, as `runtime/publisher.py` does. Return its sequence."""
        try:
            return self.bus.publish(envelope, expected_last_sequence=outcome.expected_last_sequence).sequence
        except StalePlan as stale:
            if not is_parent_discarded(outcome, stale, self.bus.span(envelope.fact.stream())):
                raise
        return self.bus.publish(envelope, expected_last_sequence=0).sequence

    def _backoff_seconds(self, tries_count: int, error: Exception | None) -> float:
        """Return the wait of `runtime/retry.py`, without its jitter."""
        if isinstance(error, TransientError) and error.retry_after_seconds is not None:
            return error.retry_after_seconds
        backoff = self._limits.backoff
        return min(backoff.first_seconds * 2.0 ** min(max(tries_count, 1) - 1, 64), backoff.seconds_max)


async def _take(step: Step) -> Outcome:
    return as_outcome(await step())


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


RESTART_SECONDS = (1.0, 120.0)
LOST_RESTART_SECONDS = (1.0, 5.0)  # of a process that exited, by its supervisor
SKEW_SECONDS_MAX = 3.0
FAR_AHEAD_SECONDS = 8 * 3600.0
OBSERVING_ROLES = ("notices", "pod_watcher")  # they run on other hosts than what decides, and decide nothing
REDELIVERED_SECONDS = 31.0  # until the broker redelivers messages of a dead process: its ack wait plus one second

BoundTickInputs = Callable[[StateView, datetime], Hashable]


class ProcessPool:
    """All processes by role. A role that is killed is restarted as a new object."""

    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        bus: SimBus,
        tick_inputs: Mapping[str, BoundTickInputs | None],
        factory: ServiceFactory,
        on_bug: BugHandler,
        *,
        snapshots: Callable[[Process], Start | None] = lambda _: None,
    ) -> None:
        """`roles`: the tick inputs of each role; None: every tick is called.

        `snapshots`: how a process starts from snapshots; None: it starts from the oldest facts.
        """
        self.processes: dict[str, Process] = {}
        self._loop = loop
        self._faults = faults
        self._bus = bus
        self._factory = factory
        self._snapshots = snapshots
        self._on_bug = on_bug
        self._tick_inputs = tick_inputs
        self._skew = {
            role: faults.seconds("clocks_differ", -SKEW_SECONDS_MAX, SKEW_SECONDS_MAX)
            if faults.strikes("clocks_differ")
            else 0.0
            for role in tick_inputs
        }
        if faults.strikes("clock_far_ahead"):
            role = faults.choose("clock_far_ahead", [role for role in OBSERVING_ROLES if role in self._skew])
            self._skew[role] += FAR_AHEAD_SECONDS
        self._ended: list[Process] = []
        self._stopped: set[str] = set()  # roles of which no process starts
        bus.listen(self._on_fact)

    def begin(self, first: Collection[str] = ()) -> None:
        """Start every role; `first`: those that take a step longer, which the order of facts then does not show."""
        for role in sorted(self._skew, key=lambda role: role not in first):
            self.start(role)

    def start(self, role: str, *, instance: str | None = None) -> None:
        """Start a new process of a role; `instance` names an additional one."""
        if self._bus.is_away:  # a process cannot start without the broker
            self._loop.call_later(1.0, lambda: self.start(role, instance=instance))
            return
        name = instance or role
        if role in self._stopped:
            return
        if name in self.processes:  # the additional one is running
            return
        process = Process(
            role,
            loop=self._loop,
            faults=self._faults,
            bus=self._bus,
            clock=VirtualClock(self._loop, self._skew[role]),
            on_kill=lambda dead: self._on_kill(name, dead),
            on_bug=self._on_bug,
            tick_inputs=self._tick_inputs.get(role),
        )
        self.processes[name] = process
        process.begin(self._factory, self._snapshots(process))

    def kill(self, name: str) -> None:
        if name in self.processes:
            self.processes[name].kill()

    def stop(self, role: str) -> None:
        """Kill the role; it is not restarted before `resume`."""
        self._stopped.add(role)
        self.kill(role)

    def resume(self, role: str) -> None:
        """Start the role again if it was stopped."""
        if role in self._stopped:
            self._stopped.remove(role)
            self.start(role)

    def restart(self, roles: Collection[str]) -> None:
        """Restart every process of these roles, like a rollout."""
        for name, process in tuple(self.processes.items()):
            if process.role in roles:
                self.kill(name)

    def lose_broker(self) -> None:
        """Every process ends because all streams are lost; each is restarted within seconds."""
        for name, process in tuple(self.processes.items()):
            del self.processes[name]
            self._ended.append(process)
            process.end()
            if name == process.role:
                seconds = self._faults.seconds("broker_lost", *LOST_RESTART_SECONDS)
                self._loop.call_later(seconds, self.start, name)

    @property
    def is_complete(self) -> bool:
        return all(role in self.processes for role in self._skew)

    def pump(self) -> None:
        for process in tuple(self.processes.values()):
            process.pump()

    def close(self) -> None:
        for process in (*self._ended, *self.processes.values()):
            process.close()

    def _on_fact(self, recorded: Recorded) -> None:
        for process in tuple(self.processes.values()):
            process.stream_advanced(recorded.stream)
            process.schedule_pump(recorded.stream)

    def _on_kill(self, name: str, dead: Process) -> None:
        self._ended.append(self.processes.pop(name))
        self._faults.disturb(REDELIVERED_SECONDS, name)
        self._loop.call_later(REDELIVERED_SECONDS, self.pump)
        if name == dead.role:  # an additional process is not restarted
            seconds = self._faults.seconds("service_killed", *RESTART_SECONDS)
            self._faults.disturb(seconds + REDELIVERED_SECONDS, name)
            self._loop.call_later(seconds, self.start, name)
