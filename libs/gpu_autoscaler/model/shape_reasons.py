"""Reasons for which no node would help. Part of `model/reasons.py`, which has the unions."""

from gpu_autoscaler.model.reason import Reason


class VolumeNotReady(Reason, frozen=True, kw_only=True, tag="volume_not_ready"):
    """A volume of the pod is missing, or comes without waiting for a pod: no node would help before it is there."""

    detail: str  # in words: "claim default/data does not exist"


class DeviceClaimsUnsupported(Reason, frozen=True, kw_only=True, tag="device_claims_unsupported"):
    """The pod claims devices in a way that cannot be read, or that are not there: nothing is bought on a guess."""

    detail: str  # in words: "request gpus has alternatives"


class NoDomainFits(Reason, frozen=True, kw_only=True, tag="no_domain_fits"):
    """All members must be near each other, and nowhere near each other can they all have a place."""

    topology_key: str  # label of nodes whose value they share
    domains_count: int  # that were tried, each with what could be bought there
    members_count: int


class GroupIncomplete(Reason, frozen=True, kw_only=True, tag="group_incomplete"):
    """The group needs more pods to start than there are: nothing is bought for a part of it."""

    group: str  # group/<namespace>/<name>
    members_present: int
    members_count_min: int


ShapeReason = VolumeNotReady | DeviceClaimsUnsupported | GroupIncomplete | NoDomainFits
