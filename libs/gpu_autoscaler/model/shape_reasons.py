"""Reasons for which no node would help. Part of `model/reasons.py`, which has the unions."""

from gpu_autoscaler.model.reason import Reason


class VolumeNotReady(Reason, frozen=True, kw_only=True, tag="volume_not_ready"):
    """A volume of the pod is missing, or comes without waiting for a pod: no node would help before it is there."""

    detail: str  # in words: "claim default/data does not exist"


class GroupNotWhole(Reason, frozen=True, kw_only=True, tag="group_not_whole"):
    """The group needs more pods to start than there are: nothing is bought for a part of it."""

    group: str  # group/<namespace>/<name>
    members_there: int
    members_count_min: int
