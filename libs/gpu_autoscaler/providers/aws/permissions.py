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


class Permission(msgspec.Struct, frozen=True, kw_only=True):
    """A call: its IAM actions, the purchase method that needs it, and the effect of its absence."""

    service: str  # as boto3 names the client
    operation: str  # as the API names it
    actions: tuple[str, ...]  # of IAM, including those of dependent calls
    way: Way
    without: str  # effect if not allowed


CALLS: Mapping[str, Permission] = {
    one.operation: one
    for one in (
        Permission(
            service="ec2",
            operation="DescribeInstances",
            actions=("ec2:DescribeInstances",),
            way="always",
            without="instances cannot be listed: nothing is launched or terminated",
        ),
        Permission(
            service="ec2",
            operation="DescribeSubnets",
            actions=("ec2:DescribeSubnets",),
            way="template",
            without="zones are unknown, so there are no offers",
        ),
        Permission(
            service="ec2",
            operation="DescribeInstanceTypes",
            actions=("ec2:DescribeInstanceTypes",),
            way="always",
            without="the built-in table of instance types is used; types it lacks are not offered",
        ),
        Permission(
            service="ec2",
            operation="DescribeInstanceTypeOfferings",
            actions=("ec2:DescribeInstanceTypeOfferings",),
            way="template",
            without="each type is offered in each zone until the cloud refuses it",
        ),
        Permission(
            service="ec2",
            operation="DescribeSpotPriceHistory",
            actions=("ec2:DescribeSpotPriceHistory",),
            way="prices",
            without="spot prices come from the price file only; spot offers without a price are not used",
        ),
        Permission(
            service="pricing",
            operation="GetProducts",
            actions=("pricing:GetProducts",),
            way="prices",
            without="on-demand prices come from the price file only; offers without a price are not used",
        ),
        Permission(
            service="service-quotas",
            operation="ListServiceQuotas",
            actions=("servicequotas:ListServiceQuotas",),
            way="prices",
            without="exhausted quotas surface as launch refusals",
        ),
        Permission(
            service="ec2",
            operation="RunInstances",
            actions=("ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "iam:CreateServiceLinkedRole"),
            way="template",
            without="nothing is launched from the launch template",
        ),
        Permission(
            service="ec2",
            operation="CreateFleet",
            actions=(
                "ec2:CreateFleet",
                "ec2:RunInstances",
                "ec2:CreateTags",
                "iam:PassRole",
                "iam:CreateServiceLinkedRole",
            ),
            way="fleets",
            without="gangs cannot be launched from the launch template all or none, so they are not launched",
        ),
        Permission(
            service="ec2",
            operation="GetSpotPlacementScores",
            actions=("ec2:GetSpotPlacementScores",),
            way="scores",
            without="zones that refused keep the default back-off",
        ),
        Permission(
            service="ec2",
            operation="DescribePlacementGroups",
            actions=("ec2:DescribePlacementGroups",),
            way="placement",
            without="`gpu-autoscaler doctor` cannot check placement groups",
        ),
        Permission(
            service="ec2",
            operation="DescribeCapacityReservations",
            actions=("ec2:DescribeCapacityReservations",),
            way="reservations",
            without="reserved capacity is paid for and not used",
        ),
        Permission(
            service="autoscaling",
            operation="DescribeAutoScalingGroups",
            actions=("autoscaling:DescribeAutoScalingGroups",),
            way="groups",
            without="groups are unknown, so they have no offers",
        ),
        Permission(
            service="ec2",
            operation="DescribeLaunchTemplateVersions",
            actions=("ec2:DescribeLaunchTemplateVersions",),
            way="groups",
            without="instance type and purchase option of a group must be tagged as for cluster-autoscaler",
        ),
        Permission(
            service="autoscaling",
            operation="LaunchInstances",
            actions=("autoscaling:LaunchInstances", "ec2:CreateFleet", "ec2:RunInstances", "iam:PassRole"),
            way="launches",
            without="nothing is launched from groups",
        ),
        Permission(
            service="ec2",
            operation="CreateTags",
            actions=("ec2:CreateTags",),
            way="groups",
            without="instances of groups cannot be tagged as ours, so none is launched",
        ),
        Permission(
            service="autoscaling",
            operation="TerminateInstanceInAutoScalingGroup",
            actions=("autoscaling:TerminateInstanceInAutoScalingGroup",),
            way="groups",
            without="instances of groups are never terminated",
        ),
        Permission(
            service="autoscaling",
            operation="SetDesiredCapacity",
            actions=("autoscaling:SetDesiredCapacity",),
            way="desired_capacity",
            without="nothing is launched from groups sized by desired capacity",
        ),
        Permission(
            service="autoscaling",
            operation="UpdateAutoScalingGroup",
            actions=("autoscaling:UpdateAutoScalingGroup",),
            way="group_max_sizes",
            without="nothing is launched from groups whose MaxSize differs from aws.group_max_sizes",
        ),
        Permission(
            service="autoscaling",
            operation="CreateOrUpdateTags",
            actions=("autoscaling:CreateOrUpdateTags",),
            way="desired_capacity",
            without="groups sized by desired capacity cannot remember orders, so nothing is launched from them",
        ),
        Permission(
            service="autoscaling",
            operation="DeleteTags",
            actions=("autoscaling:DeleteTags",),
            way="desired_capacity",
            without="tags of finished orders stay on groups",
        ),
        Permission(
            service="autoscaling",
            operation="DescribeScalingActivities",
            actions=("autoscaling:DescribeScalingActivities",),
            way="desired_capacity",
            without="launch failures of groups have no reason",
        ),
        Permission(
            service="autoscaling",
            operation="DescribeLaunchConfigurations",
            actions=("autoscaling:DescribeLaunchConfigurations",),
            way="desired_capacity",
            without="what a group with a launch configuration offers must be tagged as for cluster-autoscaler",
        ),
        Permission(
            service="autoscaling",
            operation="DetachInstances",
            actions=("autoscaling:DetachInstances",),
            way="groups",
            without="groups replace interrupted instances as well, so two are launched for one",
        ),
        Permission(
            service="autoscaling",
            operation="DescribePolicies",
            actions=("autoscaling:DescribePolicies",),
            way="groups",
            without="groups with their own scaling policies are not detected",
        ),
        Permission(
            service="ec2",
            operation="TerminateInstances",
            actions=("ec2:TerminateInstances",),
            way="template",
            without="instances launched from the launch template are never terminated",
        ),
        Permission(
            service="sqs",
            operation="ReceiveMessage",
            actions=("sqs:ReceiveMessage",),
            way="queue",
            without="interruption notices come from the nodes' own metadata only",
        ),
        Permission(
            service="sqs",
            operation="DeleteMessage",
            actions=("sqs:DeleteMessage",),
            way="queue",
            without="each event is read again until the queue expires it",
        ),
        Permission(
            service="sqs",
            operation="ChangeMessageVisibility",
            actions=("sqs:ChangeMessageVisibility",),
            way="queue",
            without="unreadable events are read again and again",
        ),
        Permission(
            service="sqs",
            operation="GetQueueAttributes",
            actions=("sqs:GetQueueAttributes",),
            way="queue",
            without="`gpu-autoscaler doctor` cannot check the queue",
        ),
        Permission(
            service="autoscaling",
            operation="CompleteLifecycleAction",
            actions=("autoscaling:CompleteLifecycleAction",),
            way="queue",
            without="groups with a lifecycle hook wait until the hook's timeout",
        ),
        Permission(
            service="autoscaling",
            operation="RecordLifecycleActionHeartbeat",
            actions=("autoscaling:RecordLifecycleActionHeartbeat",),
            way="queue",
            without="a group's instance may end at the hook's timeout, before it is drained",
        ),
    )
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
