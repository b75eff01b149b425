"""Scheduled faults: when each strikes, its target and its duration. Faults of single calls are injected by the
adapters.
"""

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import NODES, PODS, Cluster
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.capacity import StoreTrouble
from gpu_autoscaler.sim.cloud import Cloud, Machine, Telemetry
from gpu_autoscaler.sim.crew import Crew
from gpu_autoscaler.sim.documents import KIND as EDITS_DOCUMENTS
from gpu_autoscaler.sim.documents import Documents
from gpu_autoscaler.sim.events import Events
from gpu_autoscaler.sim.faults import BROKER, CLOUD, KUBERNETES, RECORD, STORE, Faults
from gpu_autoscaler.sim.kube import WatchTrouble
from gpu_autoscaler.sim.lowering import LOWERS_MONEY, Lowering
from gpu_autoscaler.sim.overruling import KIND as OVERRULES
from gpu_autoscaler.sim.overruling import Overrulers
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.timeline import VirtualLoop
from gpu_autoscaler.sim.witness import Witness
from gpu_autoscaler.sim.workloads import COLLECTED_SECONDS, Workloads, is_ready

LOST_SECONDS = (1.0, 20.0)
REBUILT_SECONDS = 60.0  # until the state is rebuilt
AWAY_SECONDS = (20.0, 300.0)
LAG_SECONDS = (5.0, 120.0)
SECOND_SCALER_SECONDS = (60.0, 1800.0)
ODD_SECONDS = (600.0, 3600.0)  # for telemetry, prices and marks
STORM_NOTICE_SECONDS = (30.0, 120.0)
WITHDRAWN_SECONDS_MAX = 40.0  # clouds withdraw notices early
SOLD_OUT_SECONDS = (300.0, 2400.0)
HELD_AFTERWARDS_SECONDS = 900.0  # until late machines are removed
HELD_SECONDS = (30.0, 1500.0)  # sometimes longer than the boot timeout
EVERYTHING = "everything"
FROZEN_SECONDS = (300.0, 2400.0)
ILLS: tuple[dict[str, object], ...] = (
    {"xid": 79},
    {"xid": 94},
    {"xid": 31},
    {"temperature_celsius": 93.0},
    {"is_row_remap_failed": True},
)
MARKS = ((labels.DO_NOT_DISRUPT, "true"), (labels.DO_NOT_DISRUPT, "30m"), (labels.SCALE_DOWN_DISABLED, "true"))


class Stage(Protocol):
    """Parts of the run that faults can strike."""

    loop: VirtualLoop
    faults: Faults
    record: Record
    workloads: Workloads
    cloud: Cloud
    crew: Crew
    witness: Witness
    identity: Cluster
    policies: Policies
    documents: Documents
    events: Events
    watch_trouble: WatchTrouble
    store_trouble: StoreTrouble


class Trouble:
    """Schedules and injects the faults of a run."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self._loop = stage.loop
        self._faults = stage.faults
        self._record = stage.record
        self._workloads = stage.workloads
        self._cloud = stage.cloud
        self._crew = stage.crew
        self._witness = stage.witness
        self._installation = stage.identity.installation
        self._policies = stage.policies
        self._watches = stage.watch_trouble
        self._store = stage.store_trouble
        self._chance = chance
        self._documents = stage.documents
        self._events = stage.events
        self._overrulers = Overrulers(stage.loop, stage.record, stage.policies, stage.faults)
        self._savers = Lowering(stage.loop, stage.cloud, stage.policies, stage.faults)
        self._acts: Mapping[str, Callable[[], None]] = {
            "streams_overtaking": self._lag,
            "broker_away": self._lose_broker,
            "broker_lost": self._lose_everything,
            "instance_left_behind": self._leave_behind,
            "service_killed": self._kill,
            "two_scalers": self._double,
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
            "telemetry_silent": lambda: self._lie("silent"),
            "telemetry_frozen": lambda: self._lie("frozen"),
            "telemetry_all_zero": lambda: self._lie("all_zero"),
            "telemetry_absurd": lambda: self._lie("absurd"),
            "worn_gpu": self._wear,
            "store_full": self._fill_store,
            "capacity_gone": self._sell_out,
            "launches_held": self._hold_launches,
            "operator_freezes": self._freeze,
            "operator_edits_policy": self._policies.edit,
            LOWERS_MONEY: self._savers.lower,
            EDITS_DOCUMENTS: self._documents.edit,
            "operator_marks_node": self._mark,
            OVERRULES: self._overrulers.overrule,
        }

    def begin(self) -> None:
        """Start scheduling."""
        for name in self._acts:
            self._await(name)

    def end(self) -> None:
        """End all faults and repair everything."""
        self._faults.is_over = True
        self._return_broker()
        self._store.is_full = False
        self._watches.is_away = False
        self._cloud.reprice(self._cloud.listed())
        self._cloud.sold_out.clear()
        self._cloud.make_held()
        self._policies.freeze(is_frozen=False)
        self._policies.lift_money()
        self._overrulers.end()
        self._documents.end()
        for machine in self._cloud.machines:
            machine.telemetry = "true"
            machine.fall_ill({})
            self._annotate(machine, {})

    def _await(self, name: str) -> None:
        seconds = self._faults.next_in_seconds(name)
        if seconds is not None:
            self._loop.call_later(seconds, self._come, name)

    def strike(self, name: str) -> None:
        """Strike now if there is a target."""
        if not self._faults.is_over and self._has_victim(name) and self._faults.happens(name):
            self._acts[name]()

    def _come(self, name: str) -> None:
        if not self._faults.is_over:
            self.strike(name)
            self._await(name)

    def _has_victim(self, name: str) -> bool:
        if name.startswith(("notice_", "storm_")) or name in ("reclaimed_without_notice", "rebalance_hint"):
            return bool(self._cloud.spot())
        if name in ("node_vanished", "operator_marks_node", LOWERS_MONEY) or name.startswith(("telemetry_", "worn_")):
            return any(machine.is_usable for machine in self._cloud.alive())
        if name == EDITS_DOCUMENTS:
            return bool(self._policies.documents)
        if name == "pod_vanished":
            return any(is_ready(pod) for pod in self._workloads.cluster.all(PODS))
        return bool(self._crew.processes)

    # ---- messages and processes

    def _lag(self) -> None:
        name = self._faults.choose("streams_overtaking", sorted(self._crew.processes))
        process = self._crew.processes[name]
        seconds = self._faults.seconds("streams_overtaking", *LAG_SECONDS)
        stream = self._faults.choose("streams_overtaking", sorted(self._record.facts))
        process.lag_until[stream] = self._loop.time() + seconds
        self._faults.lasts(seconds, process.role)

    def _lose_broker(self) -> None:
        self._record.is_away = True
        seconds = self._faults.seconds("broker_away", *AWAY_SECONDS)
        self._faults.lasts(seconds + 30.0, BROKER)
        self._loop.call_later(seconds, self._return_broker)

    def _return_broker(self) -> None:
        self._record.is_away = False
        self._documents.say_what_is_lost()
        self._crew.pump()

    def _lose_everything(self) -> None:
        """The broker comes back with empty disks: every process must rebuild its state."""
        self._record.is_away = True
        self._record.lose()
        self._documents.lost()
        self._witness.lost()
        self._crew.lose_broker()
        seconds = self._faults.seconds("broker_lost", *LOST_SECONDS)
        self._faults.lasts(seconds + REBUILT_SECONDS, RECORD)
        self._loop.call_later(seconds, self._return_broker)

    def _leave_behind(self) -> None:
        """Launch a machine with our tags that no plan knows, as a script or a former installation would."""
        offers = self._cloud.listed()
        number = int(self._faults.seconds("instance_left_behind", 0, len(offers)))
        self._cloud.leave_behind(offers[number], self._installation)

    def _kill(self) -> None:
        self._crew.kill(self._faults.choose("service_killed", sorted(self._crew.processes)))

    def _double(self) -> None:
        self._crew.start("scaler", instance="scaler-2")
        seconds = self._faults.seconds("two_scalers", *SECOND_SCALER_SECONDS)
        self._loop.call_later(seconds, self._crew.kill, "scaler-2")

    def _fill_store(self) -> None:
        self._store.is_full = True
        seconds = self._faults.seconds("store_full", *AWAY_SECONDS)
        self._faults.lasts(seconds + 30.0, STORE)
        self._loop.call_later(seconds, setattr, self._store, "is_full", False)

    # ---- Kubernetes

    def _break_watches(self) -> None:
        self._watches.breaks_count += 1
        self._faults.lasts(60.0, KUBERNETES)

    def _lose_history(self) -> None:
        self._watches.losses_count += 1
        self._faults.lasts(60.0, KUBERNETES)

    def _lose_kubernetes(self) -> None:
        """The API server is unavailable, like during an upgrade; running pods continue."""
        self._watches.is_away = True
        seconds = self._faults.seconds("kubernetes_away", *AWAY_SECONDS)
        self._faults.lasts(seconds + 60.0, KUBERNETES)
        self._loop.call_later(seconds, setattr, self._watches, "is_away", False)

    def _delete_node(self) -> None:
        """Delete a node object. With a finalizer it stays until the finalizer is removed; otherwise it is gone, the
        machine runs on, and its pods are garbage-collected.
        """
        machine = self._pick("node_vanished", [one for one in self._cloud.alive() if one.is_usable])
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is not None and node.metadata.finalizers:
            self._workloads.cluster.delete(NODES, node)
        elif node is not None:
            self._workloads.silence(machine.node_name)
            self._workloads.cluster.remove(NODES, node)
            self._loop.call_later(COLLECTED_SECONDS, self._workloads.forget_node, machine.node_name)

    def _delete_pod(self) -> None:
        pods = {pod.metadata.uid: pod for pod in self._workloads.cluster.all(PODS) if is_ready(pod)}
        self._workloads.gone(pods[self._faults.choose("pod_vanished", sorted(pods))])

    # ---- operators

    def _freeze(self) -> None:
        """Freeze the cluster for a while."""
        self._policies.freeze(is_frozen=True)
        seconds = self._faults.seconds("operator_freezes", *FROZEN_SECONDS)
        self._loop.call_later(seconds, lambda: self._policies.freeze(is_frozen=False))

    def _mark(self) -> None:
        """Mark a node as not to be disrupted for a while."""
        machine = self._pick("operator_marks_node", [one for one in self._cloud.alive() if one.is_usable])
        key, value = MARKS[int(self._faults.seconds("operator_marks_node", 0, len(MARKS)))]
        self._annotate(machine, {key: value})
        seconds = self._faults.seconds("operator_marks_node", *ODD_SECONDS)
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
        if seconds > 0 and not self._events.is_open and self._faults.strikes("notice_cancelled"):
            after_seconds = self._faults.seconds("notice_cancelled", 1.0, min(seconds, WITHDRAWN_SECONDS_MAX))
            self._loop.call_later(after_seconds, self._withdraw, machine)

    def _withdraw(self, machine: Machine) -> None:
        if machine.notice is not None and machine.is_alive:
            self._cloud.withdraw(machine)
            self._witness.withdrawn(machine)

    def _reclaim(self) -> None:
        self._cloud.reclaim(self._pick("reclaimed_without_notice", self._cloud.spot()))

    def _hint(self) -> None:
        machine = self._pick("rebalance_hint", self._cloud.spot())
        self._cloud.hint(machine)

    def _storm(self, group: Callable[[Machine], str]) -> None:
        name = "storm_in_zone"
        spot = self._cloud.spot()
        hit = self._faults.choose(name, sorted({group(machine) for machine in spot}))
        for machine in spot:
            if group(machine) == hit:
                self._loop.call_later(self._faults.seconds(name, 0.0, 10.0), self._warn_in_storm, machine)

    def _warn_in_storm(self, machine: Machine) -> None:
        if machine.is_alive and machine.notice is None:
            self._cloud.warn(machine, self._faults.seconds("storm_in_zone", *STORM_NOTICE_SECONDS))

    def _reprice(self) -> None:
        self._for_a_while("price_jumping", lambda offer: self._times(offer, self._chance.uniform(0.5, 2.5)))

    def _hide_prices(self) -> None:
        self._for_a_while("price_missing", lambda offer: replace(offer, price_micro_usd_per_hour=None))

    def _sell_out(self) -> None:
        """Sell out one GPU model, or everything, for a while."""
        models = sorted({offer.gpu_model for offer in self._cloud.listed() if offer.gpu_model is not None})
        hit = {self._faults.choose("capacity_gone", [*models, *[EVERYTHING] * len(models)])}
        hit = set(models) if EVERYTHING in hit else hit
        self._cloud.sold_out |= hit
        seconds = self._faults.seconds("capacity_gone", *SOLD_OUT_SECONDS)
        self._loop.call_later(seconds, self._cloud.sold_out.difference_update, hit)

    def _hold_launches(self) -> None:
        """Delay launches: calls time out, and the machines appear after the outage."""
        self._cloud.is_holding = True
        seconds = self._faults.seconds("launches_held", *HELD_SECONDS)
        self._faults.lasts(seconds + HELD_AFTERWARDS_SECONDS, CLOUD)
        self._loop.call_later(seconds, self._cloud.make_held)

    def _for_a_while(self, name: str, change: Callable[[Offer], Offer]) -> None:
        """Change the offers of a third of the models, or types, and restore them later."""
        by_model = self._chance.random() < 0.5
        kinds = {
            offer.key: (offer.gpu_model if by_model else offer.instance_type) or "" for offer in self._cloud.listed()
        }
        hit = {one for one in sorted(set(kinds.values())) if self._chance.random() < 1 / 3}
        changed = [change(offer) if kinds[offer.key] in hit else offer for offer in self._cloud.listed()]
        self._cloud.reprice(tuple(changed))
        self._loop.call_later(
            self._faults.seconds(name, *ODD_SECONDS), lambda: self._cloud.reprice(self._cloud.listed())
        )

    @staticmethod
    def _times(offer: Offer, factor: float) -> Offer:
        price = offer.price_micro_usd_per_hour
        return offer if price is None else replace(offer, price_micro_usd_per_hour=round(price * factor))

    def _wear(self) -> None:
        """Damage a GPU permanently."""
        machine = self._pick("worn_gpu", [one for one in self._cloud.alive() if one.is_usable])
        machine.fall_ill(ILLS[int(self._faults.seconds("worn_gpu", 0, len(ILLS)))])

    def _lie(self, how: Telemetry) -> None:
        name = f"telemetry_{how}"
        machine = self._pick(name, [one for one in self._cloud.alive() if one.is_usable])
        machine.telemetry = how
        self._loop.call_later(self._faults.seconds(name, *ODD_SECONDS), setattr, machine, "telemetry", "true")
