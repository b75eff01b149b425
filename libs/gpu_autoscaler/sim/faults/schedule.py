"""Scheduled faults: when each strikes, its target and its duration. Faults of single calls are injected by the
adapters.
"""

import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

from msgspec.structs import replace

from gpu_autoscaler.core.state.retention import TOMBSTONE_HOURS
from gpu_autoscaler.kube.protocol import NODES, PODS, Cluster
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.actors.operators import LOWERS_SPEND_LIMIT, OVERRIDES, OverridingOperators, SpendLimitOperators
from gpu_autoscaler.sim.actors.policies import EDITS_POLICY_OBJECTS, Policies, PolicyObjects
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.adapters.interruption_queue import InterruptionQueue
from gpu_autoscaler.sim.adapters.kube_api import WatchFaults
from gpu_autoscaler.sim.adapters.provider import StoreFaults
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine, Quota, Telemetry
from gpu_autoscaler.sim.cluster.controllers import GARBAGE_COLLECTED_SECONDS, Workloads, is_ready
from gpu_autoscaler.sim.faults.injection import BROKER, CLOUD, COST_TRACKER, KUBERNETES, RECORD, STORE, Faults
from gpu_autoscaler.sim.invariants.monitor import InvariantMonitor
from gpu_autoscaler.sim.process_pool import ProcessPool
from gpu_autoscaler.sim.virtual_time import VirtualLoop

LOST_SECONDS = (1.0, 20.0)
REBUILT_SECONDS = 60.0  # until the state is rebuilt
AWAY_SECONDS = (20.0, 300.0)
QUIET = timedelta(seconds=120)  # without a plan, before the stream discards all of them
LAG_SECONDS = (5.0, 120.0)
SECOND_SCALER_SECONDS = (60.0, 1800.0)
LEDGER_BEHIND_SECONDS = (1200.0, 30000.0)  # some longer than the state keeps what has ended
# Where streams discard within the run: what has ended is published again for as long (docs/designs/005-resync.md).
DISCARDED_BEHIND_SECONDS_MAX = TOMBSTONE_HOURS * 3600.0
# Readers without which the others decide on: they publish nothing that only they can publish again.
SUSPENDED_ROLES = (COST_TRACKER, "dcgm_ingest")
SUSPENDED_SECONDS = (60.0, 7200.0)  # some longer than streams keep facts where they discard within the run
ANOMALY_SECONDS = (600.0, 3600.0)  # for telemetry, prices and marks
STORM_NOTICE_SECONDS = (30.0, 120.0)
WITHDRAWN_SECONDS_MAX = 40.0  # clouds withdraw notices early
SOLD_OUT_SECONDS = (300.0, 2400.0)
QUOTA_SECONDS = (600.0, 7200.0)
LATE_MACHINES_SECONDS = 900.0  # until late machines are removed
LAUNCH_DELAY_SECONDS = (30.0, 1500.0)  # sometimes longer than the boot timeout
EVERYTHING = "everything"
FROZEN_SECONDS = (300.0, 2400.0)
GPU_FAULTS: tuple[dict[str, object], ...] = (
    {"xid": 79},
    {"xid": 94},
    {"xid": 31},
    {"temperature_celsius": 93.0},
    {"is_row_remap_failed": True},
)
MARKS = ((labels.DO_NOT_DISRUPT, "true"), (labels.DO_NOT_DISRUPT, "30m"), (labels.SCALE_DOWN_DISABLED, "true"))


class FaultTargets(Protocol):
    """Parts of the run that faults can strike."""

    loop: VirtualLoop
    faults: Faults
    bus: SimBus
    workloads: Workloads
    cloud: Cloud
    process_pool: ProcessPool
    monitor: InvariantMonitor
    identity: Cluster
    policies: Policies
    policy_objects: PolicyObjects
    interruption_queue: InterruptionQueue
    watch_faults: WatchFaults
    store_faults: StoreFaults


class FaultSchedule:
    """Schedules and injects the faults of a run."""

    def __init__(self, targets: FaultTargets, rng: random.Random) -> None:
        self._loop = targets.loop
        self._faults = targets.faults
        self._bus = targets.bus
        self._workloads = targets.workloads
        self._cloud = targets.cloud
        self._process_pool = targets.process_pool
        self._monitor = targets.monitor
        self._installation = targets.identity.installation
        self._policies = targets.policies
        self._watches = targets.watch_faults
        self._store = targets.store_faults
        self._rng = rng
        self._policy_objects = targets.policy_objects
        self._interruption_queue = targets.interruption_queue
        self._overriding_operators = OverridingOperators(targets.loop, targets.bus, targets.policies, targets.faults)
        self._spend_limit_operators = SpendLimitOperators(targets.loop, targets.cloud, targets.policies, targets.faults)
        self._acts: Mapping[str, Callable[[], None]] = {
            "streams_overtaking": self._delay_stream,
            "broker_away": self._lose_broker,
            "broker_lost": self._lose_everything,
            "instance_left_behind": self._leave_behind,
            "service_killed": self._kill,
            "service_suspended": self._suspend,
            "cost_tracker_away": self._stop_cost_tracker,
            "two_scalers": self._start_second_scaler,
            "watch_broken": self._break_watches,
            "watch_history_lost": self._lose_history,
            "kubernetes_away": self._lose_kubernetes,
            "node_vanished": self._delete_node,
            "pod_vanished": self._delete_pod,
            "notice_120": lambda: self._warn(120.0),
            "notice_30": lambda: self._warn(30.0),
            "notice_0": lambda: self._warn(0.0),
            "reclaimed_without_notice": self._reclaim,
            "rebalance_hint": self._hint,
            "storm_in_zone": lambda: self._storm(lambda machine: machine.offer.zone),
            "storm_of_type": lambda: self._storm(lambda machine: machine.offer.instance_type),
            "price_jumping": self._reprice,
            "price_missing": self._hide_prices,
            "telemetry_silent": lambda: self._falsify_telemetry("silent"),
            "telemetry_frozen": lambda: self._falsify_telemetry("frozen"),
            "telemetry_all_zero": lambda: self._falsify_telemetry("all_zero"),
            "telemetry_absurd": lambda: self._falsify_telemetry("absurd"),
            "worn_gpu": self._damage_gpu,
            "store_full": self._fill_store,
            "capacity_gone": self._sell_out,
            "launches_held": self._hold_launches,
            "operator_freezes": self._freeze,
            "operator_edits_policy": self._policies.edit,
            LOWERS_SPEND_LIMIT: self._spend_limit_operators.lower,
            EDITS_POLICY_OBJECTS: self._policy_objects.edit,
            "operator_marks_node": self._mark,
            OVERRIDES: self._overriding_operators.override,
            "plans_discarded": self._discard_plans,
            "quota_zero": self._take_quota,
        }

    def begin(self) -> None:
        """Start scheduling."""
        for name in self._acts:
            self._schedule_next(name)

    def end(self) -> None:
        """End all faults and repair everything."""
        self._faults.end()
        self._return_broker()
        self._store.is_full = False
        self._watches.is_away = False
        self._cloud.reprice(self._cloud.listed())
        self._cloud.sold_out.clear()
        self._cloud.set_quota("full")
        self._cloud.launch_delayed()
        self._process_pool.resume(COST_TRACKER)
        for process in self._process_pool.processes.values():
            process.resume()
        self._policies.freeze(is_frozen=False)
        self._policies.lift_spend_limits()
        self._overriding_operators.end()
        self._policy_objects.end()
        for machine in self._cloud.machines:
            machine.telemetry = "true"
            machine.set_gpu_fault({})
            self._annotate(machine, {})

    def _schedule_next(self, name: str) -> None:
        seconds = self._faults.next_in_seconds(name)
        if seconds is not None:
            self._loop.call_later(seconds, self._strike_and_schedule, name)

    def strike(self, name: str) -> None:
        """Strike now if there is a target."""
        if not self._faults.is_over and self._has_victim(name) and self._faults.happens(name):
            self._acts[name]()

    def _strike_and_schedule(self, name: str) -> None:
        if not self._faults.is_over:
            self.strike(name)
            self._schedule_next(name)

    def _has_victim(self, name: str) -> bool:
        if name.startswith(("notice_", "storm_")) or name in ("reclaimed_without_notice", "rebalance_hint"):
            return bool(self._cloud.spot())
        if name in ("node_vanished", "operator_marks_node", LOWERS_SPEND_LIMIT) or name.startswith(
            ("telemetry_", "worn_")
        ):
            return any(machine.is_usable for machine in self._cloud.alive())
        if name == EDITS_POLICY_OBJECTS:
            return bool(self._policies.documents)
        if name == "pod_vanished":
            return any(is_ready(pod) for pod in self._workloads.cluster.all(PODS))
        return bool(self._process_pool.processes)

    # ---- messages and processes

    def _delay_stream(self) -> None:
        name = self._faults.choose("streams_overtaking", sorted(self._process_pool.processes))
        process = self._process_pool.processes[name]
        seconds = self._faults.seconds("streams_overtaking", *LAG_SECONDS)
        # The order decides what a seed chooses; ATTEMPT keeps the place that it has had since its first name.
        streams = sorted(self._bus.facts, key=lambda name: "TRIAL" if name == "ATTEMPT" else name)
        stream = self._faults.choose("streams_overtaking", streams)
        process.delayed_until[stream] = self._loop.time() + seconds
        self._faults.disturb(seconds, process.role)

    def _lose_broker(self) -> None:
        self._bus.is_away = True
        seconds = self._faults.seconds("broker_away", *AWAY_SECONDS)
        self._faults.disturb(seconds + 30.0, BROKER)
        self._loop.call_later(seconds, self._return_broker)

    def _return_broker(self) -> None:
        self._bus.is_away = False
        self._policy_objects.publish_if_lost()
        self._process_pool.pump()

    def _lose_everything(self) -> None:
        """The broker comes back with empty disks: every process must rebuild its state."""
        self._bus.is_away = True
        self._bus.lose_streams()
        self._policy_objects.streams_lost()
        self._monitor.streams_lost()
        self._process_pool.lose_broker()
        seconds = self._faults.seconds("broker_lost", *LOST_SECONDS)
        self._faults.disturb(seconds + REBUILT_SECONDS, RECORD)
        self._loop.call_later(seconds, self._return_broker)

    def _discard_plans(self) -> None:
        """The stream keeps plans for a limited time; with less waiting than a month they are gone just the same."""
        self._bus.discard_plans(QUIET)

    def _leave_behind(self) -> None:
        """Launch a machine with our tags that no plan knows, as a script or a former installation would."""
        offers = self._cloud.listed()
        number = int(self._faults.seconds("instance_left_behind", 0, len(offers)))
        self._cloud.leave_behind(offers[number], self._installation)

    def _kill(self) -> None:
        self._process_pool.kill(self._faults.choose("service_killed", sorted(self._process_pool.processes)))

    def _suspend(self) -> None:
        name = self._faults.choose("service_suspended", list(SUSPENDED_ROLES))
        seconds = self._faults.seconds("service_suspended", *SUSPENDED_SECONDS)
        if process := self._process_pool.processes.get(name):
            process.suspend()
            self._faults.disturb(seconds + 60.0, name)
            self._loop.call_later(seconds, process.resume)

    def _start_second_scaler(self) -> None:
        self._process_pool.start("scaler", instance="scaler-2")
        seconds = self._faults.seconds("two_scalers", *SECOND_SCALER_SECONDS)
        self._loop.call_later(seconds, self._process_pool.kill, "scaler-2")

    def _stop_cost_tracker(self) -> None:
        self._process_pool.stop(COST_TRACKER)
        seconds = self._faults.seconds("cost_tracker_away", *LEDGER_BEHIND_SECONDS)
        if self._bus.discards:
            seconds = min(seconds, DISCARDED_BEHIND_SECONDS_MAX)
        self._faults.disturb(seconds + 60.0, COST_TRACKER)
        self._loop.call_later(seconds, self._process_pool.resume, COST_TRACKER)

    def _fill_store(self) -> None:
        self._store.is_full = True
        seconds = self._faults.seconds("store_full", *AWAY_SECONDS)
        self._faults.disturb(seconds + 30.0, STORE)
        self._loop.call_later(seconds, setattr, self._store, "is_full", False)

    # ---- Kubernetes

    def _break_watches(self) -> None:
        self._watches.breaks_count += 1
        self._faults.disturb(60.0, KUBERNETES)

    def _lose_history(self) -> None:
        self._watches.losses_count += 1
        self._faults.disturb(60.0, KUBERNETES)

    def _lose_kubernetes(self) -> None:
        """The API server is unavailable, like during an upgrade; running pods continue."""
        self._watches.is_away = True
        seconds = self._faults.seconds("kubernetes_away", *AWAY_SECONDS)
        self._faults.disturb(seconds + 60.0, KUBERNETES)
        self._loop.call_later(seconds, setattr, self._watches, "is_away", False)

    def _delete_node(self) -> None:
        """Delete a node object. With a finalizer it stays until the finalizer is removed; otherwise it is gone, the
        machine runs on, and its pods are garbage-collected.
        """
        machine = self._pick("node_vanished", [machine for machine in self._cloud.alive() if machine.is_usable])
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is not None and node.metadata.finalizers:
            self._workloads.cluster.delete(NODES, node)
        elif node is not None:
            self._workloads.stop_kubelet(machine.node_name)
            self._workloads.cluster.remove(NODES, node)
            self._loop.call_later(GARBAGE_COLLECTED_SECONDS, self._workloads.remove_node, machine.node_name)

    def _delete_pod(self) -> None:
        pods = {pod.metadata.uid: pod for pod in self._workloads.cluster.all(PODS) if is_ready(pod)}
        self._workloads.remove_pod(pods[self._faults.choose("pod_vanished", sorted(pods))])

    # ---- operators

    def _freeze(self) -> None:
        """Freeze the cluster for a while."""
        self._policies.freeze(is_frozen=True)
        seconds = self._faults.seconds("operator_freezes", *FROZEN_SECONDS)
        self._loop.call_later(seconds, lambda: self._policies.freeze(is_frozen=False))

    def _mark(self) -> None:
        """Mark a node as not to be disrupted for a while."""
        machine = self._pick("operator_marks_node", [machine for machine in self._cloud.alive() if machine.is_usable])
        key, value = MARKS[int(self._faults.seconds("operator_marks_node", 0, len(MARKS)))]
        self._annotate(machine, {key: value})
        seconds = self._faults.seconds("operator_marks_node", *ANOMALY_SECONDS)
        self._loop.call_later(seconds, self._annotate, machine, {})

    def _annotate(self, machine: Machine, annotations: dict[str, str]) -> None:
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is not None and node.metadata.annotations != annotations:
            self._workloads.cluster.put(NODES, replace(node, metadata=replace(node.metadata, annotations=annotations)))

    # ---- the cloud

    def _pick(self, name: str, machines: list[Machine]) -> Machine:
        by_id = {str(machine.provider_id): machine for machine in machines}
        return by_id[self._faults.choose(name, sorted(by_id))]

    def _warn(self, seconds: float) -> None:
        name = f"notice_{seconds:.0f}"
        machine = self._pick(name, self._cloud.spot())
        self._cloud.warn(machine, seconds)
        # A notice in the queue is never withdrawn.
        if seconds > 0 and not self._interruption_queue.is_open and self._faults.strikes("notice_cancelled"):
            after_seconds = self._faults.seconds("notice_cancelled", 1.0, min(seconds, WITHDRAWN_SECONDS_MAX))
            self._loop.call_later(after_seconds, self._withdraw, machine)

    def _withdraw(self, machine: Machine) -> None:
        if machine.notice is not None and machine.is_alive:
            self._cloud.withdraw(machine)
            self._monitor.notice_withdrawn(machine)

    def _reclaim(self) -> None:
        self._cloud.reclaim(self._pick("reclaimed_without_notice", self._cloud.spot()))

    def _hint(self) -> None:
        machine = self._pick("rebalance_hint", self._cloud.spot())
        self._cloud.hint(machine)

    def _storm(self, group: Callable[[Machine], str]) -> None:
        name = "storm_in_zone"
        spot = self._cloud.spot()
        target = self._faults.choose(name, sorted({group(machine) for machine in spot}))
        for machine in spot:
            if group(machine) == target:
                self._loop.call_later(self._faults.seconds(name, 0.0, 10.0), self._warn_in_storm, machine)

    def _warn_in_storm(self, machine: Machine) -> None:
        if machine.is_alive and machine.notice is None:
            self._cloud.warn(machine, self._faults.seconds("storm_in_zone", *STORM_NOTICE_SECONDS))

    def _reprice(self) -> None:
        self._change_offers("price_jumping", lambda offer: self._times(offer, self._rng.uniform(0.5, 2.5)))

    def _hide_prices(self) -> None:
        self._change_offers("price_missing", lambda offer: replace(offer, price_micro_usd_per_hour=None))

    def _sell_out(self) -> None:
        """Sell out one GPU model, or everything, for a while."""
        models = sorted({offer.gpu_model for offer in self._cloud.listed() if offer.gpu_model is not None})
        targets = {self._faults.choose("capacity_gone", [*models, *[EVERYTHING] * len(models)])}
        targets = set(models) if EVERYTHING in targets else targets
        self._cloud.sold_out |= targets
        seconds = self._faults.seconds("capacity_gone", *SOLD_OUT_SECONDS)
        self._loop.call_later(seconds, self._cloud.sold_out.difference_update, targets)

    def _take_quota(self) -> None:
        """Set the quota of GPUs to zero: offers show it, or only launches do."""
        shown_as: Quota = "zero and listed" if self._faults.seconds("quota_zero", 0.0, 1.0) < 0.5 else "zero"
        self._cloud.set_quota(shown_as)
        self._loop.call_later(self._faults.seconds("quota_zero", *QUOTA_SECONDS), self._cloud.set_quota, "full")

    def _hold_launches(self) -> None:
        """Delay launches: calls time out, and the machines appear after the outage."""
        self._cloud.is_delaying = True
        seconds = self._faults.seconds("launches_held", *LAUNCH_DELAY_SECONDS)
        self._faults.disturb(seconds + LATE_MACHINES_SECONDS, CLOUD)
        self._loop.call_later(seconds, self._cloud.launch_delayed)

    def _change_offers(self, name: str, change: Callable[[Offer], Offer]) -> None:
        """Change the offers of a third of the models, or types, and restore them later."""
        by_model = self._rng.random() < 0.5
        kinds = {
            offer.key: (offer.gpu_model if by_model else offer.instance_type) or "" for offer in self._cloud.listed()
        }
        targets = {kind for kind in sorted(set(kinds.values())) if self._rng.random() < 1 / 3}
        changed = [change(offer) if kinds[offer.key] in targets else offer for offer in self._cloud.listed()]
        self._cloud.reprice(tuple(changed))
        self._loop.call_later(
            self._faults.seconds(name, *ANOMALY_SECONDS), lambda: self._cloud.reprice(self._cloud.listed())
        )

    @staticmethod
    def _times(offer: Offer, factor: float) -> Offer:
        price = offer.price_micro_usd_per_hour
        return offer if price is None else replace(offer, price_micro_usd_per_hour=round(price * factor))

    def _damage_gpu(self) -> None:
        """Damage a GPU permanently."""
        machine = self._pick("worn_gpu", [machine for machine in self._cloud.alive() if machine.is_usable])
        machine.set_gpu_fault(GPU_FAULTS[int(self._faults.seconds("worn_gpu", 0, len(GPU_FAULTS)))])

    def _falsify_telemetry(self, how: Telemetry) -> None:
        name = f"telemetry_{how}"
        machine = self._pick(name, [machine for machine in self._cloud.alive() if machine.is_usable])
        machine.telemetry = how
        self._loop.call_later(self._faults.seconds(name, *ANOMALY_SECONDS), setattr, machine, "telemetry", "true")
