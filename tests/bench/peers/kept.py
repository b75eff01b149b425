"""Whether a fleet keeps everything that its pods ask for. Shares no code with what chose it."""

from collections import Counter, defaultdict
from typing import Any

TimedFact = dict[str, Any]
Node = tuple[TimedFact, TimedFact, list[TimedFact]]  # the type, its offer, the pods that it is bought for


def mistakes(case: TimedFact, nodes: list[Node]) -> list[str]:
    """Return what is wrong with the fleet for the case's pods, in words; empty: every constraint is kept."""
    found = [each for number, node in enumerate(nodes) for each in _on_one(number, *node)]
    places = Counter(told["name"] for _, _, pods in nodes for told in pods)
    found += [f"{told['name']} has {places[told['name']]} places" for told in case["pods"] if places[told["name"]] != 1]
    zones = sorted({offer["zone"] for of in case["types"] for offer in of["offers"]})
    spread: dict[str, Counter[str]] = defaultdict(Counter)
    for _, offer, pods in nodes:
        for told in pods:
            if told.get("spread_group"):
                spread[told["spread_group"]][offer["zone"]] += 1
    for group, counts in spread.items():
        skew = max(counts[zone] for zone in zones) - min(counts[zone] for zone in zones)
        if skew > 1:
            found.append(f"spread group {group} has a skew of {skew}")
    return found


def _on_one(number: int, of: TimedFact, offer: TimedFact, pods: list[TimedFact]) -> list[str]:
    found = [
        f"node {number} has too little {resource}"
        for resource in ("cpu_milli", "memory_mib", "gpus")
        if sum(told[resource] for told in pods) > of[resource]
    ]
    groups = Counter(told["anti_group"] for told in pods if told.get("anti_group"))
    found += [f"node {number} has {count} pods of group {group}" for group, count in groups.items() if count > 1]
    if len(pods) > 110:
        found.append(f"node {number} has {len(pods)} pods")
    for told in pods:
        if told.get("zone", offer["zone"]) != offer["zone"]:
            found.append(f"{told['name']} is in the wrong zone")
        if told.get("capacity_type", offer["capacity_type"]) != offer["capacity_type"]:
            found.append(f"{told['name']} is on the wrong capacity type")
        if of["gpu_model"] not in told.get("gpu_models", [of["gpu_model"]]):
            found.append(f"{told['name']} is on the wrong GPU model")
    return found
