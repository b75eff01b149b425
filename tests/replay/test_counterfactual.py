"""Policy comparisons whose result is known by hand."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.replay.chart import render
from gpu_autoscaler.replay.counterfactual import compare_policies, divergence_sentence, rerun
from gpu_autoscaler.replay.outcome import measure
from gpu_autoscaler.replay.recording import Head, Recording
from gpu_autoscaler.replay.workload_script import Arrival, PriceList, Reclaim, Refusal, Script, script_of
from gpu_autoscaler_services.simulation import ROLES

T0 = datetime(2026, 3, 2, 8, tzinfo=UTC)
BOOT_SECONDS, RUN_SECONDS = 200.0, 900.0
PRICE_MICRO_USD_PER_HOUR = 36_000_000  # a cent a second
TICK_SECONDS = 5.0
# From a decision to its effect: ticks, pod starts, watches. Far below the asserted differences.
SLACK_SECONDS = 45.0
OFFER = Offer(
    instance_type="one",
    zone="zone-a",
    capacity_type=CapacityType.ON_DEMAND,
    resources=Resources(cpu_milli=8000, memory_bytes=32 * GIBIBYTE, gpu_count=1, pod_count=50,
                        ephemeral_storage_bytes=100 * GIBIBYTE),
    gpu_model="T4",
    gpu_memory_bytes=16 * GIBIBYTE,
    price_micro_usd_per_hour=PRICE_MICRO_USD_PER_HOUR,
    boot_seconds=120.0,
)  # fmt: skip
SPOT = msgspec.structs.replace(
    OFFER, capacity_type=CapacityType.SPOT, price_micro_usd_per_hour=PRICE_MICRO_USD_PER_HOUR // 3
)
# No break-even rule: an empty node stays for the whole idle time.
FULL_IDLE_TIME = RemovalPolicy(waiting_micro_usd_per_hour=10**12)
POLICY = ScalingPolicy(idle_seconds_max=150.0, scale_down_cooldown_seconds=0.0, removal=FULL_IDLE_TIME)


def _at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def _script(*submitted_seconds: float, hours: float = 1.0, **changes: object) -> Script:
    """Return a script of jobs with one GPU each, submitted at these seconds."""
    arrivals = tuple(
        Arrival(
            at=_at(seconds),
            request=JobRequested(
                job_name=f"job-{number}",
                job_id=JobId(f"job-{number}"),
                project_id="hand",
                gpu_requirements=GpuRequirements(gpu_count=1),
                container=ContainerRequest(image="work:1"),
                run_seconds=RUN_SECONDS,
            ),
        )
        for number, seconds in enumerate(submitted_seconds)
    )
    script = Script(
        from_at=T0,
        to_at=_at(3600.0 * hours),
        arrivals=arrivals,
        replicas=(),
        prices=(PriceList(at=T0, offers=(OFFER,)),),
        boot_seconds={"one": (BOOT_SECONDS,)},
        refusals=(),
        reclaims=(),
        under_way_count=0,
        machines_before_count=0,
        guessed_count=0,
        never_up_count=0,
        demanding_count=0,
    )
    return msgspec.structs.replace(script, **changes)


def _recorded(script: Script, policy: ScalingPolicy = POLICY) -> Recording:
    """Return the history of a system that ran the script."""
    head = Head(policy=policy, from_at=script.from_at, to_at=script.to_at)
    return Recording(head=head, facts=rerun(script, policy, ROLES).facts)


def _policy(**changes: object) -> ScalingPolicy:
    return msgspec.structs.replace(POLICY, **changes)


def test_a_longer_idle_time_costs_its_idle_seconds() -> None:
    """One job on one node: 600 s of idle time instead of 150 s cost 450 cents more."""
    found = compare_policies(_recorded(_script(30.0)), _policy(idle_seconds_max=600.0), ROLES)

    more_seconds = (found.other.node_hours - found.modeled.node_hours) * 3600.0
    more_cents = (found.other.cost_micro_usd - found.modeled.cost_micro_usd) / 10_000
    assert more_seconds == pytest.approx(450.0, abs=SLACK_SECONDS)
    assert more_cents == pytest.approx(more_seconds, abs=1.0)
    assert found.other.waiting == found.modeled.waiting
    assert found.modeled.node_hours * 3600.0 == pytest.approx(BOOT_SECONDS + RUN_SECONDS + 150.0, abs=SLACK_SECONDS)


def test_with_one_node_the_second_job_waits_for_the_first() -> None:
    """Two jobs a minute apart: the second one starts when the first has ended, not on a second node."""
    found = compare_policies(_recorded(_script(0.0, 60.0)), _policy(nodes_count_max=1), ROLES)

    assert found.modeled.waiting["all"].max_seconds == pytest.approx(BOOT_SECONDS, abs=SLACK_SECONDS)
    waited = BOOT_SECONDS + RUN_SECONDS - 60.0
    assert found.other.waiting["all"].max_seconds == pytest.approx(waited, abs=SLACK_SECONDS)
    assert (found.modeled.nodes_count_max, found.other.nodes_count_max) == (2, 1)
    assert found.other.finished_count == found.modeled.finished_count == 2
    assert found.diverged_at is not None
    assert abs((found.diverged_at - _at(60.0)).total_seconds()) < TICK_SECONDS * 2
    assert "the policies diverge at" in divergence_sentence(found)


def test_the_same_policy_never_diverges() -> None:
    """And the simulation under the recorded policy is close to the recording."""
    recording = _recorded(_script(0.0, 300.0, 1500.0))

    found = compare_policies(recording, recording.head.policy, ROLES)

    assert found.diverged_at is None
    assert found.other == found.modeled
    assert found.modeled.node_hours == pytest.approx(found.recorded.node_hours, abs=SLACK_SECONDS * 3 / 3600.0)


def test_recorded_inputs_are_used() -> None:
    """Arrivals, run times, boot times, refusals and notices are read back from the facts."""
    refusal = Refusal(
        offer=SPOT, code="InsufficientInstanceCapacity", scope="offer", from_at=_at(0.0), to_at=_at(120.0)
    )
    reclaim = Reclaim(at=_at(1000.0), instance_type="one", zone="zone-a", notice_seconds=120.0)
    prices = (PriceList(at=T0, offers=(SPOT,)),)
    script = _script(10.0, prices=prices, refusals=(refusal,), reclaims=(reclaim,))

    read = script_of(_recorded(script))

    (arrival,) = read.arrivals
    assert arrival.at == pytest.approx(_at(10.0), abs=timedelta(seconds=1))
    (refused,) = {refusal.to_at for refusal in read.refusals}
    assert refused == pytest.approx(_at(120.0), abs=timedelta(seconds=1))
    boots = read.boot_seconds["one"]
    assert boots[0] == pytest.approx(BOOT_SECONDS, abs=2.0)
    (interruption,) = read.reclaims
    assert interruption.notice_seconds == pytest.approx(120.0, abs=TICK_SECONDS * 2)
    # The machine was interrupted: only the run time of the last attempt is recorded.
    assert arrival.request.run_seconds == pytest.approx(RUN_SECONDS, abs=SLACK_SECONDS)


def test_a_start_in_the_middle_is_listed_as_assumption() -> None:
    """Running jobs are submitted again with their remaining run time, nodes are bought again; both are listed."""
    whole, middle = _recorded(_script(30.0)), _at(500.0)
    before = [stored.recorded for stored in whole.facts if stored.at < middle]
    head = Head(policy=POLICY, from_at=middle, to_at=whole.head.to_at, state=fold(whole.head.state, before))
    later = Recording(head=head, facts=tuple(stored for stored in whole.facts if stored.at >= middle))

    script = script_of(later)
    found = compare_policies(later, POLICY, ROLES)

    (arrival,) = script.arrivals
    left_seconds = 30.0 + BOOT_SECONDS + RUN_SECONDS - 500.0
    assert arrival.request.run_seconds == pytest.approx(left_seconds, abs=SLACK_SECONDS)
    assert (script.under_way_count, script.machines_before_count) == (1, 1)
    assert any("under way" in sentence for sentence in found.assumptions)
    assert any("ran at the start" in sentence for sentence in found.assumptions)
    # Boot, the remaining work and idle time; the recording has no boot.
    seconds = BOOT_SECONDS + left_seconds + POLICY.idle_seconds_max
    assert found.modeled.node_hours * 3600.0 == pytest.approx(seconds, abs=SLACK_SECONDS * 2)
    assert found.recorded.node_hours * 3600.0 == pytest.approx(seconds - BOOT_SECONDS, abs=SLACK_SECONDS)


def test_a_recorded_refusal_applies_to_the_simulation() -> None:
    """An offer that was refused when recorded is refused under another policy too."""
    refusal = Refusal(offer=OFFER, code="Full", scope="offer", from_at=_at(0.0), to_at=_at(600.0))
    simulated = rerun(_script(10.0, refusals=(refusal,)), POLICY, ROLES)

    found = measure(simulated.facts, T0, _at(3600.0))

    assert found.waiting["all"].max_seconds == pytest.approx(590.0 + BOOT_SECONDS, abs=SLACK_SECONDS)


def test_a_notice_without_a_matching_machine_is_counted() -> None:
    """The simulated fleet may not have the machine that the cloud reclaimed."""
    reclaim = Reclaim(at=_at(1000.0), instance_type="another", zone="zone-b", notice_seconds=120.0)

    simulated = rerun(_script(10.0, reclaims=(reclaim,)), POLICY, ROLES)

    assert any("without a matching machine" in description for description in simulated.modeled)


def test_a_comparison_needs_prices() -> None:
    """Without a price list the available offers are unknown."""
    recording = Recording(head=Head(policy=POLICY, from_at=T0, to_at=_at(60.0)), facts=())
    with pytest.raises(ConfigError, match="no price list"):
        compare_policies(recording, POLICY, ROLES)


def test_the_chart_shows_all_outcomes() -> None:
    """Three lines in each of two panels, and the first different decision."""
    found = compare_policies(_recorded(_script(0.0, 60.0)), _policy(nodes_count_max=1), ROLES)

    svg = render(found)

    assert svg.count("<path ") == 6
    assert "first different decision" in svg
    assert "08:00:00" in svg
    assert svg.startswith("<svg ")


def _document(at_seconds: float, **changes: object) -> PolicyDocumentsAccepted:
    document = PolicyDocument(
        name="hand", uid="u1", generation=1, created_at=T0, pools=(DocumentPool(name="hand"),), nodes_count_max=1
    )
    return PolicyDocumentsAccepted(
        documents=(msgspec.structs.replace(document, **changes),), accepted_at=_at(at_seconds)
    )


def test_policy_objects_apply_under_both_policies() -> None:
    """The object allows one node: the second job waits for the first, under the other file as well."""
    recording = _recorded(_script(0.0, 60.0, documents=(_document(-60.0),)))

    found = compare_policies(recording, _policy(idle_seconds_max=600.0), ROLES)

    assert [accepted.documents[0].name for accepted in script_of(recording).documents] == ["hand"]
    assert (found.recorded.nodes_count_max, found.modeled.nodes_count_max, found.other.nodes_count_max) == (1, 1, 1)
    waited = BOOT_SECONDS + RUN_SECONDS - 60.0
    assert found.other.waiting["all"].max_seconds == pytest.approx(waited, abs=SLACK_SECONDS)
    assert any("AutoscalingPolicy objects" in text and "hand" in text for text in found.from_recording)


def test_a_disabled_policy_object_stops_purchases() -> None:
    """Jobs submitted afterwards wait to the end; an object from before the start is active at the start."""
    off = _document(1500.0, is_enabled=False, generation=2)
    recording = _recorded(_script(0.0, 2400.0, documents=(_document(-60.0), off)))

    found = compare_policies(recording, recording.head.policy, ROLES)

    assert [accepted.accepted_at for accepted in script_of(recording).documents] == [_at(-60.0), _at(1500.0)]
    assert found.modeled.finished_count == found.recorded.finished_count == 1
    assert found.other == found.modeled
