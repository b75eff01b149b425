"""A job to which several GPU models will do, the best first: asked for, bought, placed, and bound."""

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, TimedFact, given, job, node, offer, on_sale, policy, record, request

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.story import PastDeferrals, StoryBuilder
from gpu_autoscaler.core.intake.admission import Supply, admit
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.jobs import GpuRequirements, JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler_services.cli.jobs import Request
from gpu_autoscaler_services.scheduler.manifest import release_patch

A100, H100, L40S = (
    offer(f"{model.lower()}.8x", model=model, capacity_type=CapacityType.ON_DEMAND, usd_per_hour=20.0)
    for model in ("A100", "H100", "L40S")
)


def asked(*models: str) -> JobSpec:
    """The job that a request for these models becomes."""
    said = request("a", gpu_requirements=GpuRequirements(gpu_count=8, gpu_type=models))
    known = Supply(gpu_models=frozenset({"A100", "H100", "L40S"}), gpus_per_node_max=8)
    spec = admit(said, event_id="e", at=T0, now=T0, policy=policy(), supply=known)
    assert isinstance(spec, JobSpec)
    return spec


def made(*stories: Story) -> Plan:
    """The plan of now; the plan check has nothing against it."""
    state = given(*stories)
    return accepted_plan(state, policy(), T0)


def bought(*stories: Story) -> BuyNode:
    """The one node that is bought."""
    (buy,) = (each for each in made(*stories).decisions if isinstance(each, BuyNode))
    return buy


def test_a_list_of_one_is_a_name_and_a_name_twice_is_one() -> None:
    """Any way that a model is written is the same model; several stay in their order."""
    assert (asked("nvidia-h100", "H100").gpu_model, asked("H100").gpu_models) == ("H100", ())
    assert (asked("H100", "A100").gpu_model, asked("H100", "A100").gpu_models) == (None, ("H100", "A100"))
    assert asked("H100", "A100").models == ("H100", "A100")


def test_on_the_wire_a_name_and_a_list_are_both_right() -> None:
    """What was written before lists were known means what it meant."""
    for said, types in (('"A100"', ("A100",)), ('["H100", "A100"]', ("H100", "A100")), ("null", ())):
        body = f'{{"gpu_count": 1, "gpu_type": {said}}}'
        assert msgspec.json.decode(body, type=GpuRequirements).gpu_types == types


@pytest.mark.parametrize(("models", "best"), [(("H100", "A100"), H100), (("A100", "H100"), A100), (("L40S",), L40S)])
def test_of_equal_cost_the_first_named_is_bought(models: tuple[str, ...], best: object) -> None:
    """The order decides where the price does not; another model is not bought at all."""
    spec = asked(*models)
    buy = bought(job("a", gpu_models=spec.gpu_models, model=spec.gpu_model), on_sale(A100, H100, L40S))

    assert buy.offer == best
    assert isinstance(buy.reason, UnmetDemand)
    assert buy.reason.dropped == ()


def test_the_cheapest_accepted_model_is_bought_and_the_preferred_one_is_reported() -> None:
    """H100 first, but A100 costs less: the purchase says what would have kept the order."""
    dear = msgspec.structs.replace(H100, price_micro_usd_per_hour=30_000_000)
    buy = bought(job("a", gpu_models=("H100", "A100")), on_sale(A100, dear, L40S))

    assert buy.offer == A100
    assert isinstance(buy.reason, UnmetDemand)
    assert [(each.preference, each.kept_by) for each in buy.reason.dropped] == [("GPU model H100 first", dear.key)]


def test_on_nodes_that_are_there_the_best_model_is_taken() -> None:
    """Both are free: the job gets the one that it named first, and never one that it did not name."""
    nodes = (node("n1", A100), node("n2", H100), node("n3", L40S))

    def placed(*models: str) -> list[tuple[str, ...]]:
        state = given(*nodes, job("a", gpu_models=models))
        return [each.node_names for each in schedule(state, policy(), T0).placements]

    assert placed("H100", "A100") == [("n2",)]
    assert placed("A100", "H100") == [("n1",)]
    assert placed("L4", "T4") == []


def test_a_purchase_of_another_model_is_a_violation() -> None:
    """The plan check sees a node that will not do for its job."""
    state = given(job("a", gpu_models=("H100", "A100")), on_sale(A100, H100, L40S))
    plan_now = plan(state, policy(), T0)
    (buy,) = plan_now.decisions
    wrong = msgspec.structs.replace(plan_now, decisions=(msgspec.structs.replace(buy, offer=L40S),))

    assert any("accepts only A100, H100" in each for each in check(wrong, state, policy()))


def test_a_purchase_of_the_second_model_at_the_price_of_the_first_is_a_violation() -> None:
    """The order that the job gave decides where nothing else does."""
    state = given(job("a", gpu_models=("H100", "A100")), on_sale(A100, H100, L40S))
    plan_now = plan(state, policy(), T0)
    (buy,) = plan_now.decisions
    wrong = msgspec.structs.replace(plan_now, decisions=(msgspec.structs.replace(buy, offer=A100),))

    assert check(wrong, state, policy()) == (f"{A100.key} is bought for job a, and {H100.key} is preferred",)


def test_the_pods_may_be_on_any_of_the_models_and_like_the_best() -> None:
    """Required is one of them; what is liked, after the nodes of the placement, is the first."""
    spec = msgspec.structs.replace(asked("H100", "A100"), within=None)
    patch = release_patch(spec, ("n2",), given(node("n2", H100)))
    affinity = patch["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    liked = affinity["preferredDuringSchedulingIgnoredDuringExecution"]

    assert required[0]["matchExpressions"][0]["values"] == ["A100", "H100"]
    assert [(each["weight"], each["preference"]["matchExpressions"][0]["values"]) for each in liked] == [
        (100, ["n2"]),
        (50, ["H100"]),
    ]


def test_the_command_line_takes_names_between_commas() -> None:
    """One name stays a name, so that an older gateway understands it."""
    assert Request(gpu_type="A100").body({}, ())["gpu_requirements"]["gpu_type"] == "A100"
    assert Request(gpu_type="H100, A100").body({}, ())["gpu_requirements"]["gpu_type"] == ["H100", "A100"]


def test_the_story_of_a_request_names_all_models() -> None:
    """The sentence shows every acceptable model."""
    requested = request("a", gpu_requirements=GpuRequirements(gpu_count=8, gpu_type=("H100", "A100")))
    builder = StoryBuilder(frozenset({"job/a"}), lambda key: key, PastDeferrals((), frozenset()))

    (recorded,) = record([TimedFact(requested, T0)])
    assert any("8 H100 or A100 GPUs" in sentence for sentence in builder.sentences(recorded))
