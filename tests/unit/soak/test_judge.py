"""The judge of the soak accepts what agrees and reports each kind of disagreement, from records of a small cluster."""

from datetime import timedelta

import msgspec
import pytest
from msgspec.structs import replace
from tests.soak.judge import Evidence, Known, Level, Objects, Span, judge
from tests.support.stories import HOUR, MINUTE, T0, given, job, node, notice, pod, provider_id

from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.simcluster.instances import InvoiceLine
from gpu_autoscaler.store.protocol import LastCharge

NOW = T0 + HOUR
PRICE = 10_000_000
NODES = ("n1", "n2")
STATE = given(
    *(node(name) for name in NODES),
    pod("train-0", on="n1"),
    pod("train-1", on="n2"),
    pod("waits"),
    job("train"),
    notice("n1"),
    as_of=NOW,
)
INSTANCES = [provider_id(f"buy-{name}") for name in NODES]


def _charge(name: str, *, to_at: timedelta = HOUR - MINUTE) -> LastCharge:
    total = cost_micro_usd(PRICE, to_at)
    span = CostAccrued(
        provider_id=provider_id(f"buy-{name}"),
        node_name=name,
        instance_type="g5.xlarge",
        capacity_type=CapacityType.ON_DEMAND,
        from_at=T0,
        to_at=T0 + to_at,
        total_micro_usd=total,
        idle_micro_usd=total,
        shares=(),
        price_micro_usd_per_hour=PRICE,
        price_source="test",
        price_at=T0,
    )
    return LastCharge(last=span, from_at=T0, total_micro_usd=total)


def _line(name: str) -> InvoiceLine:
    return InvoiceLine(
        provider_id=provider_id(f"buy-{name}"),
        action_id=ActionId(f"buy-{name}"),
        installation="test",
        instance_type="g5.xlarge",
        zone="zone-a",
        capacity_type="on-demand",
        gpu_count=1,
        price_micro_usd_per_hour=PRICE,
        launched_at=T0,
        terminated_at=None,
        cost_micro_usd=cost_micro_usd(PRICE, HOUR),
    )


def _spans(charge: LastCharge, *, gap: timedelta = timedelta(0)) -> list[Span]:
    """The charge as two spans, of which one may miss a time."""
    half = T0 + 20 * MINUTE
    return [Span(T0, half, 1_000), Span(half + gap, charge.last.to_at, charge.total_micro_usd - 1_000)]


CHARGES = {str(provider_id(f"buy-{name}")): _charge(name) for name in NODES}
GOOD = Evidence(
    known=(Known(name="scaler", oracle=STATE, actual=STATE, folds=FACTS),),
    state=STATE,
    objects=Objects(
        pods={str(uid): entry.node_name for uid, entry in STATE.pods.items()},
        nodes=list(STATE.nodes),
        jobs=["train"],
        instances=INSTANCES,
    ),
    invoice=[_line(name) for name in NODES],
    charges=CHARGES,
    spans={name: _spans(charge) for name, charge in CHARGES.items()},
    judged_at=NOW,
    rss_mib={"scaler": Level(start=200, end=230), "broker-0": Level(start=100, end=400)},
    rss_mib_max={"broker-0": 384},
    disk_mib=Level(start=500, end=600),
)


def _knows(**changes: object) -> Evidence:
    """The scaler's state differs in these fields."""
    known = replace(GOOD.known[0], actual=replace(STATE, **changes))
    return replace(GOOD, known=(known,))


def _objects(**changes: object) -> Evidence:
    return replace(GOOD, objects=replace(GOOD.objects, **changes))


def _charged(charge: LastCharge) -> Evidence:
    """The ledger, and the facts with it, have this charge instead."""
    provider = charge.last.provider_id
    return replace(GOOD, charges={**CHARGES, provider: charge}, spans={**GOOD.spans, provider: _spans(charge)})


def test_what_agrees_is_equal_and_unbroken() -> None:
    """A charge up to the last minute and levels within the slack are fine."""
    verdict = judge(GOOD)
    assert (verdict.differences, verdict.broken) == ((), ())
    assert verdict.is_equal


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (_knows(pods={}), "scaler: 3 of 3 pods unknown or older"),
        (_knows(nodes={}), "scaler: 2 of 2 nodes unknown or older"),
        (_knows(notices={}), "scaler: 1 of 1 notices unknown or older"),
        (_knows(orders={}), "scaler: 2 of 2 orders unknown or older"),
        (_knows(jobs={}), "scaler: 1 of 1 jobs unknown or older"),
        (
            replace(GOOD, known=(replace(GOOD.known[0], oracle=given(node("n1"), as_of=NOW)),)),
            "oracle, compared with scaler: 3 of 3 pods unknown or older",
        ),
        (_objects(pods={**GOOD.objects.pods, "new": "n1"}), "1 pods exist but are unknown: new"),
        (_objects(pods={}), "3 pods are known but do not exist"),
        (_objects(pods=dict.fromkeys(GOOD.objects.pods, "n9")), "is on n9, not on n1"),
        (_objects(nodes=[]), "2 nodes are known but do not exist"),
        (_objects(jobs=[]), "1 jobs are known but do not exist: train"),
        (_objects(jobs=["train", "lost"]), "1 jobs exist but are unknown: lost"),
        (_objects(instances=[*INSTANCES, "sim:///zone-a/i-x"]), "1 instances exist but are unknown: sim:///zone-a/i-x"),
        (_objects(instances=INSTANCES[:1]), "is open, its instance"),
        (replace(GOOD, charges={}), "is not charged at all"),
        (replace(GOOD, invoice=GOOD.invoice[:1]), "is charged, but not on the invoice"),
        (_charged(replace(_charge("n1"), total_micro_usd=1)), "is charged 1 micro-USD up to"),
        (_charged(_charge("n1", to_at=30 * MINUTE)), "only, it runs"),
        (
            replace(GOOD, invoice=[replace(_line("n1"), terminated_at=T0 + 50 * MINUTE), _line("n2")]),
            "it ended at",
        ),
        (replace(GOOD, spans={}), "facts say 0 micro-USD"),
        (replace(GOOD, spans={**GOOD.spans, INSTANCES[0]: _spans(_charge("n1"), gap=MINUTE)}), "then from 12:21:00"),
    ],
)  # fmt: skip
def test_a_disagreement_is_a_difference(evidence: Evidence, text: str) -> None:
    """Each is reported with the name of what differs."""
    differences = judge(evidence).differences
    assert any(text in line for line in differences), differences


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (replace(GOOD, rss_mib={"scaler": Level(start=200, end=400)}), "memory of scaler is not level"),
        (
            replace(GOOD, rss_mib={"broker-0": Level(start=400, end=500)}),
            "memory of broker-0 is 500 MiB, its limit is 384",
        ),
        (replace(GOOD, disk_mib=Level(start=500, end=1500)), "disk is not level"),
        (replace(GOOD, invoice=[*GOOD.invoice, _line("n1")]), "action buy-n1 launched 2 instances"),
        (replace(GOOD, broken=("a notice was never answered",)), "a notice was never answered"),
    ],
)
def test_what_must_not_happen_is_broken(evidence: Evidence, text: str) -> None:
    """It fails the soak although all states are equal."""
    verdict = judge(evidence)
    assert any(text in line for line in verdict.broken)
    assert verdict.is_equal


def test_long_lists_of_bills_are_cut() -> None:
    """The result names three and the number of all."""
    lines = [msgspec.structs.replace(_line("n1"), provider_id=provider_id(f"x{number}")) for number in range(50)]
    differences = judge(replace(GOOD, invoice=[*GOOD.invoice, *lines])).differences
    assert len(differences) == 4
    assert "50 differences in bills in all" in differences
