"""All calls of the driver with the permissions they need: source of the IAM policy and of error texts.

A test compares this table with the calls that the fake received. Sources: Service Authorization Reference, "Actions,
resources, and condition keys" of Amazon EC2, EC2 Auto Scaling, AWS Price List and Service Quotas; EC2 Auto Scaling User
Guide, "Launching instances with synchronous provisioning" (read 2026-11-21).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Way = Literal[
    "always",
    "template",
    "fleets",
    "groups",
    "launches",
    "desired_capacity",
    "group_max_sizes",
    "reservations",
    "scores",
    "placement",
    "prices",
    "queue",
]


class Permission(msgspec.Struct, frozen=True):
    """What a call needs: a purchase method, IAM actions, and the effect of their absence."""

    way: Way
    without: str  # effect if not allowed
    actions: tuple[str, ...] = ()  # of IAM, including those of dependent calls; in the table: if not the call's own
    service: str = ""  # as boto3 names the client; in the table: by the group


_BY_SERVICE: Mapping[str, Mapping[str, Permission]] = {
    "ec2": {
        "DescribeInstances": Permission("always", "instances cannot be listed: nothing is launched or terminated"),
        "DescribeSubnets": Permission("template", "zones are unknown, so there are no offers"),
        "DescribeInstanceTypes": Permission(
            "always", "the built-in table of instance types is used; types it lacks are not offered"
        ),
        "DescribeInstanceTypeOfferings": Permission(
            "template", "each type is offered in each zone until the cloud refuses it"
        ),
        "DescribeSpotPriceHistory": Permission(
            "prices", "spot prices come from the price file only; spot offers without a price are not used"
        ),
        "RunInstances": Permission(
            "template",
            "nothing is launched from the launch template",
            ("ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "iam:CreateServiceLinkedRole"),
        ),
        "CreateFleet": Permission(
            "fleets",
            "gangs cannot be launched from the launch template all or none, so they are not launched",
            ("ec2:CreateFleet", "ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "iam:CreateServiceLinkedRole"),
        ),
        "GetSpotPlacementScores": Permission("scores", "zones that refused keep the default back-off"),
        "DescribePlacementGroups": Permission("placement", "`gpu-autoscaler doctor` cannot check placement groups"),
        "DescribeCapacityReservations": Permission("reservations", "reserved capacity is paid for and not used"),
        "DescribeLaunchTemplateVersions": Permission(
            "groups", "instance type and purchase option of a group must be tagged as for cluster-autoscaler"
        ),
        "CreateTags": Permission("groups", "instances of groups cannot be tagged as ours, so none is launched"),
        "TerminateInstances": Permission(
            "template", "instances launched from the launch template are never terminated"
        ),
    },
    "pricing": {
        "GetProducts": Permission(
            "prices", "on-demand prices come from the price file only; offers without a price are not used"
        )
    },
    "service-quotas": {
        "ListServiceQuotas": Permission(
            "prices", "exhausted quotas surface as launch refusals", ("servicequotas:ListServiceQuotas",)
        )
    },
    "autoscaling": {
        "DescribeAutoScalingGroups": Permission("groups", "groups are unknown, so they have no offers"),
        "LaunchInstances": Permission(
            "launches",
            "nothing is launched from groups",
            ("autoscaling:LaunchInstances", "ec2:CreateFleet", "ec2:RunInstances", "iam:PassRole"),
        ),
        "TerminateInstanceInAutoScalingGroup": Permission("groups", "instances of groups are never terminated"),
        "SetDesiredCapacity": Permission(
            "desired_capacity", "nothing is launched from groups sized by desired capacity"
        ),
        "UpdateAutoScalingGroup": Permission(
            "group_max_sizes", "nothing is launched from groups whose MaxSize differs from aws.group_max_sizes"
        ),
        "CreateOrUpdateTags": Permission(
            "desired_capacity",
            "groups sized by desired capacity cannot remember orders, so nothing is launched from them",
        ),
        "DeleteTags": Permission("desired_capacity", "tags of finished orders stay on groups"),
        "DescribeScalingActivities": Permission("desired_capacity", "launch failures of groups have no reason"),
        "DescribeLaunchConfigurations": Permission(
            "desired_capacity",
            "what a group with a launch configuration offers must be tagged as for cluster-autoscaler",
        ),
        "DetachInstances": Permission(
            "groups", "groups replace interrupted instances as well, so two are launched for one"
        ),
        "DescribePolicies": Permission("groups", "groups with their own scaling policies are not detected"),
        "CompleteLifecycleAction": Permission("queue", "groups with a lifecycle hook wait until the hook's timeout"),
        "RecordLifecycleActionHeartbeat": Permission(
            "queue", "a group's instance may end at the hook's timeout, before it is drained"
        ),
    },
    "sqs": {
        "ReceiveMessage": Permission("queue", "interruption notices come from the nodes' own metadata only"),
        "DeleteMessage": Permission("queue", "each event is read again until the queue expires it"),
        "ChangeMessageVisibility": Permission("queue", "unreadable events are read again and again"),
        "GetQueueAttributes": Permission("queue", "`gpu-autoscaler doctor` cannot check the queue"),
    },
}
CALLS: Mapping[str, Permission] = {
    operation: msgspec.structs.replace(
        permission, service=service, actions=permission.actions or (f"{service}:{operation}",)
    )
    for service, permissions in _BY_SERVICE.items()
    for operation, permission in permissions.items()
}


def actions_of(operation: str) -> tuple[str, ...]:
    """Return the IAM actions of this call."""
    return CALLS[operation].actions


def policy_of(ways: Iterable[Way]) -> str:
    """Return the IAM policy for these purchase methods, as JSON."""
    wanted = set(ways) | {"always"}
    actions = sorted({action for call in CALLS.values() if call.way in wanted for action in call.actions})
    statement = {"Sid": "GpuAutoscaler", "Effect": "Allow", "Action": actions, "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, indent=2)
