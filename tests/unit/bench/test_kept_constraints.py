"""The bench's own look at a fleet: it finds each constraint that is broken, and nothing where all are kept."""

from typing import Any

import pytest
from tests.bench.peers.kept import Node, mistakes

OFFERS = [{"zone": zone, "capacity_type": "spot", "usd_per_hour": 1.0} for zone in ("zone-a", "zone-b")]
TYPE = {"name": "big", "cpu_milli": 8_000, "memory_mib": 1_000, "gpus": 2, "gpu_model": "A100", "offers": OFFERS}


def told(name: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a pod
    """A pod of the case."""
    return {"name": name, "cpu_milli": 1_000, "memory_mib": 100, "gpus": 1, **more}


def fleet(*pods: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Node]]:
    """A case of these pods, and a node for each list of them, from zone to zone."""
    case = {"types": [TYPE], "pods": [each for listed in pods for each in listed]}
    return case, [(TYPE, OFFERS[number % 2], listed) for number, listed in enumerate(pods)]


def test_a_fleet_that_meets_every_constraint_has_no_violations() -> None:
    """Zone, model, group and spread are all asked for, and all kept."""
    case, nodes = fleet(
        [told("a", zone="zone-a", gpu_models=["A100"]), told("b", spread_group="s")],
        [told("c", spread_group="s"), told("d", anti_group="g")],
    )
    assert mistakes(case, nodes) == []


@pytest.mark.parametrize(
    ("pods", "mistake"),
    [
        ([[told("a", gpus=3)]], "too little gpus"),
        ([[told("a", zone="zone-b")]], "wrong zone"),
        ([[told("a", capacity_type="on-demand")]], "wrong capacity type"),
        ([[told("a", gpu_models=["H100"])]], "wrong GPU model"),
        ([[told("a", anti_group="g"), told("b", anti_group="g")]], "2 pods of group g"),
        ([[told("a", spread_group="s"), told("b", spread_group="s")]], "a skew of 2"),
        ([[told("a")], [told("a")]], "2 places"),
    ],
)
def test_each_broken_constraint_is_named(pods: list[list[dict[str, Any]]], mistake: str) -> None:
    """One is broken at a time."""
    case, nodes = fleet(*pods)
    assert any(mistake in each for each in mistakes(case, nodes))
