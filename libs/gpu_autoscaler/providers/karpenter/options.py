"""What the Karpenter driver is told: the settings under [karpenter], checked before anything is asked."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError

WHO_CHOOSES = ("claims", "limits")


class NodeClass(NamedTuple):
    """What a NodeClaim's machines are made from; its kind is that of Karpenter's cloud."""

    group: str
    kind: str
    name: str


class KarpenterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What NodeClaims are made from, and what Karpenter's cloud sells."""

    node_class: str | None = None  # group/Kind/name, as karpenter.k8s.aws/EC2NodeClass/gpu
    offers_path: str | None = None  # JSON, what is sold: see `providers/karpenter/catalog.py`
    # claims: we choose, a NodeClaim a node · limits: we write the limits of NodePools, and Karpenter makes the claims
    mode: str = "claims"
    node_pools: tuple[str, ...] = ()  # of mode limits: whose limits are ours to write, one machine type each
    # Wall time in which Karpenter is to make an instance, or to say why it does not. Its own limit is 300.
    launch_seconds_max: Annotated[float, Meta(gt=0, le=300)] = 25.0


def validate_options(options: KarpenterOptions) -> None:
    """Raise ConfigError with every mistake at once."""
    mistakes = []
    if options.mode not in WHO_CHOOSES:
        mistakes.append(f"karpenter.mode: {options.mode!r} is none of {', '.join(WHO_CHOOSES)}")
    if options.mode == "limits" and not options.node_pools:
        mistakes.append("karpenter.node_pools: is needed with mode limits; name the NodePools whose limits are ours")
    if options.mode == "claims" and options.node_pools:
        mistakes.append("karpenter.node_pools: are of mode limits alone; with claims our nodes belong to no NodePool")
    if options.node_class is None or len([part for part in options.node_class.split("/") if part]) != len(
        NodeClass._fields
    ):
        said = "is needed" if options.node_class is None else f"{options.node_class!r} is not group/Kind/name"
        mistakes.append(f"karpenter.node_class: {said}; e.g. karpenter.k8s.aws/EC2NodeClass/gpu")
    if options.offers_path is None:
        mistakes.append("karpenter.offers_path: is needed; name a file of what Karpenter's cloud sells, with prices")
    if mistakes:
        raise ConfigError("provider karpenter", mistakes)


def node_class_of(options: KarpenterOptions) -> NodeClass:
    """Return the class that `validate_options` has found to be well written."""
    group, kind, name = str(options.node_class).split("/")
    return NodeClass(group, kind, name)
