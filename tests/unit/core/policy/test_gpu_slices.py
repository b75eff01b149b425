"""Pods that share GPUs, by MIG slices or replicas: they find room, are bought for, and pay for their part."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from tests.support.stories import T0, Story, given, job, node, offer, on_sale, pod, policy, request

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.sources import job_shape
from gpu_autoscaler.core.intake.admission import admit, supply
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.gpu_slices import GpuSharing, gpu_units
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.jobs import GpuRequirements, JobSpec, Violation
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer import NoOfferFits
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.resources import SHARED_GPU_RESOURCE, Resources
from gpu_autoscaler.simcluster.device_plugin import shown_gpus

SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"
T4 = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
WHOLE = NodePool(name="whole")
SLICES = NodePool(name="slices", gpu_models=("A100",), sharing=GpuSharing(mig_profiles=("1g.5gb",) * 7))
MIXED = NodePool(name="mixed", sharing=GpuSharing(mig_profiles=("3g.20gb", "2g.10gb", "1g.5gb")))
REPLICAS = NodePool(name="replicas", gpu_models=("T4",), sharing=GpuSharing(replicas_count=4))


def planned(*stories: Story, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan, which the second opinion must find nothing wrong with."""
    state, under = given(*stories), policy(**rules)
    made = plan(state, under, T0)
    assert check(made, state, under) == ()
    return made


def bought(made: Plan) -> list[BuyNode]:
    """The nodes that are bought."""
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


def pods(count: int, slices: Mapping[str, int], **more: Any) -> Story:  # noqa: ANN401 - fields of the pod
    """Equal pods that ask for slices."""
    return tuple(told for number in range(count) for told in pod(f"p{number}", slices=slices, **more))


def test_a_slice_is_no_whole_gpu() -> None:
    """Room for slices takes no pod that asks for a GPU, and whole GPUs no pod that asks for a slice."""
    cut = node("n1", slices={SMALL: 56})
    made = planned(cut, pod("whole", gpus=1), on_sale(), pools=(WHOLE,))
    assert [decision.reason.demand for decision in bought(made)] == [("pod/uid-whole",)]  # type: ignore[union-attr]
    made = planned(node("n1"), pods(1, {SMALL: 1}), on_sale(), pools=(WHOLE,))
    assert [held.reason for held in made.deferred] == [NoOfferFits(detail=f"no pool cuts GPUs into {SMALL}")]


def test_slices_that_are_there_are_filled_before_any_is_bought() -> None:
    """Seven pods run on one cut GPU, an eighth is bought for."""
    one_gpu = offer("one", gpus=1)
    there = node("n1", one_gpu, slices={SMALL: 7}, pool="slices")
    running = tuple(told for number in range(6) for told in pod(f"r{number}", on="n1", slices={SMALL: 1}))
    assert bought(planned(there, running, pods(1, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,))) == []
    assert len(bought(planned(there, running, pods(2, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,)))) == 1


def test_a_pool_sells_what_it_cuts_gpus_into() -> None:
    """Fifteen small slices take three GPUs of seven; the order names what the operator on the node is to do."""
    one_gpu = offer("one", gpus=1)
    made = bought(planned(pods(15, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,)))
    assert [decision.slices for decision in made] == [((SMALL, 7),)] * 3
    assert {dict(decision.labels)[labels.MIG_CONFIG] for decision in made} == {"all-1g.5gb"}


def test_slices_of_several_sizes_come_from_one_gpu() -> None:
    """A GPU cut into three sizes serves a pod of each: one node, not three."""
    one_gpu = offer("one", gpus=1)
    sizes = ("1g.5gb", "2g.10gb", "3g.20gb")
    waiting = tuple(told for size in sizes for told in pod(size, slices={f"nvidia.com/mig-{size}": 1}))
    assert len(bought(planned(waiting, on_sale(one_gpu), pools=(MIXED,)))) == 1


@pytest.mark.parametrize("pool", [SLICES, MIXED, REPLICAS])
def test_the_operator_makes_of_the_labels_what_was_promised(pool: NodePool) -> None:
    """The simulated device plugin reads the order's labels alone, and shows what the plan counts on."""
    of, resource = (T4, SHARED_GPU_RESOURCE) if pool is REPLICAS else (offer(), SMALL)
    (decision,) = bought(planned(pods(1, {resource: 1}), on_sale(of), pools=(pool,)))
    shown = shown_gpus(of.resources.gpu_count, of.gpu_model, of.gpu_memory_bytes, dict(decision.labels))
    assert {name: int(count) for name, count in shown.items() if count != "0"} == dict(decision.promised.slices)


def test_what_boots_is_not_bought_again_and_is_not_ready_before_it_is_cut() -> None:
    """A node whose GPUs still show whole is on its way: its slices are promised, and wait for the operator."""
    one_gpu = offer("one", gpus=1)
    booting = node("n1", one_gpu, slices={SMALL: 7}, pool="slices")
    told = booting[-1]
    uncut = told.fact.__class__(
        **{name: getattr(told.fact, name) for name in told.fact.__struct_fields__} | {"allocatable": one_gpu.resources}
    )
    state_story = (*booting[:-1], type(told)(uncut, told.at))
    made = planned(state_story, pods(7, {SMALL: 1}), on_sale(one_gpu), pools=(SLICES,))
    assert bought(made) == []
    assert {type(held.reason) for held in made.deferred} == {CapacityExpected}


def test_limits_count_gpus_that_are_paid_for() -> None:
    """Seven slices of a GPU are one GPU to every limit."""
    one_gpu = offer("one", gpus=1)
    rules: dict[str, Any] = {"pools": (SLICES,), "gpu_count_max": 2}
    made = planned(pods(15, {SMALL: 1}), on_sale(one_gpu), **rules)
    assert len(bought(made)) == 2
    assert {type(held.reason) for held in made.deferred} == {GpusLimit}


def test_work_without_gpus_does_not_ride_on_slices_alone() -> None:
    """A pod that asks for no GPU takes a plain node where there is one, not one whose slices wait for others."""
    plain = offer("m5.xlarge", model=None, cpu=4, memory_gib=16, usd_per_hour=0.2)
    made = planned(pod("web", gpus=0), node("n1", slices={SMALL: 56}), node("n2", plain), on_sale(plain))
    (held,) = (each for each in made.deferred if each.subject == "pod/uid-web")
    assert held.reason == CapacityExpected(node="n2", expected_at=None)


# ---- a job's own words


def admitted(
    gpus: GpuRequirements, *pools: NodePool, sold: tuple[Offer, ...] = (offer(), T4)
) -> JobSpec | tuple[Violation, ...]:
    """The job with these wishes where the pools have this for sale."""
    state, under = given(on_sale(*sold)), policy(pools=(WHOLE, *pools))
    return admit(
        request(gpu_requirements=gpus),
        event_id="e",
        at=T0,
        now=T0,
        policy=under,
        supply=supply(state, under),
    )


def refused(gpus: GpuRequirements, *pools: NodePool) -> Violation:
    """The one mistake of a job with these wishes."""
    found = admitted(gpus, *pools)
    assert isinstance(found, tuple)
    (mistake,) = found
    return mistake


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
def test_a_job_is_given_the_cheapest_part_that_is_enough(gpus: GpuRequirements, resource: str) -> None:
    """A quarter of a cheap GPU before a slice of a dear one, and never less than was asked for."""
    spec = admitted(gpus, MIXED, REPLICAS)
    assert isinstance(spec, JobSpec)
    assert spec.member_resources.slices == ((resource, 1),)
    assert spec.member_resources.gpu_count == 0


def test_a_part_of_no_known_price_is_not_the_cheapest_one() -> None:
    """Of a GPU that nobody can buy, as its price is unknown: the job would wait for ever for what is not free."""
    unpriced = msgspec.structs.replace(T4, price_micro_usd_per_hour=None)
    spec = admitted(GpuRequirements(gpu_count=1, gpu_fraction=0.1), MIXED, REPLICAS, sold=(offer(), unpriced))
    assert isinstance(spec, JobSpec)
    assert spec.member_resources.slices == ((SMALL, 1),)


def test_a_part_that_nobody_has_is_refused_with_what_there_is() -> None:
    """Without a pool that shares, and with one whose parts are too small."""
    assert "no pool of the policy shares its GPUs" in refused(GpuRequirements(gpu_count=1, gpu_fraction=0.5)).reason
    assert "nvidia.com/gpu.shared of T4" in refused(GpuRequirements(gpu_count=1, gpu_fraction=0.9), REPLICAS).reason
    of_two = refused(GpuRequirements(gpu_count=2, gpu_fraction=0.5), REPLICAS)
    assert of_two.field == "gpu_requirements.gpu_count"


def test_a_replica_that_is_too_small_is_not_taken_for_one_that_is_enough() -> None:
    """Replicas are called alike whatever their size: the job insists on the size that it was given."""
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


def test_a_slice_costs_its_part_and_all_slices_the_whole() -> None:
    """Seven small slices pay for a GPU; half of a GPU is half of it, whatever slices stay free."""
    small = Resources(slices=((SMALL, 1),))
    cut = Resources(slices=((SMALL, 7),))
    assert gpu_units(small, cut, 40 * GIBIBYTE) * 7 == gpu_units(cut, cut, 40 * GIBIBYTE)
    halves = Resources(slices=((LARGE, 2),))
    assert gpu_units(Resources(slices=((LARGE, 1),)), halves, None) * 2 == gpu_units(halves, halves, None)
    whole = Resources(gpu_count=8)
    assert gpu_units(Resources(gpu_count=3), whole, None) == 3


# ---- what cannot be meant


@pytest.mark.parametrize(
    ("sharing", "says"),
    [
        (GpuSharing(), "either mig_profiles or replicas_count"),
        (GpuSharing(mig_profiles=("1g.5gb",), replicas_count=2), "either mig_profiles or replicas_count"),
        (GpuSharing(mig_profiles=("9g.5gb",)), "no profile '9g.5gb'"),
        (GpuSharing(mig_profiles=("3g.20gb", "3g.20gb", "1g.5gb")), "no GPU for sale in this pool can be cut"),
    ],
)
def test_a_pool_that_shares_in_no_possible_way_is_refused(sharing: GpuSharing, says: str) -> None:
    """Each mistake names the field and what there is."""
    found = mistakes(policy(pools=(NodePool(name="slices", sharing=sharing),)), (offer(),))
    assert any(says in mistake for mistake in found)
