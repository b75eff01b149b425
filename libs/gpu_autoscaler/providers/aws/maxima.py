"""The maximum of an Auto Scaling group, written where the settings say that it is ours.

It is a fence beside the policy's limits, which span groups: AWS itself then makes no more, whoever asks. It is never
written below what is wanted of the group, as AWS would lower that with it, and end instances.
Source: EC2 Auto Scaling API Reference, "UpdateAutoScalingGroup", `MaxSize` (read 2026-11-22).
"""

from collections.abc import Mapping

from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.findings import Finding, warning, ok
from gpu_autoscaler.providers.protocol import LaunchRefused

UPDATE = "UpdateAutoScalingGroup"


class GroupMaxSizes:
    """Which groups have a maximum of ours, by name, and how many instances that is."""

    def __init__(self, calls: AwsClient, maxima: Mapping[str, int]) -> None:
        self._calls = calls
        self._maxima = maxima

    def of(self, name: str) -> int | None:
        """Return the group's maximum of ours; None: its MaxSize is somebody else's."""
        return self._maxima.get(name)

    async def keep(self, name: str) -> int:
        """Have the group's MaxSize be ours, and return it. Raises LaunchRefused where it cannot be, or the group is
        at it; TransientError."""
        most = self._maxima[name]
        async for page in self._calls.pages("DescribeAutoScalingGroups", AutoScalingGroupNames=[name]):
            for told in page["AutoScalingGroups"]:
                if told["DesiredCapacity"] > most:
                    raise LaunchRefused(
                        f"{UPDATE}: {told['DesiredCapacity']} instances are wanted of group {name}, more than"
                        f" aws.group_max_sizes allows ({most}): its MaxSize stays {told['MaxSize']} until fewer are, and"
                        " nothing is bought from it",
                        code="MaxSize",
                        kind="configuration",
                        scope="offer",
                    )
                if told["MaxSize"] != most:
                    await self._calls.call(UPDATE, AutoScalingGroupName=name, MaxSize=most)
        return most

    def finding(self, told_max: int, name: str, *, wanted: int) -> Finding:
        """Say how a group's MaxSize stands to ours. Changes nothing."""
        most, subject = self._maxima.get(name), f"aws.group_max_sizes {name}"
        if most is None:
            said = f"MaxSize is {told_max}, and stays: name it in aws.group_max_sizes to have it written"
            return ok(subject, said)
        if wanted > most:
            said = (
                f"is {most}, and {wanted} instances are wanted of the group: nothing is bought from it until fewer are"
            )
            return warning(subject, said, "raise it, or let nodes of the group go")
        if told_max != most:
            return ok(subject, f"MaxSize is {told_max}, and {most} with the first order")
        return ok(subject, f"MaxSize is {most}, as it is to be")
