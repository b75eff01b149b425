"""The processes of a run: starting, killing and restarting them."""

from collections.abc import Callable, Collection, Hashable, Mapping
from datetime import datetime

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.service_process import BugHandler, Process, ServiceFactory
from gpu_autoscaler.sim.virtual_time import VirtualClock, VirtualLoop

RESTART_SECONDS = (1.0, 120.0)
LOST_RESTART_SECONDS = (1.0, 5.0)  # of a process that exited, by its supervisor
SKEW_SECONDS_MAX = 3.0
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
        snapshots: Callable[[Process], tuple[Snapshots | None, bool]] | None = None,
    ) -> None:
        """`roles`: the tick inputs of each role; None: every tick is called.

        `snapshots`: the snapshots that a process starts from (None: it starts from the oldest facts), and whether it
        keeps some itself.
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
        self._ended: list[Process] = []
        bus.listen(self._on_fact)

    def begin(self) -> None:
        """Start every role."""
        for role in self._skew:
            self.start(role)

    def start(self, role: str, *, instance: str | None = None) -> None:
        """Start a new process of a role; `instance` names an additional one."""
        if self._bus.is_away:  # a process cannot start without the broker
            self._loop.call_later(1.0, lambda: self.start(role, instance=instance))
            return
        name = instance or role
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
        snapshots, keeps = (None, False) if self._snapshots is None else self._snapshots(process)
        process.begin(self._factory, snapshots, keeps=keeps)

    def kill(self, name: str) -> None:
        """Kill a process wherever it is."""
        if name in self.processes:
            self.processes[name].kill()

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
        """True while every role has a process."""
        return all(role in self.processes for role in self._skew)

    def pump(self) -> None:
        """Let every live process poll the broker."""
        for process in tuple(self.processes.values()):
            process.pump()

    def close(self) -> None:
        """Close all processes at the end of the run."""
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
