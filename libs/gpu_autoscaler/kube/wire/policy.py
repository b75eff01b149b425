"""`AutoscalingPolicy` (`gpu-autoscaler.io/v1alpha1`), as it is on the wire: the CRD is written from these structs.

Percent and camel case end at this door: `kube/translate/policy.py` makes facts of it. `contracts/policy_crd.py` writes the
schema, so that every range below is also the API server's. Nothing but a pool's name has to be said: what a policy
leaves out stays as the policy file has it. Source of the names: CHECKLIST S135, S43.
"""

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.kube.wire import core

GROUP, VERSION, KIND, PLURAL = "gpu-autoscaler.io", "v1alpha1", "AutoscalingPolicy", "autoscalingpolicies"
DEFINITION = f"{PLURAL}.{GROUP}"
PATH = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
DEFINITION_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{DEFINITION}"

POOLS_COUNT_MAX = 64
_Share = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[int, Meta(ge=0, le=604_800)]
_Count = Annotated[int, Meta(ge=0, le=100_000)]
_Percentage = Annotated[int, Meta(ge=0, le=100)]
_Words = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=63)], ...],
    Meta(max_length=64),
]
CapacityChoice = Literal["spot", "on-demand", "reserved", "mixed"]


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """camelCase names, unknown fields ignored."""


class PoolSpec(_Wire, frozen=True, kw_only=True):
    """A group of nodes that are bought alike. Empty lists allow everything that is for sale."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=63,
            pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            description="Name of the pool. No other policy may use it.",
        ),
    ]
    min_size: Annotated[_Count, Meta(description="Nodes that are kept at least.")] = 0
    max_size: Annotated[_Count | None, Meta(description="Nodes at most; left out: as many as maxNodes.")] = None
    gpu_type: Annotated[
        Annotated[str, Meta(max_length=63)] | None,
        Meta(description="GPU model, as A100 or NVIDIA-A100-SXM4-80GB; left out: any."),
    ] = None
    instance_types: Annotated[_Words, Meta(description="Instance types that are allowed; empty: all.")] = ()
    capacity_type: Annotated[
        CapacityChoice, Meta(description="What may be bought; mixed: by the shares of the cluster.")
    ] = "mixed"
    spot_percentage: Annotated[
        _Percentage | None,
        Meta(description="Share of spot of a mixed pool, weighed by maxSize into that of the cluster."),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)], Meta(description="Pools of higher priority are asked first.")
    ] = 0
    labels: Annotated[
        dict[str, Annotated[str, Meta(max_length=63)]], Meta(max_length=32, description="Labels of its nodes.")
    ] = {}
    availability_zones: Annotated[_Words, Meta(description="Zones that are allowed; empty: all.")] = ()


class PolicySpec(_Wire, frozen=True, kw_only=True):
    """Pools of nodes and thresholds. What is left out stays as the policy file has it."""

    enabled: Annotated[
        bool, Meta(description="Off: nothing is bought for its pools, and none of their nodes goes.")
    ] = True
    provider: Annotated[
        Literal["aws", "gcp", "azure", "karpenter", "sim"] | None,
        Meta(description="Cloud that it is meant for; with another one it is refused."),
    ] = None
    scale_up_threshold: Annotated[_Share | None, Meta(description="Use of all GPUs that counts as high.")] = None
    scale_down_threshold: Annotated[_Share | None, Meta(description="Use of a node's GPUs that counts as low.")] = None
    scale_up_cooldown_seconds: Annotated[_Seconds | None, Meta(description="Between two purchases.")] = None
    scale_down_cooldown_seconds: Annotated[
        _Seconds | None, Meta(description="A node stays at least so long after it became usable.")
    ] = None
    pending_pod_timeout_seconds: Annotated[
        _Seconds | None, Meta(description="A pod waits so long at most for room that running work gives back.")
    ] = None
    min_nodes: Annotated[_Count, Meta(description="Nodes of all its pools together at least.")] = 0
    max_nodes: Annotated[_Count | None, Meta(description="Nodes of all its pools together at most.")] = None
    spot_instance_percentage: Annotated[
        _Percentage | None, Meta(description="Share of spot of the cluster's GPUs.")
    ] = None
    enable_spot_instances: Annotated[bool, Meta(description="Off: no spot in its pools.")] = True
    enable_multi_tier_scaling: Annotated[
        bool | None, Meta(description="Off: no share of reserved capacity beside spot and on-demand.")
    ] = None
    enable_predictive_scaling: Annotated[
        bool | None, Meta(description="Demand is foreseen, and bought for ahead once that proves right.")
    ] = None
    node_pools: Annotated[
        tuple[PoolSpec, ...],
        Meta(min_length=1, max_length=POOLS_COUNT_MAX, description="Where nodes may be bought, by priority."),
    ]


class PolicyCondition(_Wire, frozen=True, kw_only=True):
    """One thing that is true or false of it. Source: Kubernetes API conventions, "Typical status properties"."""

    type: Annotated[str, Meta(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: datetime
    observed_generation: int = 0


class PoolStatus(_Wire, frozen=True, kw_only=True):
    """What there is of a pool."""

    name: str
    nodes: Annotated[int, Meta(description="Nodes that take work.")] = 0
    pending: Annotated[int, Meta(description="Nodes that are ordered or boot.")] = 0
    leaving: Annotated[int, Meta(description="Nodes that are drained or ended.")] = 0
    gpus: Annotated[int, Meta(description="GPUs of the nodes that take work.")] = 0


class PolicyStatus(_Wire, frozen=True, kw_only=True):
    """What became of the policy. Written by gpu-autoscaler alone."""

    observed_generation: Annotated[int, Meta(description="The spec that the rest of this is about.")] = 0
    generation_in_force: Annotated[
        int | None, Meta(description="The spec that is decided by; left out: none of this policy.")
    ] = None
    in_force: Annotated[PolicySpec | None, Meta(description="That spec, if it is an older one.")] = None
    nodes: Annotated[int, Meta(description="Nodes of its pools that take work.")] = 0
    nodes_pending: Annotated[int, Meta(description="Nodes that are ordered or boot.")] = 0
    nodes_desired: Annotated[int, Meta(description="Those that take work and those that come.")] = 0
    gpus: Annotated[int, Meta(description="GPUs of the nodes that take work.")] = 0
    spot_percentage: Annotated[
        int | None, Meta(description="Share of spot among the nodes that take work; left out: there are none.")
    ] = None
    price_usd_per_hour: Annotated[
        str | None, Meta(description="Of all its nodes; left out: the price of one is not known.")
    ] = None
    spent_today_usd: Annotated[str | None, Meta(description="Charged since midnight UTC.")] = None
    spent_this_month_usd: Annotated[str | None, Meta(description="Charged since the month began, UTC.")] = None
    pools: tuple[PoolStatus, ...] = ()
    conditions: tuple[PolicyCondition, ...] = ()


class Policy(core.Object, frozen=True, kw_only=True):
    """The object. Its spec is read apart (`spec_of`): one that cannot be read must not end the watch of all."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")
