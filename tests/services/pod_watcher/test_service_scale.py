"""Ten thousand pods deleted at once: one by one and by a list, through fold to the plan."""

import json
import time
from collections.abc import Sequence

import pytest
from tests.support.accepted import accepted_plan
from tests.support.kube_objects import pod as pod_json
from tests.support.stories import EPOCH, MINUTE, T0, TimedFact, given, node, on_sale, policy, record
from tests.support.watch_items import listed

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import PODS, Cluster, Deleted
from gpu_autoscaler.kube.wire.core import Pod
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

PODS_COUNT, NODES_COUNT = 10_000, 100
# A deletion is published and folded in well under a millisecond; ten times that is acceptable.
SECONDS_MAX = 100.0


@pytest.fixture
def watcher() -> PodWatcher:
    """A watcher that is handed its items; it never calls its client."""
    kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: T0)
    return PodWatcher(kube, Cluster(installation="uid", epoch=EPOCH))


def pods() -> list[Pod]:
    """Return pods without an end, spread over all nodes."""
    found = []
    for number in range(PODS_COUNT):
        item = pod_json(f"p{number}", nodeName=f"n{number % NODES_COUNT}")
        item["metadata"] |= {
            "uid": f"uid-{number}",
            "namespace": "default",
            "resourceVersion": str(number + 1),
            "creationTimestamp": "2026-11-21T11:00:00Z",
        }
        item["status"] = {"phase": "Running"}
        found.append(PODS.decode(json.dumps(item).encode(), "read"))
    return found


@pytest.mark.parametrize("is_watched", [True, False])
async def test_ten_thousand_pods_are_deleted_at_once(watcher: PodWatcher, is_watched: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Each end is published once, or the list shows all; nothing is bought."""
    all_pods = pods()
    facts: list[Fact] = list(await watcher.on_item(listed(PODS, *all_pods, version=PODS_COUNT)))
    nodes = [node(f"n{number}") for number in range(NODES_COUNT)]
    before = given(*nodes, on_sale(), tuple(TimedFact(fact, T0) for fact in facts), is_synced=False)
    assert len(before.pods) == PODS_COUNT

    began_at, at = time.monotonic(), T0 + MINUTE
    ends: list[Fact] = []
    if is_watched:
        for number, pod in enumerate(all_pods):
            ends += await watcher.on_item(Deleted(kind=PODS, object=pod, seen_at=at))
            assert number > 3 or isinstance(ends[0], PodGone)
        assert sum(isinstance(fact, PodGone) for fact in ends) == PODS_COUNT
    ends += await watcher.on_item(listed(PODS, version=PODS_COUNT * 3, at=at))
    after = fold(before, record(_recorded_at(ends, at)))
    assert after.pods == {}
    made = accepted_plan(after, policy(), at)
    assert not made.purchases
    assert time.monotonic() - began_at < SECONDS_MAX


def _recorded_at(facts: Sequence[Fact], at: object) -> list[TimedFact]:
    return [TimedFact(fact, at) for fact in facts]  # type: ignore[arg-type]
