"""What a pod requires of the pods near it, as Kubernetes writes it and as facts carry it."""

import json
from typing import Any

from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.model.scheduling import (
    AffinityPreference,
    AffinitySelector,
    LabelRequirement,
    NodePreference,
    NodeSelectorTerm,
    PodGroup,
    Preferences,
    Spread,
)

ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
WEB = {"matchLabels": {"app": "web"}}
IS_WEB = LabelRequirement("app", "In", ("web",))


def observed(**spec: Any) -> PodObserved:  # noqa: ANN401 - JSON
    """A pod with labels in namespace `shop`, as the watcher tells it."""
    metadata = {
        "name": "web-0",
        "namespace": "shop",
        "uid": "u1",
        "resourceVersion": "7",
        "creationTimestamp": "2026-11-21T00:00:00Z",
        "labels": {"app": "web", "hash": "h1"},
    }
    body = {"metadata": metadata, "spec": {"containers": [], **spec}, "status": {"phase": "Pending"}}
    return pod_observed(PODS.decode(json.dumps(body).encode(), "this pod of the"), epoch=1)


def test_a_required_spread_is_read_and_a_preferred_one_is_not() -> None:
    """The label named by matchLabelKeys distinguishes revisions."""
    hard = {"topologyKey": ZONE, "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": WEB}
    soft = {**hard, "whenUnsatisfiable": "ScheduleAnyway"}
    few = {"minDomains": 3, "matchLabelKeys": ["hash"]}
    untainted = {**hard, "nodeTaintsPolicy": "Honor"}
    said = observed(topologySpreadConstraints=[{**hard, **few}, soft, untainted]).pod_affinity

    group = PodGroup(namespaces=("shop",), requirements=(IS_WEB, LabelRequirement("hash", "In", ("h1",))))
    every = PodGroup(namespaces=("shop",), requirements=(IS_WEB,))
    assert said is not None
    assert said.spreads == (
        Spread(topology_key=ZONE, group=group, skew_count_max=2, domains_count_min=3),
        Spread(topology_key=ZONE, group=every, skew_count_max=2, is_over_tainted_nodes=False),
    )


def test_required_affinity_and_anti_affinity_are_read() -> None:
    """The pod's own namespace unless others are named; those chosen by their labels are read as all of them."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    near = {"topologyKey": ZONE, "labelSelector": WEB, "namespaces": ["b", "a"]}
    far = {"topologyKey": HOST, "labelSelector": WEB}
    everywhere = {**far, "namespaceSelector": {"matchLabels": {"team": "x"}}}
    wishes = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": near}]}
    said = observed(
        affinity={"podAffinity": {required: [near], **wishes}, "podAntiAffinity": {required: [far, everywhere]}}
    ).pod_affinity

    assert said is not None
    assert said.together == (
        AffinitySelector(topology_key=ZONE, group=PodGroup(namespaces=("a", "b"), requirements=(IS_WEB,))),
    )
    assert said.apart == (
        AffinitySelector(topology_key=HOST, group=PodGroup(namespaces=("shop",), requirements=(IS_WEB,))),
        AffinitySelector(topology_key=HOST, group=PodGroup(namespaces=(), requirements=(IS_WEB,))),
    )


def test_a_pod_without_affinity_has_no_topology() -> None:
    """Most pods do not."""
    assert observed().pod_affinity is None


def test_alternative_gpu_models_are_read_in_the_pods_order() -> None:
    """Alternatives of an affinity, or several values of one; an alternative without a model allows every model."""

    def term(*products: str) -> dict[str, object]:
        return {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": products}]}

    def asking(*terms: dict[str, object]) -> PodObserved:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        return observed(affinity={"nodeAffinity": required})

    several = asking(term("NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-40GB"), term("Tesla-T4"))
    one = asking(term("Tesla-T4"))
    free = asking(term("Tesla-T4"), {"matchExpressions": [{"key": "disk", "operator": "Exists"}]})

    assert (several.gpu_model, several.gpu_models) == (None, ("H100", "A100", "T4"))
    assert (one.gpu_model, one.gpu_models) == ("T4", ())
    assert (free.gpu_model, free.gpu_models) == (None, ())


def test_preferences_are_read_with_their_weights() -> None:
    """Preferred nodes, near and far pods, and an even spread that may be broken; an empty term is about nothing."""
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    is_a = {"key": ZONE, "operator": "In", "values": ["a"]}
    nodes = [{"weight": 30, "preference": {"matchExpressions": [is_a]}}, {"weight": 9, "preference": {}}]
    near = {"topologyKey": ZONE, "labelSelector": WEB}
    soft = {"topologyKey": ZONE, "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": WEB}
    said = observed(
        affinity={
            "nodeAffinity": {preferred: nodes},
            "podAffinity": {preferred: [{"weight": 5, "podAffinityTerm": near}]},
            "podAntiAffinity": {preferred: [{"weight": 7, "podAffinityTerm": {**near, "topologyKey": HOST}}]},
        },
        topologySpreadConstraints=[soft],
    )

    shop = PodGroup(namespaces=("shop",), requirements=(IS_WEB,))
    assert said.pod_affinity is None
    assert said.preferences == Preferences(
        nodes=(NodePreference(weight=30, term=NodeSelectorTerm((LabelRequirement(ZONE, "In", ("a",)),))),),
        spreads=(Spread(topology_key=ZONE, group=shop, skew_count_max=2),),
        apart=(AffinityPreference(weight=7, selector=AffinitySelector(topology_key=HOST, group=shop)),),
        together=(AffinityPreference(weight=5, selector=AffinitySelector(topology_key=ZONE, group=shop)),),
    )
    assert observed().preferences is None
