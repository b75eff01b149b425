"""One run: a simulated cluster and cloud, the services, faults and an invariant monitor, all from one seed."""

import asyncio
import gc
import hashlib
import itertools
import math
import random
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.bus.streams import StreamLimits
from gpu_autoscaler.core.demand.history_samples import ANY_KIND
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.scaling import ScalingDemandSampled
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.sim.actors import large_clusters
from gpu_autoscaler.sim.actors.checkpointing import CheckpointingPods, checkpoint_write_seconds
from gpu_autoscaler.sim.actors.kueue import Kueue, serve_requests
from gpu_autoscaler.sim.actors.notebooks import Notebooks, label_namespaces, opts_in_by_label, with_notebooks
from gpu_autoscaler.sim.actors.operators import Operators, ResumingOperators
from gpu_autoscaler.sim.actors.policies import Policies, PolicyObjects, policies_of, sharing_of
from gpu_autoscaler.sim.actors.services import Services
from gpu_autoscaler.sim.actors.teams import of_team, with_teams
from gpu_autoscaler.sim.actors.users import DemandReporters, Users
from gpu_autoscaler.sim.adapters.assembly import AdapterFactory, Roles, tick_inputs_of_roles
from gpu_autoscaler.sim.adapters.bus import OVERFLOWING_LIMITS, SHORT_LIMITS, SimBus
from gpu_autoscaler.sim.adapters.interruption_queue import InterruptionQueue
from gpu_autoscaler.sim.adapters.snapshots import SnapshotDiffers, Start
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud, offers_for
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.cluster.resource_quotas import ResourceQuotas
from gpu_autoscaler.sim.cluster.volumes import VolumeController, has_volumes
from gpu_autoscaler.sim.faults.injection import Faults, Occurrence
from gpu_autoscaler.sim.faults.schedule import FaultSchedule
from gpu_autoscaler.sim.invariants import PLAN_CHECK, PLANS_RECOMPUTABLE, SKIPPED_TICKS_CHANGE_NOTHING, STATE_READABLE
from gpu_autoscaler.sim.invariants.bookkeeping import BookkeepingInvariant
from gpu_autoscaler.sim.invariants.idle_workloads import IdleWorkloadsInvariant
from gpu_autoscaler.sim.invariants.liveness import LivenessInvariant
from gpu_autoscaler.sim.invariants.monitor import InvariantMonitor
from gpu_autoscaler.sim.invariants.provisioning_requests import ProvisioningRequestsInvariant
from gpu_autoscaler.sim.invariants.quiescence import Quiescence
from gpu_autoscaler.sim.invariants.readability import StateUnreadable
from gpu_autoscaler.sim.invariants.reason_coverage import ReasonCoverage
from gpu_autoscaler.sim.invariants.recovery import RecoveryInvariant
from gpu_autoscaler.sim.invariants.spend import JobBudgetsInvariant
from gpu_autoscaler.sim.process_pool import BUG, Process, ProcessPool
from gpu_autoscaler.sim.virtual_time import ORIGIN, VirtualLoop

# Demand history of the day before, for large clusters with a forecast: on a first day nothing could be forecast.

HISTORY_HOURS = 4  # from midnight on
STEPS = (-9, 0, 0, 10)  # change per minute
GPU_COUNT_MAX = 40
_MINUTES_A_DAY = 24 * 60


def publish_demand_history(bus: SimBus, rng: random.Random) -> None:
    """Publish the demand samples of the previous day's first hours."""
    first = int(ORIGIN.timestamp()) // 60 - _MINUTES_A_DAY
    level = GPU_COUNT_MAX // 4
    for minute in range(first, first + HISTORY_HOURS * 60):
        level = min(max(level + rng.choice(STEPS), 0), GPU_COUNT_MAX)
        fact = ScalingDemandSampled(minute=minute, gpu_counts=((ANY_KIND, level),))
        bus.publish(Envelope(id=FactId(fact.condition() or ""), source="/yesterday", time=ORIGIN, fact=fact))


HOURS = 4.0
QUIET_SECONDS = 180.0  # of each quiet day: some lists, and a look for what the streams discard soon
AFTER_QUIET_SECONDS = 1800.0  # with new work, after the quiet days
POLICY_READERS = ("scaler", "scheduler")  # roles that read the policy
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
    record_path: str | None = None  # write all facts to this file, an envelope as JSON per line
    quiet_days: int = 0  # skipped at rest, a day at a time; then more work comes
    expects_refusals: bool = False  # a plan that the check refuses breaks no promise: what then happens is judged
    has_teams: bool = False  # with queues, quotas and namespaces, see `actors/teams.py`
    has_notebooks: bool = False  # idle workloads outside of the queue, see `actors/notebooks.py`
    has_kueue: bool = False  # workloads that ask for capacity first, see `actors/kueue.py`
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
    violations: tuple[str, ...]  # empty: no invariant was violated
    invariant: str = ""  # the first violated invariant
    ended_at_hours: float = 0.0  # with the time to quiescence
    last_facts: tuple[str, ...] = ()
    cpu_seconds: float = 0.0  # measured by the caller

    @property
    def pods_per_hour(self) -> float:
        return self.pods_count / self.cluster_hours if self.cluster_hours else 0.0

    @property
    def faults_per_hour(self) -> float:
        return sum(self.faults.values()) / self.cluster_hours if self.cluster_hours else 0.0


class Simulation:
    """All parts of one run."""

    def __init__(self, setting: Setting, roles: Roles) -> None:
        self.setting, self._roles = setting, roles
        self.loop = VirtualLoop()
        kinds = large_clusters.kinds_of(setting.seed) if setting.is_large and setting.kinds is None else setting.kinds
        self.faults = Faults(setting.seed, kinds=kinds, only=setting.only, times=setting.faults_times)
        self.faults.clock = self.loop.time
        self.bus = SimBus(self.loop, is_coded=setting.is_coded, limits=self._stream_limits())
        self.cluster = Kubernetes(self.loop.now)
        self.workloads = Workloads(self.cluster, self.loop, self._rng("workloads"))
        self._replica_sets = ReplicaSets(self.workloads)
        self._checkpointing_pods = CheckpointingPods(self.workloads, checkpoint_write_seconds)
        self.workloads.saved_seconds = self._checkpointing_pods.saved_seconds
        sharing = sharing_of(setting.seed)
        self.cloud = Cloud(self.workloads, self._rng("cloud"), offers_for(sharing))
        self.cloud.has_launch_groups = self.faults.strikes("launched_together")
        self.cloud.leaves_node = lambda: self.faults.strikes("node_left_behind")
        self.interruption_queue = InterruptionQueue(self.loop, self.faults, self.cloud)
        self.policies = self._new_policies()
        self.tables = Tables()
        self.monitor = self._new_monitor()
        self._add_resource_quotas()
        self.identity = Cluster(installation=derive_id("installation", setting.seed), epoch=int(ORIGIN.timestamp()))
        self._adapter_factory = AdapterFactory(
            self.identity, self.workloads, self._replica_sets, self.cloud, self.monitor, self.tables,
            interruption_queue=self.interruption_queue, has_silent_hooks=self.faults.strikes("hooks_silent"),
        )  # fmt: skip
        self.store_faults, self.watch_faults = self._adapter_factory.store_faults, self._adapter_factory.watch_faults
        tick_inputs = tick_inputs_of_roles(roles, lambda: self.policies.file, skips_ticks=setting.skips_ticks)
        self.process_pool = ProcessPool(
            self.loop, self.faults, self.bus, tick_inputs, self._compose, self._on_bug, snapshots=self._snapshots
        )
        jobs_per_hour = setting.jobs_per_hour
        if setting.is_large and not jobs_per_hour:
            jobs_per_hour = large_clusters.JOBS_PER_HOUR
        self.users = Users(
            self.loop, self.bus, self.faults, self._rng("users"),
            jobs_per_hour=jobs_per_hour, wants_fractions=sharing is not None,
            changed=of_team if setting.has_teams else lambda request: request,
        )  # fmt: skip
        storage = VolumeController(self.workloads, self._rng("storage")) if has_volumes(setting.seed) else None
        rngs = (self._rng("serving"), self._rng("company"))
        self.services = Services(
            self.loop, self._replica_sets, *rngs, preferences_rng=self._rng("likes"), storage=storage
        )
        self._others = self._new_work_of_others()
        self._demand_reporters = DemandReporters(self.loop, self.bus, self._rng("askers"))
        self._operators = Operators(self.workloads, self._replica_sets, self.cloud, self.faults, self._rng("operators"))
        ResumingOperators(self.loop, self.bus, self._rng("resumes"))
        self.reason_coverage = ReasonCoverage(
            self.loop, partial(self._state_of, "scheduler"), lambda: self.policies.now
        )
        self.bus.listen(self.reason_coverage.on_fact)
        self._add_recovery_invariant()
        self._bookkeeping = self._new_bookkeeping_invariant()
        self.policy_objects = PolicyObjects(self.loop, self.bus, self.policies, self.faults)
        self._liveness = LivenessInvariant(self, self.monitor.report)
        self._job_budgets = JobBudgetsInvariant(
            self.loop, self.cluster, self.tables, self.monitor.report, calm_since=self.faults.disturbed_until
        )
        self.fault_schedule = FaultSchedule(self, self._rng("trouble"))

    def run(self) -> Result:
        """Run the hours with faults, then continue without faults until quiescence."""
        asyncio.set_event_loop(self.loop)
        try:
            if self.setting.is_large and self.policies.now.forecast.is_on:
                publish_demand_history(self.bus, self._rng("yesterday"))
            self.policy_objects.publish()
            self.process_pool.begin([name for name, role in self._roles.items() if role.has_memory])
            self.users.begin()
            self.services.begin()
            for actor in self._others:
                actor.begin()
            self._demand_reporters.begin()
            self.reason_coverage.begin()
            self._operators.begin()
            self._liveness.begin()
            self._bookkeeping.begin()
            self._job_budgets.begin()
            self.fault_schedule.begin()
            self._advance(min(self.setting.hours, self._ends_at_hours) * 3600.0)
            hours_seconds = self.loop.time()
            self.fault_schedule.end()
            self.users.stop()
            self.services.stop()
            for actor in self._others:
                actor.stop()
            self._demand_reporters.stop()
            self._come_to_rest()
            if self.setting.quiet_days and self._continues():
                self._skip_quiet_days()
                self._come_to_rest()
            return self._result(hours_seconds)
        finally:
            self._close()

    def _come_to_rest(self) -> None:
        """Run until quiescence, and judge it."""
        quiescence = Quiescence(self)
        while self._continues() and not quiescence.is_over():
            self._advance(60.0)
        if self._continues():
            quiescence.judge()
            self._bookkeeping.judge()

    def _skip_quiet_days(self) -> None:
        """Let days pass in which nothing happens but what services do at rest; then bring more work."""
        for _ in range(self.setting.quiet_days):
            self.loop.skip(timedelta(days=1))
            self._advance(QUIET_SECONDS)
        # After a jump lists look old, and plans report that: in a month without jumps there is none of these plans.
        self.bus.discard_plans(timedelta())
        self.users.resume()
        self._advance(AFTER_QUIET_SECONDS)
        self.users.stop()

    def write_record(self, path: Path) -> None:
        path.write_bytes(b"".join(encode(recorded.envelope) + b"\n" for recorded in self.bus.published))

    # ---- parts

    def _stream_limits(self) -> Mapping[str, StreamLimits] | None:
        limits = SHORT_LIMITS if self.faults.strikes("retention_short") else None
        return OVERFLOWING_LIMITS if self.faults.strikes("streams_overflow") else limits

    def _new_policies(self) -> Policies:
        setting = self.setting
        policies = large_clusters.policies_of if setting.is_large else policies_of

        def change(policy: ScalingPolicy) -> ScalingPolicy:
            policy = with_teams(policy, setting.seed) if setting.has_teams else policy
            return with_notebooks(policy, setting.seed) if setting.has_notebooks else policy

        return policies(setting.seed, lambda: self.process_pool.restart(POLICY_READERS), change)

    def _new_work_of_others(self) -> list[Notebooks | Kueue]:
        """Return who creates work outside of our queue, with the invariants of that work."""
        seed, report = self.setting.seed, self.monitor.report
        others: list[Notebooks | Kueue] = []
        if self.setting.has_notebooks:
            if opts_in_by_label(seed):
                label_namespaces(self.cluster)
            notebooks = Notebooks(self.loop, self.workloads, self._rng("notebooks"))
            self.bus.listen(IdleWorkloadsInvariant(self.cluster, notebooks, self.policies, report).on_fact)
            others.append(notebooks)
        if self.setting.has_kueue:
            serve_requests(self.cluster)
            invariant = ProvisioningRequestsInvariant(
                self.workloads, self.cloud, self.policies, report, disturbed_until=self.faults.disturbed_until
            )
            self.bus.listen(invariant.on_fact)
            others.append(Kueue(self.loop, self.workloads, self._rng("kueue")))
        return others

    def _add_resource_quotas(self) -> None:
        if self.setting.has_teams:
            quotas = ResourceQuotas(self.cluster, self.loop)
            self.workloads.admits = quotas.admits
            quotas.refused_listeners.append(self.monitor.pod_refused)

    def _new_monitor(self) -> InvariantMonitor:
        monitor = InvariantMonitor(
            self.loop,
            self.workloads,
            self.cloud,
            self.policies,
            self.tables.jobs,
            calm_since=self.faults.disturbed_until,
        )
        self.bus.listen(monitor.on_fact)
        self.interruption_queue.deleted_listeners.append(monitor.message_deleted)
        return monitor

    def _new_bookkeeping_invariant(self) -> BookkeepingInvariant:
        bookkeeping = BookkeepingInvariant(
            self.loop,
            self.cluster,
            self.cloud,
            self.tables,
            self.monitor.report,
            partial(self._state_of, "scaler"),
            calm_since=self.faults.disturbed_until,
        )
        self.bus.listen(bookkeeping.on_fact)
        self.monitor.lost_listeners.append(bookkeeping.streams_lost)
        return bookkeeping

    def _add_recovery_invariant(self) -> None:
        recovery = RecoveryInvariant(
            self.loop,
            self.bus,
            self.faults,
            self.tables,
            self.policies,
            self.workloads,
            self.cloud,
            self.monitor.report,
        )
        recovery.process_pool = self.process_pool
        self.monitor.lost_listeners.append(recovery.streams_lost)

    def _rng(self, of: str) -> random.Random:
        """Return a generator of its own. These strings are part of each seed's meaning."""
        return random.Random(f"{self.setting.seed}/{of}")

    def _state_of(self, name: str) -> ClusterState | None:
        process = self.process_pool.processes.get(name)
        return None if process is None else process.view.state

    def _compose(self, process: Process) -> Service:
        bundle = self._adapter_factory.bundle(process, self.policies.file, on_refused_plan=self._on_refused_plan)
        return self._roles[process.role].compose(bundle)

    def _snapshots(self, process: Process) -> Start | None:
        role = self._roles[process.role]
        if role.snapshots is None or not (role.needs_store or self.tables.snapshots):
            return None
        bundle = self._adapter_factory.bundle(process, self.policies.file, on_refused_plan=self._on_refused_plan)
        return Start(
            partial(role.snapshots, bundle),
            keeps=role.keeps_snapshots,
            waits=role.needs_store,
            has_memory=role.has_memory,
        )

    def _on_bug(self, role: str, error: Exception) -> None:
        invariants: dict[type[Exception], str] = {SnapshotDiffers: PLANS_RECOMPUTABLE, StateUnreadable: STATE_READABLE}
        self.monitor.report(invariants.get(type(error), BUG), f"{role}: {error!r}")

    def _on_refused_plan(self) -> None:
        if not self.setting.expects_refusals:
            self.monitor.report(PLAN_CHECK, "the plan check refused a plan")

    @property
    def _ends_at_hours(self) -> float:
        return math.inf if self.setting.ends_at_hours is None else self.setting.ends_at_hours

    def _continues(self) -> bool:
        return not self.monitor.violations and self.loop.time() < self._ends_at_hours * 3600.0

    def _advance(self, seconds: float) -> None:
        if self.monitor.violations:
            return
        timer = self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()
        timer.cancel()

    def _close(self) -> None:
        self.process_pool.close()
        self.loop.end()

    # ---- result

    def _result(self, seconds: float) -> Result:
        digest = hashlib.blake2b(digest_size=16)
        for recorded in self.bus.published:
            digest.update(encode(recorded.envelope))
        violations = self.monitor.violations
        return Result(
            seed=self.setting.seed,
            cluster_hours=seconds / 3600.0,
            facts_count=len(self.bus.published),
            plans_count=self.reason_coverage.plans_count,
            nodes_mean=self._mean_nodes(seconds),
            pods_count=self._pods_count(seconds),
            digest=digest.hexdigest(),
            faults=dict(sorted(self.faults.counts.items())),
            happened=tuple(self.faults.happened),
            reasons=dict(sorted(self.reason_coverage.reasons.items())),
            violations=tuple(map(str, violations)),
            invariant=violations[0].invariant if violations else "",
            ended_at_hours=self.loop.time() / 3600.0,
            last_facts=self._last_facts() if violations else (),
        )

    def _last_facts(self) -> tuple[str, ...]:
        """Return the most recent facts, without signs of life and telemetry."""
        shown = (
            recorded
            for recorded in reversed(self.bus.published)
            if recorded.stream != "GPU" and not recorded.envelope.type.partition(".v")[0].endswith(SIGNS_OF_LIFE)
        )
        return tuple(map(_fact_line, reversed(list(itertools.islice(shown, LAST_FACTS_COUNT)))))

    def _mean_nodes(self, seconds: float) -> float:
        end = ORIGIN + timedelta(seconds=seconds)
        lifetimes = (
            min(machine.terminated_at or end, end) - machine.launched_at
            for machine in self.cloud.machines
            if machine.launched_at < end
        )
        return sum(lifetime.total_seconds() for lifetime in lifetimes) / seconds if seconds else 0.0

    def _pods_count(self, seconds: float) -> int:
        end = ORIGIN + timedelta(seconds=seconds)
        created = (entry.object.metadata for entry in self.cluster.history["pods"])
        return len({pod.uid for pod in created if pod.creation_timestamp is not None and pod.creation_timestamp <= end})


def run(setting: Setting, roles: Roles) -> Result:
    """Return the result of one run.

    Garbage collection is off during the run: there is hardly any garbage, and collection takes a tenth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        simulation = Simulation(setting, roles)
        result = simulation.run()
        if setting.record_path is not None:
            simulation.write_record(Path(setting.record_path))
        return result
    finally:
        if was_on:
            gc.enable()


def run_differential(setting: Setting, roles: Roles) -> Result:
    """Return the result of the run; different facts are its first violation."""
    skipping, full = Simulation(setting, roles), Simulation(replace(setting, skips_ticks=False), roles)
    result, second = skipping.run(), full.run()
    if result.digest == second.digest:
        return result
    difference = f"{SKIPPED_TICKS_CHANGE_NOTHING}: {first_difference(skipping.bus.published, full.bus.published)}"
    return replace(result, violations=(difference, *result.violations), invariant=SKIPPED_TICKS_CHANGE_NOTHING)


def first_difference(skipping: list[Recorded], full: list[Recorded]) -> str:
    """Describe the first difference of two records. Raises ValueError if there is none."""
    for number, (first, second) in enumerate(zip_longest(skipping, full), start=1):
        first_text, second_text = (
            None if recorded is None else encode(recorded.envelope).decode() for recorded in (first, second)
        )
        if first_text != second_text:
            return (
                f"fact {number} is {first_text or 'none'} with ticks skipped, {second_text or 'none'} with all of them"
            )
    raise ValueError("the records are the same")


def _fact_line(recorded: Recorded) -> str:
    envelope = recorded.envelope
    cause = f" caused by {envelope.causation_id}" if envelope.causation_id else ""
    about = envelope.fact.entity() or ""
    return f"{envelope.time.isoformat()} {recorded.stream} #{recorded.sequence} {envelope.type} {about}{cause}"
