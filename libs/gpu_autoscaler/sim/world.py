"""One run: a simulated cluster and cloud, the services, faults and an invariant monitor, all from one seed."""

import asyncio
import gc
import hashlib
import itertools
import math
import random
from datetime import timedelta

import msgspec

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.sim import large
from gpu_autoscaler.sim.allowances import Allowances
from gpu_autoscaler.sim.askers import Askers
from gpu_autoscaler.sim.cloud import Cloud, offers_for
from gpu_autoscaler.sim.coverage import Coverage
from gpu_autoscaler.sim.crew import Crew
from gpu_autoscaler.sim.documents import Documents, policies_of
from gpu_autoscaler.sim.events import Events
from gpu_autoscaler.sim.faults import Faults, Occurrence
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.kubernetes import Kubernetes
from gpu_autoscaler.sim.operators import Operators
from gpu_autoscaler.sim.outside import Outside, glances_of
from gpu_autoscaler.sim.patience import Patience
from gpu_autoscaler.sim.policies import sharing_of
from gpu_autoscaler.sim.process import BUG, Process
from gpu_autoscaler.sim.rebuilding import Rebuilding
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.saving import Savers, some_save
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.sim.serving import Serving
from gpu_autoscaler.sim.settling import Settling
from gpu_autoscaler.sim.starting import SnapshotDiffers
from gpu_autoscaler.sim.storage import Storage, has_storage
from gpu_autoscaler.sim.store import Tables
from gpu_autoscaler.sim.timeline import ORIGIN, VirtualLoop
from gpu_autoscaler.sim.trouble import Trouble
from gpu_autoscaler.sim.users import Users
from gpu_autoscaler.sim.witness import Witness
from gpu_autoscaler.sim.workloads import Workloads
from gpu_autoscaler.sim.yesterday import remember_yesterday

HOURS = 4.0
PLANNERS = ("scaler", "scheduler")  # roles that read the policy
LAST_FACTS_COUNT = 25
SIGNS_OF_LIFE = ("_watched", "_listed")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a run: equal settings and equal code give an equal run."""

    seed: int
    hours: float = HOURS
    kinds: tuple[str, ...] | None = None  # of faults; None: chosen by the seed
    only: tuple[Occurrence, ...] | None = None  # the only faults that strike; None: all that occur
    faults_times: float = 1.0  # multiplies the frequency of every fault
    jobs_per_hour: float | None = None  # None: chosen by the seed
    ends_at_hours: float | None = None  # work still open then is not judged; None: the run ends at quiescence
    skips_ticks: bool = True  # skip ticks whose inputs did not change; the facts are the same either way
    is_coded: bool = False  # encode and decode each fact on its way
    is_large: bool = False  # use the profiles of `actors/large_clusters.py`, whose hours count


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run."""

    seed: int
    cluster_hours: float  # with work and faults; the time to quiescence is not included
    facts_count: int
    plans_count: int
    nodes_mean: float
    pods_count: int  # created in all
    digest: str  # of all facts, in order
    faults: dict[str, int]
    happened: tuple[Occurrence, ...]
    reasons: dict[str, int]
    broken: tuple[str, ...]  # empty: no invariant was violated
    promise: str = ""  # the first violated invariant
    ended_at_hours: float = 0.0  # with the time to quiescence
    last_facts: tuple[str, ...] = ()
    cpu_seconds: float = 0.0  # measured by the caller

    @property
    def pods_per_hour(self) -> float:
        """Pods created per hour."""
        return self.pods_count / self.cluster_hours if self.cluster_hours else 0.0

    @property
    def faults_per_hour(self) -> float:
        """Faults that struck per hour."""
        return sum(self.faults.values()) / self.cluster_hours if self.cluster_hours else 0.0


class World:
    """All parts of one run."""

    _node_seconds = 0.0

    def __init__(self, setting: Setting, roles: Roles) -> None:
        self.setting, self._roles = setting, roles
        self.loop = VirtualLoop()
        kinds = large.kinds_of(setting.seed) if setting.is_large and setting.kinds is None else setting.kinds
        self.faults = Faults(setting.seed, kinds=kinds, only=setting.only, times=setting.faults_times)
        self.faults.clock = self.loop.time
        self.record = Record(self.loop, is_coded=setting.is_coded)
        self.cluster = Kubernetes(self.loop.now)
        self.workloads = Workloads(self.cluster, self.loop, self._chance("workloads"))
        self._groups = Groups(self.workloads)
        self._savers = Savers(self.workloads, some_save)
        sharing = sharing_of(setting.seed)
        self.cloud = Cloud(self.workloads, self._chance("cloud"), offers_for(sharing))
        self.cloud.is_together = self.faults.strikes("launched_together")
        self.cloud.leaves_node = lambda: self.faults.strikes("node_left_behind")
        self.events = Events(self.loop, self.faults, self.cloud)
        policies = large.policies_of if setting.is_large else policies_of
        self.policies = policies(setting.seed, lambda: self.crew.restart(PLANNERS))
        self.tables = Tables()
        self.witness = self._new_witness()
        self.identity = Cluster(installation=derive_id("installation", setting.seed), epoch=int(ORIGIN.timestamp()))
        self._outside = Outside(
            self.identity, self.workloads, self._groups, self.cloud, self.witness, self.tables, events=self.events
        )
        self.store_trouble, self.watch_trouble = self._outside.store_trouble, self._outside.watch_trouble
        glances = glances_of(roles, lambda: self.policies.file, skips_ticks=setting.skips_ticks)
        self.crew = Crew(
            self.loop, self.faults, self.record, glances, self._compose, self._on_bug, snapshots=self._snapshots
        )
        self.users = Users(
            self.loop,
            self.record,
            self.faults,
            self._chance("users"),
            jobs_per_hour=large.JOBS_PER_HOUR
            if setting.is_large and not setting.jobs_per_hour
            else setting.jobs_per_hour,
            wants_parts=sharing is not None,
        )
        storage = Storage(self.workloads, self._chance("storage")) if has_storage(setting.seed) else None
        self.serving = Serving(
            self.loop,
            self._groups,
            self._chance("serving"),
            self._chance("company"),
            likes=self._chance("likes"),
            storage=storage,
        )
        self._askers = Askers(self.loop, self.record, self._chance("askers"))
        self._operators = Operators(self.workloads, self._groups, self.cloud, self.faults, self._chance("operators"))
        self.coverage = Coverage(self.loop, self._known_to_the_scheduler, lambda: self.policies.now)
        self.record.listen(self.coverage.heard)
        self._watch_rebuilding()
        self.documents = Documents(self.loop, self.record, self.policies, self.faults)
        self._patience = Patience(self, self.witness.breaks)
        self._allowances = Allowances(
            self.loop, self.cluster, self.tables, self.witness.breaks, calm_since=self.faults.disturbed_until
        )
        self.trouble = Trouble(self, self._chance("trouble"))
        self._settling = Settling(self)

    def run(self) -> Result:
        """Run the hours with faults, then continue without faults until quiescence."""
        asyncio.set_event_loop(self.loop)
        try:
            if self.setting.is_large and self.policies.now.forecast.is_on:
                remember_yesterday(self.record, self._chance("yesterday"))
            self.documents.say()
            self.crew.begin()
            self.users.begin()
            self.serving.begin()
            self._askers.begin()
            self.coverage.begin()
            self._operators.begin()
            self._patience.begin()
            self._allowances.begin()
            self.trouble.begin()
            self._let_pass(min(self.setting.hours, self._ends_at_hours) * 3600.0)
            hours_seconds = self.loop.time()
            self.trouble.end()
            self.users.leave()
            self.serving.leave()
            self._askers.leave()
            while self._goes_on() and not self._settling.is_over():
                self._let_pass(60.0)
            if self._goes_on():
                self._settling.judge()
            return self._result(hours_seconds)
        finally:
            self._close()

    # ---- parts

    def _new_witness(self) -> Witness:
        witness = Witness(
            self.loop,
            self.workloads,
            self.cloud,
            self.policies,
            self.tables.jobs,
            calm_since=self.faults.disturbed_until,
        )
        self.record.listen(witness.heard)
        self.events.deleted_listeners.append(witness.deleted)
        return witness

    def _watch_rebuilding(self) -> None:
        rebuilding = Rebuilding(
            self.loop,
            self.record,
            self.faults,
            self.tables,
            self.policies,
            self.workloads,
            self.cloud,
            self.witness.breaks,
        )
        rebuilding.crew = self.crew
        self.witness.lost_listeners.append(rebuilding.lost)

    def _chance(self, of: str) -> random.Random:
        return random.Random(f"{self.setting.seed}/{of}")

    def _known_to_the_scheduler(self) -> ClusterState | None:
        process = self.crew.processes.get("scheduler")
        return None if process is None else process.view.state

    def _compose(self, process: Process) -> Service:
        seat = self._outside.seat(process, self.policies.file, on_refused_plan=self._on_refused_plan)
        return self._roles[process.role].compose(seat)

    def _snapshots(self, process: Process) -> tuple[Snapshots | None, bool]:
        role = self._roles[process.role]
        if role.snapshots is None:
            return None, False
        seat = self._outside.seat(process, self.policies.file, on_refused_plan=self._on_refused_plan)
        return role.snapshots(seat), role.keeps_snapshots

    def _on_bug(self, role: str, error: Exception) -> None:
        promise = "recomputable plans" if isinstance(error, SnapshotDiffers) else BUG
        self.witness.breaks(promise, f"{role}: {error!r}")

    def _on_refused_plan(self) -> None:
        self.witness.breaks("the second opinion", "a plan was refused by `core/check.py`")

    @property
    def _ends_at_hours(self) -> float:
        return math.inf if self.setting.ends_at_hours is None else self.setting.ends_at_hours

    def _goes_on(self) -> bool:
        return not self.witness.broken and self.loop.time() < self._ends_at_hours * 3600.0

    def _let_pass(self, seconds: float) -> None:
        if self.witness.broken:
            return
        self._node_seconds += seconds * sum(machine.is_alive for machine in self.cloud.machines)
        timer = self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()
        timer.cancel()

    def _close(self) -> None:
        self.crew.close()
        self.loop.set_exception_handler(lambda *_: None)
        self.loop.call_later(0.0, self.loop.stop)
        self.loop.run_forever()
        self.loop.close()
        asyncio.set_event_loop(None)

    # ---- result

    def _result(self, seconds: float) -> Result:
        digest = hashlib.blake2b(digest_size=16)
        for recorded in self.record.order:
            digest.update(encode(recorded.envelope))
        broken = self.witness.broken
        return Result(
            seed=self.setting.seed,
            cluster_hours=seconds / 3600.0,
            facts_count=len(self.record.order),
            plans_count=self.coverage.plans_count,
            nodes_mean=self._mean_nodes(seconds),
            pods_count=self._pods_count(seconds),
            digest=digest.hexdigest(),
            faults=dict(sorted(self.faults.counts.items())),
            happened=tuple(self.faults.happened),
            reasons=dict(sorted(self.coverage.reasons.items())),
            broken=tuple(map(str, broken)),
            promise=broken[0].promise if broken else "",
            ended_at_hours=self.loop.time() / 3600.0,
            last_facts=self._last_facts() if broken else (),
        )

    def _last_facts(self) -> tuple[str, ...]:
        """Return the most recent facts, without signs of life and telemetry."""
        telling = (
            each
            for each in reversed(self.record.order)
            if each.stream != "GPU" and not each.envelope.type.partition(".v")[0].endswith(SIGNS_OF_LIFE)
        )
        return tuple(map(_told, reversed(list(itertools.islice(telling, LAST_FACTS_COUNT)))))

    def _mean_nodes(self, seconds: float) -> float:
        end = ORIGIN + timedelta(seconds=seconds)
        stays = (
            min(machine.terminated_at or end, end) - machine.launched_at
            for machine in self.cloud.machines
            if machine.launched_at < end
        )
        return sum(stay.total_seconds() for stay in stays) / seconds if seconds else 0.0

    def _pods_count(self, seconds: float) -> int:
        end = ORIGIN + timedelta(seconds=seconds)
        made = (entry.object.metadata for entry in self.cluster.history["pods"])
        return len({pod.uid for pod in made if pod.creation_timestamp is not None and pod.creation_timestamp <= end})


def run(setting: Setting, roles: Roles) -> Result:
    """Return the result of one run.

    Garbage collection is off during the run: there is hardly any garbage, and collection takes a tenth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return World(setting, roles).run()
    finally:
        if was_on:
            gc.enable()


def _told(recorded: Recorded) -> str:
    envelope = recorded.envelope
    cause = f" because of {envelope.causation_id}" if envelope.causation_id else ""
    about = envelope.fact.entity() or ""
    return f"{envelope.time.isoformat()} {recorded.stream} #{recorded.sequence} {envelope.type} {about}{cause}"
