"""Outcomes of another autoscaler, measured from nodes and pods alone, whose result is known by hand."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from tests.replay.test_counterfactual import OFFER, POLICY, PRICE_MICRO_USD_PER_HOUR, T0, _at

from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeGone, NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import FactId, NodeUid, PodUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.replay.observation import Window, compare_fleets
from gpu_autoscaler.replay.recording import Head, Recording
from gpu_autoscaler.runtime.history import Stored
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.simulation import ROLES

NEEDS = Resources(cpu_milli=1000, memory_bytes=1 << 30, gpu_count=1, pod_count=1)


def recorded(*dated_facts: tuple[datetime, Fact], hours: float = 1.0) -> Recording:
    """Return a recording of these facts."""
    facts = tuple(
        Stored(
            at=at,
            recorded=Recorded(
                envelope=Envelope(id=FactId(str(number)), source="/test", time=at, fact=fact),
                stream=fact.stream(),
                sequence=number,
            ),
        )
        for number, (at, fact) in enumerate(dated_facts, start=1)
    )
    return Recording(head=Head(policy=POLICY, from_at=T0, to_at=_at(3600 * hours)), facts=facts)


def on_sale() -> tuple[datetime, Fact]:
    """A price list with one offer."""
    return T0, SpotOffersSampled(provider="test", offers=(OFFER,), sampled_at=T0, epoch=1, version=1)


def node(name: str, created_seconds: float, instance_type: str = OFFER.instance_type) -> tuple[datetime, Fact]:
    """An on-demand node of the other autoscaler."""
    at = _at(created_seconds)
    return at, NodeObserved(
        node_uid=NodeUid(name),
        name=name,
        is_ready=True,
        allocatable=OFFER.resources,
        created_at=at,
        instance_type=instance_type,
        zone=OFFER.zone,
        capacity_type=CapacityType.ON_DEMAND,
        epoch=1,
        version=1,
    )


def pod(name: str, created: float, started: float | None = None, ended: float | None = None) -> tuple[datetime, Fact]:
    """A foreign pod with one GPU."""
    return _at(created), PodObserved(
        pod_uid=PodUid(name),
        namespace="default",
        name=name,
        phase="pending" if started is None else "running" if ended is None else "succeeded",
        requests=NEEDS,
        created_at=_at(created),
        started_at=None if started is None else _at(started),
        finished_at=None if ended is None else _at(ended),
        owner_kind="Job",
        epoch=1,
        version=1,
    )


def gone(name: str, at_seconds: float) -> tuple[datetime, Fact]:
    """The deletion of a node."""
    return _at(at_seconds), NodeGone(node_uid=NodeUid(name), name=name, epoch=1, version=2)


def test_their_fleet_is_measured_and_ours_is_modeled() -> None:
    """They kept a node for 40 min for 10 min of work; ours pays boot, work and idle time."""
    found = compare_fleets(recorded(on_sale(), node("n", 120), pod("p", 60, 180, 780), gone("n", 2520)), POLICY, ROLES)
    assert found.theirs.node_hours == pytest.approx(40 / 60)
    assert found.theirs.cost_micro_usd == pytest.approx(PRICE_MICRO_USD_PER_HOUR * 40 / 60, rel=1e-6)
    assert found.theirs.waiting["all"].mean_seconds == 120
    assert found.ours.jobs_count == found.ours.finished_count == 1
    # 120 s boot, 600 s work, 150 s idle, and delays of ticks and terminations.
    assert 870 / 3600 < found.ours.node_hours < 1100 / 3600


def test_a_node_without_a_list_price_is_not_free() -> None:
    """Its cost is unknown: it is counted, excluded from the sum, and listed as assumption."""
    found = compare_fleets(recorded(on_sale(), node("n", 120, "exotic"), pod("p", 60, 180, 780)), POLICY, ROLES)
    assert (found.theirs.cost_micro_usd, found.theirs.price_unknown_count) == (0, 1)
    assert any("1 node of theirs without a list price" in sentence for sentence in found.assumptions)


def test_work_from_before_the_window_counts_from_its_start() -> None:
    """Dropped facts become a state: node, pod and prices continue, earlier time is not counted."""
    early = (on_sale(), node("n", 120), pod("p", 60, 180))
    later = [pod(f"q{number}", 900 + number, 1000 + number, 1100 + number) for number in range(6)]
    window = Window(T0, facts_count_max=4)
    for stored in recorded(*early, *later).facts:
        window.add(stored.recorded, stored.at)
    kept = window.recording(POLICY, _at(3600))
    assert not any(isinstance(stored.recorded.fact, NodeObserved) for stored in kept.facts)
    found = compare_fleets(kept, POLICY, ROLES)
    span_hours = (_at(3600) - window.from_at).total_seconds() / 3600
    assert found.theirs.node_hours == pytest.approx(span_hours)
    assert found.theirs.jobs_count == found.ours.jobs_count == 1 + 6
    assert found.theirs.cost_micro_usd == pytest.approx(PRICE_MICRO_USD_PER_HOUR * span_hours, rel=1e-6)


@pytest.mark.parametrize(
    ("facts", "sentence"), [([pod("p", 60)], "no price list"), ([on_sale()], "no pod has requested a GPU")]
)
def test_missing_inputs_are_named(facts: Sequence[tuple[datetime, Fact]], sentence: str) -> None:
    """The error names what is missing and the next step."""
    with pytest.raises(ConfigError, match=sentence):
        compare_fleets(recorded(*facts), POLICY, ROLES)


def test_a_missing_kubeconfig_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before anything is started."""
    absent = tmp_path / "absent.kubeconfig"
    assert run(["observe", "--kubeconfig", str(absent), "--folder", str(tmp_path / "out")]) == Exit.USAGE
    assert str(absent) in capsys.readouterr().err
    assert run(["observe", "--facts-max", "3", "--folder", str(tmp_path / "out")]) == Exit.USAGE
    assert "--facts-max: 3 is too small" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
