"""A published plan is small, however much it defers, and every object finds its group."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.accepted import accepted_plan
from tests.support.situations import Situation, situations
from tests.support.stories import MINUTE, T0, given, job, offer, on_sale, pod, policy
from tests.support.zero_quota import AT_RISK, waiting_pods, world

from gpu_autoscaler.core import deferred_groups
from gpu_autoscaler.core.deferred_groups import (
    GROUPS_BYTES_MAX,
    GROUPS_COUNT_MAX,
    grouped,
    like_recorded,
    reason_counts,
    ungrouped,
    without_groups,
)
from gpu_autoscaler.core.explain.differences import differences
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import Deferred, Plan
from gpu_autoscaler.model.reasons.defer import NotYetIdle, OffersUnavailable, VolumeNotReady
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected


def deferred_bytes(made: Plan) -> int:
    """The size of what a plan defers, as JSON."""
    return len(msgspec.json.encode((made.deferred, made.deferred_groups, made.deferred_unlisted)))


def first_by_step(made: Plan) -> dict[tuple[str, str], Deferred]:
    """What a plan defers, the first entry of each step and subject."""
    return {(entry.step, entry.subject): entry for entry in reversed(made.deferred)}


@contextmanager
def limits(**values: Any) -> Iterator[None]:  # noqa: ANN401 - constants of the module
    """Other limits than those of real plans, so that small worlds reach them."""
    with patch.multiple(deferred_groups, **values):
        yield


@pytest.mark.parametrize("pods_count", [700, 10_000])
def test_a_quota_of_zero_makes_a_small_plan(pods_count: int) -> None:
    """One group for all pods; the node under notice is drained; `why` names the reason of each pod."""
    state = given(*world(pods_count))
    made = plan(state, policy(), T0)
    published = grouped(made, state)

    assert [entry.node_name for entry in made.drains] == [AT_RISK]
    assert published.decisions == made.decisions
    assert deferred_bytes(published) < GROUPS_BYTES_MAX
    assert len(published.deferred_groups) <= GROUPS_COUNT_MAX
    assert reason_counts(published) == reason_counts(made)
    status = StatusView.of(state, policy(), T0, published)
    waiting = [uid for uid, entry in state.pods.items() if entry.node_name is None]
    assert len(waiting) == pods_count
    assert all(isinstance(status.planned[f"pod/{uid}"], OffersUnavailable) for uid in waiting)
    assert "385 more" not in pod_line(waiting[-1], status)
    assert "and 387 more" in pod_line(waiting[-1], status)


def test_different_shapes_and_reasons_stay_apart() -> None:
    """Pods that no offer fits and pods without quota are in different groups, with their GPUs."""
    impossible = tuple(pod(f"huge-{number}", gpus=64) for number in range(80))
    state = given(*world(100), *impossible)
    published = grouped(plan(state, policy(), T0), state)

    by_tag = {group.reason.tag(): group for group in published.deferred_groups if group.objects_count > 1}
    assert (by_tag["no_offer_fits"].objects_count, by_tag["no_offer_fits"].gpu_count) == (80, 80 * 64)
    assert by_tag["no_offer_fits"].shape == "64 GPUs, 1 CPU, 4 GiB"
    assert by_tag["no_offer_fits"].subjects == ("pod/uid-huge-0", "pod/uid-huge-1", "pod/uid-huge-10")
    unavailable = by_tag["offers_unavailable"]
    assert (unavailable.objects_count, unavailable.gpu_count) == (101, 101), "with the pod that loses its node"
    assert len(unavailable.members) == 8, "which has a node, so that it is listed"


@settings(max_examples=200, deadline=None)
@for_all(situations(), st.sampled_from([1, 3, 65]))
def test_every_deferred_object_has_exactly_its_own_group(situation: Situation, unlisted_count_min: int) -> None:
    """Grouped and found again, each object has the reasons that the planner gave, whether or not groups list it."""
    state, as_of = situation.state, situation.as_of
    made = plan(state, situation.policy, as_of)
    with limits(UNLISTED_COUNT_MIN=unlisted_count_min):
        published = grouped(made, state)
        found = ungrouped(published, state)
        of_each = StatusView.of(state, situation.policy, as_of, made)
        of_groups = StatusView.of(state, situation.policy, as_of, published)

    assert len(first_by_step(made)) == len(made.deferred)  # each object once in each step
    assert Counter((entry.step, entry.subject) for entry in found) == Counter(first_by_step(made).keys())
    assert {(entry.step, entry.subject): entry for entry in found} == first_by_step(made)
    assert of_groups.planned == of_each.planned
    assert differences(made, published, state) == ()
    assert sum(group.objects_count for group in published.deferred_groups) == len(first_by_step(made))


@settings(max_examples=150, deadline=None)
@for_all(situations())
def test_merged_groups_keep_the_kind_of_reason(situation: Situation) -> None:
    """Where one group for each reason does not fit, objects keep step and tag of their reason."""
    state = situation.state
    made = plan(state, situation.policy, situation.as_of)
    tags = {key: entry.reason.tag() for key, entry in first_by_step(made).items()}
    count = len({(step, tag, subject.partition("/")[0]) for (step, subject), tag in tags.items()})
    with limits(GROUPS_COUNT_MAX=count, UNLISTED_COUNT_MIN=2):
        published = grouped(made, state)
        found = ungrouped(published, state)

    assert {(entry.step, entry.subject): entry.reason.tag() for entry in found} == tags
    expected = Counter(tags.values())
    for held in made.upkeep_deferred:
        expected[held.reason.tag()] += held.objects_count
    assert reason_counts(published) == expected


@settings(max_examples=100, deadline=None)
@for_all(situations(), st.integers(0, 5), st.integers(0, 2_000))
def test_no_limit_loses_an_object_from_the_counts(situation: Situation, groups_max: int, bytes_max: int) -> None:
    """At most the limit of groups and of bytes, and all objects are counted by reason."""
    made = plan(situation.state, situation.policy, situation.as_of)
    with limits(GROUPS_COUNT_MAX=groups_max, GROUPS_BYTES_MAX=bytes_max):
        published = grouped(made, situation.state)

    assert len(published.deferred_groups) <= groups_max
    assert len(msgspec.json.encode(published.deferred_groups)) <= max(bytes_max, 2)
    assert published.decisions == made.decisions
    expected = Counter(entry.reason.tag() for entry in first_by_step(made).values())
    for held in made.upkeep_deferred:
        expected[held.reason.tag()] += held.objects_count
    assert reason_counts(published) == reason_counts(without_groups(published)) == expected


def test_many_different_reasons_share_groups() -> None:
    """A thousand idle nodes with different figures, and ten thousand pods that expect a thousand nodes, fit."""
    state = given(*waiting_pods(10_000))
    uids = list(state.pods)
    idle = [
        Deferred(
            step="release_idle", subject=f"node/n{number}", reason=NotYetIdle(idle_seconds=number, idle_seconds_max=9e9)
        )
        for number in range(1_000)
    ]
    expected = [
        Deferred(
            step="cover_demand",
            subject=f"pod/{uid}",
            reason=CapacityExpected(node=f"a{number // 8}", expected_at=T0 + timedelta(seconds=number)),
        )
        for number, uid in enumerate(uids)
    ]
    made = Plan(as_of=T0, parent_sequence=0, deferred=(*idle, *expected))
    published = grouped(made, state)

    assert deferred_bytes(published) <= GROUPS_BYTES_MAX
    assert [group.reasons_count for group in published.deferred_groups] == [1_000, 10_000]
    status = StatusView.of(state, policy(), T0, published)
    assert all(isinstance(status.planned[f"pod/{uid}"], CapacityExpected) for uid in uids)
    assert "one of 10000 objects" in pod_line(uids[-1], status)


def test_more_shapes_than_groups_share_one() -> None:
    """Three hundred shapes with one reason are one group; its pods are found."""
    pods = tuple(pod(f"p{number}", cpu=1 + number) for number in range(300))
    state = given(*pods)
    reason = NodesLimit(nodes_count=1, nodes_count_max=1)
    deferred = tuple(Deferred(step="cover_demand", subject=f"pod/{uid}", reason=reason) for uid in state.pods)
    published = grouped(Plan(as_of=T0, parent_sequence=0, deferred=deferred), state)

    (group,) = published.deferred_groups
    assert (group.objects_count, group.shape) == (300, "")
    assert set(ungrouped(published, state)) == set(deferred)


def test_a_pod_that_came_after_the_plan_is_in_no_group() -> None:
    """Its shape is that of a group without a list of members, and its waiting began later."""
    before = given(*world(100))
    published = grouped(plan(before, policy(), T0), before)
    after = given(*world(100), pod("late", at=T0 + MINUTE))

    assert pod_line("late", StatusView.of(after, policy(), T0 + MINUTE, published)).endswith(
        "no plan covers the pod yet."
    )


def test_beyond_all_lists_the_largest_group_of_the_shape_explains() -> None:
    """30,000 pods of one shape for two reasons: no list fits, and each pod still has one of the two."""
    state = given(*waiting_pods(30_000))
    reasons = (NodesLimit(nodes_count=1, nodes_count_max=1), VolumeNotReady(detail="claim default/data does not exist"))
    deferred = tuple(
        Deferred(step="cover_demand", subject=f"pod/{uid}", reason=reasons[number % 3 == 0])
        for number, uid in enumerate(state.pods)
    )
    published = grouped(Plan(as_of=T0, parent_sequence=0, deferred=deferred), state)

    assert deferred_bytes(published) <= GROUPS_BYTES_MAX
    assert reason_counts(published) == {"nodes_limit": 20_000, "volume_not_ready": 10_000}
    assert len(ungrouped(published, state)) == 30_000


def test_a_plan_of_the_last_release_is_explained() -> None:
    """It names each object, and has no groups."""
    state = given(*world(3))
    made = plan(state, policy(), T0)
    recorded = msgspec.json.decode(msgspec.json.encode(made), type=Plan)

    assert ungrouped(recorded, state) == recorded.deferred == made.deferred
    assert like_recorded(made, recorded, state) is made
    assert like_recorded(made, grouped(made, state), state) == grouped(made, state)
    assert like_recorded(made, without_groups(grouped(made, state)), state) == without_groups(grouped(made, state))


def test_grouping_does_not_depend_on_the_order_of_the_state() -> None:
    """Equal plans have equal groups, byte for byte."""
    stories = [*world(100), job("train", members=2)]
    state = given(*stories)
    mixed = msgspec.structs.replace(state, pods=dict(reversed(list(state.pods.items()))))
    made = accepted_plan(state, policy(), T0)
    assert msgspec.json.encode(grouped(made, mixed)) == msgspec.json.encode(grouped(made, state))


def test_reasons_list_their_first_names() -> None:
    """Five names and a number, however many offers are refused or without a price."""
    state = given(*world(1))
    made = plan(state, policy(), T0)
    (reason,) = {entry.reason for entry in made.deferred if isinstance(entry.reason, OffersUnavailable)}
    assert (len(reason.offers), reason.offers_unlisted_count) == (5, 385)
    unpriced = [offer(f"t{number}", usd_per_hour=None) for number in range(30)]
    state = given(on_sale(*unpriced), pod("a"))
    (unknown,) = plan(state, policy(), T0).deferred
    assert unknown.reason.sentence().startswith(
        "The price of t0/zone-a/spot, t1/zone-a/spot, t10/zone-a/spot and 27 more"
    )
