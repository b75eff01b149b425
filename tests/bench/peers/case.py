"""The case of V5 for each side: pods that wait, offers, nodes that are there; as facts, and as a fleet's problem."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.support.stories import T0, Story, given, node, on_sale, pod

from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP, FleetProblem
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import (
    AffinitySelector,
    LabelRequirement,
    NodeDemands,
    PodAffinitySpec,
    PodGroup,
    Spread,
)

CASES = Path(os.environ.get("GPU_AUTOSCALER_CASES", "../shared/cases"))
TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpu-autoscaler"
OPENB_LIST = "openb-gpu-2023/pods/openb_pod_list_default.csv.gz"
MOTO = "5.2.5"  # whose list of EC2 types the cases are made from
PODS_COUNT, SEED = 10_000, 7
PODS_PER_NODE_COUNT = 110
OVERHEAD_USD_PER_HOUR = 0.10
ZONES = ("zone-a", "zone-b", "zone-c")
_GROUP = "group"
_MEBIBYTE = 2**20

Case = dict[str, Any]
TimedFact = dict[str, Any]


def missing() -> str | None:
    """Return what a case cannot be made without and is not here, with the next step; None: all is here."""
    if not (CASES / "gen_case.py").is_file():
        return f"no {CASES}/gen_case.py; set GPU_AUTOSCALER_CASES to the folder of cases"
    if not (TRACES / OPENB_LIST).is_file():
        return f"no {TRACES}/{OPENB_LIST}; set GPU_AUTOSCALER_TRACES to the folder of traces"
    return None


def made(*, is_diverse: bool) -> Case:
    """Make the case by the script that every system under test is given it by."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "case.json"
        command = [
            sys.executable, str(CASES / "gen_case.py"), str(out), "--pods", str(PODS_COUNT), "--seed", str(SEED),
            "--moto-wheel", str(_wheel()), "--openb", str(TRACES / OPENB_LIST), *(["--diverse"] if is_diverse else []),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        case: Case = json.loads(out.read_text())
    return {**case, "overhead_usd_per_hour": OVERHEAD_USD_PER_HOUR, "nodes": []}


def with_nodes(case: Case, count: int) -> Case:
    """The case with nodes that are there already: full of work but for a tenth of their CPU and memory, no GPU free."""
    rng = random.Random(SEED)  # noqa: S311 - a case is to be the same each time
    nodes = []
    for number in range(count):
        of = rng.choice(case["types"])
        nodes.append(
            {
                "name": f"there-{number:04d}",
                "type": of["name"],
                "zone": rng.choice(ZONES),
                "capacity_type": rng.choice(("spot", "on-demand")),
                "gpu_model": of["gpu_model"],
                "cpu_milli": of["cpu_milli"] // 10,
                "memory_mib": of["memory_mib"] // 10,
                "gpus": 0,
            }
        )
    return {**case, "nodes": nodes}


def _wheel() -> Path:
    """Return the wheel of moto, by the package index that pip is set up with; kept between runs."""
    found = sorted(CACHE.glob(f"moto-{MOTO}-*.whl"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            f"moto=={MOTO}",
            "--no-deps",
            "--quiet",
            "--dest",
            str(CACHE),
        ]
        subprocess.run(command, check=True, timeout=300)
        found = sorted(CACHE.glob(f"moto-{MOTO}-*.whl"))
    return found[0]


# ---- as facts


def state_of(case: Case) -> ClusterState:
    """What is known where all these pods wait: nodes, pods and offers as the watchers tell them."""
    sold = tuple(_offer(each, offered) for each in case["types"] for offered in each["offers"])
    there = [_node(each) for each in case["nodes"]]
    return given(*there, *(pod_story(each) for each in case["pods"]), on_sale(*sold))


def pod_story(told: TimedFact, at: datetime = T0 - timedelta(seconds=60), *, on: str | None = None) -> Story:
    """The pod as Kubernetes tells it, made and found unschedulable at this instant, or running on this node."""
    selector = {labels.ZONE: told.get("zone"), labels.CAPACITY_TYPE: told.get("capacity_type")}
    demands = NodeDemands(node_selector=tuple(sorted((key, value) for key, value in selector.items() if value)))
    group = told.get("anti_group") or told.get("spread_group")
    pod_affinity = None
    if group:
        kind = PodGroup(namespaces=("default",), requirements=(LabelRequirement(_GROUP, "In", (group,)),))
        apart = (AffinitySelector(topology_key=labels.HOSTNAME, group=kind),) if "anti_group" in told else ()
        even = (Spread(topology_key=labels.ZONE, group=kind),) if "spread_group" in told else ()
        pod_affinity = PodAffinitySpec(apart=apart, spreads=even)
    return pod(
        told["name"],
        on=on,
        gpus=told["gpus"],
        demands=demands,
        labels={_GROUP: group} if group else None,
        pod_affinity=pod_affinity,
        gpu_models=tuple(sorted(told.get("gpu_models", ()))),
        requests=_resources(told, pods_count=1),
        at=at,
    )


def _offer(of: TimedFact, offered: TimedFact) -> Offer:
    return Offer(
        instance_type=of["name"],
        zone=offered["zone"],
        capacity_type=CapacityType.SPOT if offered["capacity_type"] == "spot" else CapacityType.ON_DEMAND,
        resources=_resources(of, pods_count=PODS_PER_NODE_COUNT),
        gpu_model=of["gpu_model"] or None,
        price_micro_usd_per_hour=round(offered["usd_per_hour"] * 1e6),
    )


def _node(told: TimedFact) -> Story:
    of = Offer(
        instance_type=told["type"],
        zone=told["zone"],
        capacity_type=CapacityType.SPOT if told["capacity_type"] == "spot" else CapacityType.ON_DEMAND,
        resources=_resources(told, pods_count=PODS_PER_NODE_COUNT),
    )
    shown = {labels.ZONE: told["zone"], labels.CAPACITY_TYPE: told["capacity_type"]}
    return node(told["name"], of, is_ours=False, labels=shown, at=T0 - timedelta(hours=1))


def _resources(told: TimedFact, *, pods_count: int) -> Resources:
    return Resources(
        cpu_milli=told["cpu_milli"],
        memory_bytes=told["memory_mib"] * _MEBIBYTE,
        gpu_count=told["gpus"],
        pod_count=pods_count,
    )


# ---- as a problem of the fleet alone


class Class(msgspec.Struct, frozen=True, order=True):
    """Pods that ask for the same: a spread over zones is a zone each, evenly."""

    gpus: int
    cpu_milli: int
    memory_mib: int
    zone: str = ""
    gpu_models: tuple[str, ...] = ()
    capacity_type: str = ""
    anti_group: str = ""


def classes(case: Case) -> list[tuple[Class, list[TimedFact]]]:
    """Return each class and the pods of it that wait, in order."""
    found: defaultdict[Class, list[TimedFact]] = defaultdict(list)
    spread: defaultdict[str, list[TimedFact]] = defaultdict(list)
    for told in case["pods"]:
        if told.get("spread_group"):
            spread[told["spread_group"]].append(told)
        else:
            found[_class(told, told.get("zone", ""))].append(told)
    first = 0
    for group in sorted(spread):
        members = sorted(spread[group], key=lambda each: (-each["gpus"], -each["cpu_milli"], -each["memory_mib"]))
        for number, told in enumerate(members, first):
            found[_class(told, ZONES[number % len(ZONES)])].append(told)
        first += len(members)
    return sorted(found.items())


def _class(told: TimedFact, zone: str) -> Class:
    return Class(
        told["gpus"], told["cpu_milli"], told["memory_mib"], zone, tuple(sorted(told.get("gpu_models", ()))),
        told.get("capacity_type", ""), told.get("anti_group", ""),
    )  # fmt: skip


def fleet_problem(case: Case) -> FleetProblem:
    """The problem whose classes are `classes`, and whose offers come in the order of the case."""
    known = classes(case)
    offers = [(of, offered) for of in case["types"] for offered in of["offers"]]
    zones = np.array([offered["zone"] for _, offered in offers])
    kinds = np.array([offered["capacity_type"] for _, offered in offers])
    models = np.array([of["gpu_model"] for of, _ in offers])
    accepts = [
        ((zones == each.zone) | (not each.zone))
        & ((kinds == each.capacity_type) | (not each.capacity_type))
        & (np.isin(models, each.gpu_models) | (not each.gpu_models))
        for each, _ in known
    ]
    groups = {name: number for number, name in enumerate(sorted({each.anti_group for each, _ in known} - {""}))}
    return FleetProblem(
        requests=np.array([(each.gpus, each.cpu_milli, each.memory_mib, 0, 1) for each, _ in known], dtype=np.int64),
        counts=np.array([len(pods) for _, pods in known], dtype=np.int64),
        groups=np.array([groups.get(each.anti_group, NO_GROUP) for each, _ in known], dtype=np.int64),
        accepts=np.array(accepts, dtype=np.bool_),
        capacity=np.array(
            [(of["gpus"], of["cpu_milli"], of["memory_mib"], 0, PODS_PER_NODE_COUNT) for of, _ in offers],
            dtype=np.int64,
        ),
        cost=np.array([offered["usd_per_hour"] + case["overhead_usd_per_hour"] for _, offered in offers]),
    )
