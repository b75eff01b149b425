"""Shared GPUs: MIG slices and replicas are placed, bought, and charged by their share."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, given, job, node, offer, on_sale, pod, policy, request

from gpu_autoscaler.core.demand.sources import job_shape
from gpu_autoscaler.core.intake.admission import admit, supply
from gpu_autoscaler.core.policy.gpu_slices import GpuSharing, gpu_units, member_price
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.core.queueing.estimates import Estimates
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import GpuRequirements, JobSpec, Violation
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer import NoOfferFits
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.resources import SHARED_GPU_RESOURCE, Resources
from gpu_autoscaler.simcluster.instances import shown_gpus

SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"
T4 = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
WHOLE = NodePool(name="whole")
SLICES = NodePool(name="slices", gpu_models=("A100",), sharing=GpuSharing(mig_profiles=("1g.5gb",) * 7))
MIXED = NodePool(name="mixed", sharing=GpuSharing(mig_profiles=("3g.20gb", "2g.10gb", "1g.5gb")))
REPLICAS = NodePool(name="replicas", gpu_models=("T4",), sharing=GpuSharing(replicas_count=4))


def planned(*stories: Story, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan, accepted by the plan check."""
    state, under = given(*stories), policy(**rules)
    return accepted_plan(state, under, T0)


def pods(count: int, slices: Mapping[str, int], **more: Any) -> Story:  # noqa: ANN401 - fields of the pod
    """Equal pods that request slices."""
    return tuple(event for number in range(count) for event in pod(f"p{number}", slices=slices, **more))


def test_a_slice_is_not_a_whole_gpu() -> None:
    """Capacity of slices does not fit a pod with whole GPUs, nor the other way round."""
    cut = node("n1", slices={SMALL: 56})
    result = planned(cut, pod("whole", gpus=1), on_sale(), pools=(WHOLE,))
    assert [decision.reason.demand for decision in result.purchases] == [("pod/uid-whole",)]  # type: ignore[union-attr]
    result = planned(node("n1"), pods(1, {SMALL: 1}), on_sale(), pools=(WHOLE,))
    assert [held.reason for held in result.deferred] == [NoOfferFits(detail=f"no pool partitions GPUs into {SMALL}")]


def test_existing_slices_are_used_first() -> None:
    """Seven pods fit on one partitioned GPU; a node is bought for the eighth."""
    one_gpu = offer("one", gpus=1)
    there = node("n1", one_gpu, slices={SMALL: 7}, pool="slices")
    running = tuple(event for number in range(6) for event in pod(f"r{number}", on="n1", slices={SMALL: 1}))
    assert planned(there, running, pods(1, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,)).purchases == []
    assert len(planned(there, running, pods(2, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,)).purchases) == 1


def test_a_pool_provides_its_mig_profiles() -> None:
    """Fifteen small slices need three GPUs of seven; labels configure the GPU operator."""
    one_gpu = offer("one", gpus=1)
    result = planned(pods(15, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,)).purchases
    assert [decision.slices for decision in result] == [((SMALL, 7),)] * 3
    assert {dict(decision.labels)[labels.MIG_CONFIG] for decision in result} == {"all-1g.5gb"}


def test_one_gpu_provides_slices_of_several_sizes() -> None:
    """A GPU with three profiles serves a pod of each: one node, not three."""
    one_gpu = offer("one", gpus=1)
    sizes = ("1g.5gb", "2g.10gb", "3g.20gb")
    waiting = tuple(event for size in sizes for event in pod(size, slices={f"nvidia.com/mig-{size}": 1}))
    assert len(planned(waiting, on_sale(one_gpu), pools=(MIXED,)).purchases) == 1


@pytest.mark.parametrize("pool", [SLICES, MIXED, REPLICAS])
def test_the_operator_provides_the_promised_slices(pool: NodePool) -> None:
    """The simulated device plugin reads the labels only, and shows what the plan expects."""
    of, resource = (T4, SHARED_GPU_RESOURCE) if pool is REPLICAS else (offer(), SMALL)
    (decision,) = planned(pods(1, {resource: 1}), on_sale(of), pools=(pool,)).purchases
    shown = shown_gpus(of.resources.gpu_count, of.gpu_model, of.gpu_memory_bytes, dict(decision.labels))
    assert {name: int(count) for name, count in shown.items() if count != "0"} == dict(decision.promised.slices)


def test_a_booting_node_is_not_ready_before_it_is_partitioned() -> None:
    """A node with whole GPUs is still booting: its slices are promised."""
    one_gpu = offer("one", gpus=1)
    booting = node("n1", one_gpu, slices={SMALL: 7}, pool="slices")
    event = booting[-1]
    uncut = event.fact.__class__(
        **{name: getattr(event.fact, name) for name in event.fact.__struct_fields__}
        | {"allocatable": one_gpu.resources}
    )
    state_story = (*booting[:-1], type(event)(uncut, event.at))
    result = planned(state_story, pods(7, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,))
    assert result.purchases == []
    assert {type(held.reason) for held in result.deferred} == {CapacityExpected}


def test_limits_count_bought_gpus() -> None:
    """Seven slices of a GPU are one GPU for every limit."""
    one_gpu = offer("one", gpus=1)
    rules: dict[str, Any] = {"pools": (SLICES,), "gpu_count_max": 2}
    result = planned(pods(15, {SMALL: 1}), on_sale(one_gpu), **rules)
    assert len(result.purchases) == 2
    assert {type(held.reason) for held in result.deferred} == {GpusLimit}


def test_work_without_gpus_prefers_plain_nodes() -> None:
    """A pod without GPUs uses a plain node if there is one."""
    plain = offer("m5.xlarge", model=None, cpu=4, memory_gib=16, usd_per_hour=0.2)
    result = planned(pod("web", gpus=0), node("n1", slices={SMALL: 56}), node("n2", plain), on_sale(plain))
    (held,) = (each for each in result.deferred if each.subject == "pod/uid-web")
    assert held.reason == CapacityExpected(node="n2", expected_at=None)


# ---- a job's own words


def admitted(
    gpus: GpuRequirements, *pools: NodePool, sold: tuple[Offer, ...] = (offer(), T4)
) -> JobSpec | tuple[Violation, ...]:
    """The job with these requirements, for the offers of the pools."""
    state, under = given(on_sale(*sold)), policy(pools=(WHOLE, *pools))
    return admit(request(gpu_requirements=gpus), event_id="e", at=T0, now=T0, policy=under, supply=supply(state, under))


def rejected(gpus: GpuRequirements, *pools: NodePool) -> Violation:
    """The only violation of a job with these requirements."""
    found = admitted(gpus, *pools)
    assert isinstance(found, tuple)
    (violation,) = found
    return violation


@pytest.mark.parametrize(
    ("gpus", "resource"),
    [
        (GpuRequirements(gpu_count=1, gpu_fraction=0.1), SHARED_GPU_RESOURCE),
        (GpuRequirements(gpu_count=1, gpu_fraction=0.1, gpu_type="A100"), SMALL),
        (GpuRequirements(gpu_count=1, gpu_fraction=0.5), LARGE),
        (GpuRequirements(gpu_count=1, is_shared=True, gpu_memory_gb=6), "nvidia.com/mig-2g.10gb"),
        (GpuRequirements(gpu_count=1, is_shared=True, gpu_memory_gb=4), SHARED_GPU_RESOURCE),
    ],
)
def test_a_job_gets_the_cheapest_sufficient_share(gpus: GpuRequirements, resource: str) -> None:
    """A quarter of a cheap GPU before a slice of an expensive one, and never less than requested."""
    spec = admitted(gpus, MIXED, REPLICAS)
    assert isinstance(spec, JobSpec)
    assert spec.member_resources.slices == ((resource, 1),)
    assert spec.member_resources.gpu_count == 0


def test_a_share_of_unknown_price_is_not_the_cheapest() -> None:
    """An unknown price is not free."""
    unpriced = msgspec.structs.replace(T4, price_micro_usd_per_hour=None)
    spec = admitted(GpuRequirements(gpu_count=1, gpu_fraction=0.1), MIXED, REPLICAS, sold=(offer(), unpriced))
    assert isinstance(spec, JobSpec)
    assert spec.member_resources.slices == ((SMALL, 1),)


def test_an_unavailable_share_is_rejected_with_the_available_ones() -> None:
    """Without a pool with sharing, and with shares that are too small."""
    assert "no pool of the policy shares its GPUs" in rejected(GpuRequirements(gpu_count=1, gpu_fraction=0.5)).reason
    assert "nvidia.com/gpu.shared of T4" in rejected(GpuRequirements(gpu_count=1, gpu_fraction=0.9), REPLICAS).reason
    of_two = rejected(GpuRequirements(gpu_count=2, gpu_fraction=0.5), REPLICAS)
    assert of_two.field == "gpu_requirements.gpu_count"


def test_a_replica_of_the_wrong_size_does_not_fit() -> None:
    """Replicas of every size have one resource name: the job selects the size by label."""
    spec = admitted(GpuRequirements(gpu_count=1, is_shared=True, gpu_memory_gb=4), REPLICAS)
    assert isinstance(spec, JobSpec)
    small = {labels.GPU_SHARE_MEMORY: str(2 * 1024)}
    right = {labels.GPU_SHARE_MEMORY: str(4 * 1024)}
    assert job_shape(spec).demands.node_affinity
    asked = msgspec.structs.replace(spec.member_resources, ephemeral_storage_bytes=0)  # of which stories have none
    waiting = job("j", member_resources=asked, gpu_memory_bytes_min=spec.gpu_memory_bytes_min)
    for shown, is_placed in ((small, False), (right, True)):
        state = given(waiting, node("n1", T4, slices={SHARED_GPU_RESOURCE: 8}, labels=shown))
        assert bool(schedule(state, policy(), T0).placements) is is_placed


# ---- money


def test_slices_add_up_to_the_cost_of_the_gpu() -> None:
    """Seven small slices pay for a GPU; half a GPU costs half."""
    small = Resources(slices=((SMALL, 1),))
    cut = Resources(slices=((SMALL, 7),))
    assert gpu_units(small, cut, 40 * GIBIBYTE) * 7 == gpu_units(cut, cut, 40 * GIBIBYTE)
    halves = Resources(slices=((LARGE, 2),))
    assert gpu_units(Resources(slices=((LARGE, 1),)), halves, None) * 2 == gpu_units(halves, halves, None)
    whole = Resources(gpu_count=8)
    assert gpu_units(Resources(gpu_count=3), whole, None) == 3


@pytest.mark.parametrize(
    ("member", "node", "price"),
    [
        (Resources(gpu_count=2), Resources(gpu_count=8, cpu_milli=96_000), 25),
        (Resources(gpu_count=3, cpu_milli=64_000), Resources(gpu_count=8, cpu_milli=96_000), 38),  # rounded up
        (Resources(cpu_milli=4000), Resources(cpu_milli=16_000), 25),
        (Resources(cpu_milli=4000), Resources(gpu_count=8, cpu_milli=96_000), 0),
        (Resources(cpu_milli=4000), Resources(slices=((SMALL, 7),), cpu_milli=96_000), 0),
        (Resources(gpu_count=2), Resources(cpu_milli=96_000), 100),  # a node whose GPUs are not there yet
        (Resources(), Resources(cpu_milli=16_000), 100),
        (Resources(slices=((SMALL, 1),)), Resources(slices=((SMALL, 7),)), 15),
        (Resources(slices=((LARGE, 1),)), Resources(slices=((SMALL, 4), (LARGE, 1))), 50),
        (Resources(slices=((SMALL, 1),)), Resources(gpu_count=1), 100),  # a node whose GPUs are whole yet
    ],
)
def test_a_member_costs_its_share_of_a_node(member: Resources, node: Resources, price: int) -> None:
    """Of the GPUs, or of the CPUs where there are none; an unknown share costs the whole node."""
    assert member_price(100, member, node, 40 * GIBIBYTE) == price


@pytest.mark.parametrize("is_there", [False, True], ids=["to be bought", "there"])
def test_a_job_on_a_slice_is_estimated_at_its_share(*, is_there: bool) -> None:
    """A seventh of the node's price for an hour."""
    one_gpu, small = offer("one", gpus=1, usd_per_hour=7.0), Resources(slices=((SMALL, 1),), pod_count=1)
    train = job("train", member_resources=small, duration_seconds_max=3600.0)
    there = node("n1", one_gpu, slices={SMALL: 7}, pool="slices") if is_there else ()
    estimate = Estimates(given(there, train, on_sale(one_gpu)), policy(pools=(SLICES,)), T0).of(JobId("train"))
    assert estimate is not None
    assert estimate.cost_micro_usd == 1_000_000


# ---- validation


@pytest.mark.parametrize(
    ("sharing", "says"),
    [
        (GpuSharing(), "either mig_profiles or replicas_count"),
        (GpuSharing(mig_profiles=("1g.5gb",), replicas_count=2), "either mig_profiles or replicas_count"),
        (GpuSharing(mig_profiles=("9g.5gb",)), "unknown profile '9g.5gb'"),
        (GpuSharing(mig_profiles=("3g.20gb", "3g.20gb", "1g.5gb")), "no offered GPU of this pool supports"),
    ],
)
def test_invalid_sharing_is_rejected(sharing: GpuSharing, says: str) -> None:
    """Each violation names the field and valid values."""
    found = policy_violations(policy(pools=(NodePool(name="slices", sharing=sharing),)), (offer(),))
    assert any(says in violation for violation in found)
