"""Settings of the Karpenter driver ([karpenter]), validated before any call."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError

MODES = ("claims", "limits")


class NodeClass(NamedTuple):
    """Node class of NodeClaims; its kind depends on Karpenter's cloud."""

    group: str
    kind: str
    name: str


class KarpenterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes are launched through Karpenter, and what its cloud offers."""

    node_class: str | None = None  # group/Kind/name, e.g. karpenter.k8s.aws/EC2NodeClass/gpu
    offers_path: str | None = None  # JSON, the catalog of offers: see `providers/karpenter/catalog.py`
    # claims: we create a NodeClaim per node · limits: we write limits of NodePools, and Karpenter creates the claims
    mode: str = "claims"
    node_pools: tuple[str, ...] = ()  # with mode limits: pools whose limits we write, one machine type each
    # Wall time for Karpenter to launch an instance or report a failure. Its own limit is 300.
    launch_seconds_max: Annotated[float, Meta(gt=0, le=300)] = 25.0


def validate_options(options: KarpenterOptions) -> None:
    """Raise ConfigError with all violations."""
    violations = []
    if options.mode not in MODES:
        violations.append(f"karpenter.mode: {options.mode!r} is not one of {', '.join(MODES)}")
    if options.mode == "limits" and not options.node_pools:
        violations.append("karpenter.node_pools: is required with mode limits; name NodePools whose limits we write")
    if options.mode == "claims" and options.node_pools:
        violations.append("karpenter.node_pools: requires mode limits; with claims our nodes have no NodePool")
    if options.node_class is None or len([part for part in options.node_class.split("/") if part]) != len(
        NodeClass._fields
    ):
        problem = "is required" if options.node_class is None else f"{options.node_class!r} is not group/Kind/name"
        violations.append(f"karpenter.node_class: {problem}; e.g. karpenter.k8s.aws/EC2NodeClass/gpu")
    if options.offers_path is None:
        violations.append("karpenter.offers_path: is required; name a file of the cloud's offers and prices")
    if violations:
        raise ConfigError("provider karpenter", violations)


def node_class_of(options: KarpenterOptions) -> NodeClass:
    """Return the validated node class."""
    group, kind, name = str(options.node_class).split("/")
    return NodeClass(group, kind, name)
