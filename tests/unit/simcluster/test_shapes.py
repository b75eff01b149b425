"""Malformed objects are refused with a message; stored ones never stop the controllers."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.kube_objects import READY, Json, binding, budget, eviction, job, node, pod
from tests.unit.simcluster.conftest import Cluster

from gpu_autoscaler.simcluster.answers import ApiRefusal
from gpu_autoscaler.simcluster.kinds import BUDGETS, EVENTS, JOBS, LEASES, NODES, PODS, Kind
from gpu_autoscaler.simcluster.objects import JsonValue, clone
from gpu_autoscaler.simcluster.patch import MERGE, STRATEGIC
from gpu_autoscaler.simcluster.subresources import bind, evict

AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
        ],
    }
}
POLICY = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}},
    ]
}
TOLERATIONS = [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5}]
NODE_STATUS = {"status": node("n")["status"] | READY["status"]}
VALID: list[tuple[Kind, Json]] = [
    (PODS, pod("p", gpus=1, affinity=AFFINITY, tolerations=TOLERATIONS, schedulingGates=[{"name": "g"}])),
    (PODS, pod("p", gpus=1, labels={"app": "a"}, nodeSelector={}, priority=1)),
    (JOBS, job("j", run_seconds=1, podFailurePolicy=POLICY, ttlSecondsAfterFinished=1, activeDeadlineSeconds=9)),
    (NODES, node("n2") | {"spec": {"taints": [{"key": "a", "value": "b", "effect": "NoExecute"}]}}),
    (BUDGETS, budget("b", "a", maxUnavailable="10%")),
    (EVENTS, {"metadata": {"name": "e"}, "lastTimestamp": "2026-11-21T12:00:00Z", "count": 1}),
    (LEASES, {"metadata": {"name": "n", "ownerReferences": []}, "spec": {"holderIdentity": "x"}}),
]
ODDITIES: list[object] = [
    None,
    True,
    0,
    -1,
    10**12,
    0.5,
    "",
    "junk",
    "-5",
    "1e9",
    [],
    [None],
    ["x"],
    {},
    {"x": None},
    {"x": []},
]

JUNK = st.sampled_from(ODDITIES)


def places(value: JsonValue, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every path into a JSON value but the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inner for path in [(*at, key), *places(item, (*at, key))]]


def spoilt(value: Json, path: tuple[str | int, ...], junk: object) -> Json:
    """A copy with junk at the path."""
    copy: Json = clone(value)
    parent: JsonValue = copy
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = clone(junk)
    return copy


def attempt(act: Callable[[], object]) -> None:
    """Do it; a refusal that the client can understand is fine."""
    try:
        act()
    except ApiRefusal as refusal:
        told = refusal.status
    else:
        return
    # A real server answers 500 to a binding without a node (tests/contract/kube/test_objects.py).
    assert 400 <= told["code"] < 500 or told["message"].startswith("target."), told
    assert told["message"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_malformed_objects_never_stop_the_cluster(data: st.DataObject) -> None:
    """Any one invalid field in a new object or a patch: refused or accepted, and the cluster continues."""
    cluster = Cluster()
    cluster.node("n")
    cluster.make(PODS, pod("ours", labels={"app": "a"}))
    kind, body = data.draw(st.sampled_from(VALID))
    body = spoilt(body, data.draw(st.sampled_from(places(body))), data.draw(JUNK))
    namespace = "default" if kind.namespaced else None
    attempt(lambda: cluster.api.create(kind, namespace, body))
    cluster.settle(3)
    for media_type in (MERGE, STRATEGIC):
        attempt(lambda media_type=media_type: cluster.api.patch(NODES, "n", body, media_type))  # type: ignore[misc]
        attempt(lambda media_type=media_type: cluster.api.patch(PODS, "default/ours", body, media_type, status=True))  # type: ignore[misc]
    cluster.node("fresh")
    cluster.make(PODS, pod("fresh", nodeSelector={"kubernetes.io/hostname": "fresh"}))
    cluster.settle(20, step_seconds=5)

    assert cluster.pod("fresh")["status"]["phase"] == "Running"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_malformed_subresource_requests_are_refused(data: st.DataObject) -> None:
    """Evictions, bindings and node statuses with one invalid field."""
    cluster = Cluster()
    cluster.node("n")
    cluster.make(PODS, pod("p"), pod("q", schedulerName="own"))
    cluster.make(BUDGETS, budget("b", "a"))
    cluster.settle(2)
    doors: list[tuple[Json, Callable[[Json], object]]] = [
        (eviction("p", "x"), lambda body: evict(cluster.api, "default/p", body)),
        (binding("q", "n"), lambda body: bind(cluster.api, "default/q", body)),
        (NODE_STATUS, lambda body: cluster.api.patch(NODES, "n", body, STRATEGIC, status=True)),
        (
            {"status": {"currentHealthy": 1, "conditions": [{"type": "a", "status": "b"}]}},
            lambda body: cluster.api.patch(BUDGETS, "default/b", body, MERGE, status=True),
        ),
    ]
    body, act = data.draw(st.sampled_from(doors))
    body = spoilt(body, data.draw(st.sampled_from(places(body))), data.draw(JUNK))
    attempt(lambda: act(body))
    cluster.settle(5)


@pytest.mark.parametrize("body", [None, 1, "x", [], [{}]])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    """400 at every endpoint."""
    cluster = Cluster()
    cluster.make(PODS, pod("p"))
    for act in (
        lambda: cluster.api.create(PODS, "default", body),
        lambda: cluster.api.replace(PODS, "default/p", body),
        lambda: cluster.api.patch(PODS, "default/p", body, MERGE),
        lambda: evict(cluster.api, "default/p", body),
        lambda: bind(cluster.api, "default/p", body),
    ):
        with pytest.raises(ApiRefusal):
            act()
