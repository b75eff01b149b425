"""Every call that the driver makes, with what each needs to be allowed: the source of the policy and of its errors.

A test holds this table against what was asked of the fake. Sources: Service Authorization Reference, "Actions,
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
    "counted",
    "maxima",
    "reservations",
    "scores",
    "placement",
    "prices",
    "queue",
]


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """One call: what it needs, on behalf of which way of buying, and what is lost without it."""

    service: str  # as boto3 names the client
    operation: str  # as the API names it
    actions: tuple[str, ...]  # of IAM, those of dependent calls included
    way: Way
    without: str  # what does not work then


CALLS: Mapping[str, Allowed] = {
    one.operation: one
    for one in (
        Allowed(
            service="ec2",
            operation="DescribeInstances",
            actions=("ec2:DescribeInstances",),
            way="always",
            without="no instance is found again: nothing is bought or removed",
        ),
        Allowed(
            service="ec2",
            operation="DescribeSubnets",
            actions=("ec2:DescribeSubnets",),
            way="template",
            without="no zone is known, so nothing is for sale",
        ),
        Allowed(
            service="ec2",
            operation="DescribeInstanceTypes",
            actions=("ec2:DescribeInstanceTypes",),
            way="always",
            without="sizes come from the bundled table, and types that it lacks are not for sale",
        ),
        Allowed(
            service="ec2",
            operation="DescribeInstanceTypeOfferings",
            actions=("ec2:DescribeInstanceTypeOfferings",),
            way="template",
            without="each type is taken for sold in each zone, until the cloud refuses it",
        ),
        Allowed(
            service="ec2",
            operation="DescribeSpotPriceHistory",
            actions=("ec2:DescribeSpotPriceHistory",),
            way="prices",
            without="spot has no price but the file's, so it is not bought",
        ),
        Allowed(
            service="pricing",
            operation="GetProducts",
            actions=("pricing:GetProducts",),
            way="prices",
            without="on-demand has no price but the file's, so it is not bought",
        ),
        Allowed(
            service="service-quotas",
            operation="ListServiceQuotas",
            actions=("servicequotas:ListServiceQuotas",),
            way="prices",
            without="a quota of zero shows only as a refusal",
        ),
        Allowed(
            service="ec2",
            operation="RunInstances",
            actions=("ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "iam:CreateServiceLinkedRole"),
            way="template",
            without="nothing is bought by launch template",
        ),
        Allowed(
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
            without="a gang's nodes are not made by launch template, as they are to be made all at once or not at all",
        ),
        Allowed(
            service="ec2",
            operation="GetSpotPlacementScores",
            actions=("ec2:GetSpotPlacementScores",),
            way="scores",
            without="a zone that refuses is asked again as soon as any other",
        ),
        Allowed(
            service="ec2",
            operation="DescribePlacementGroups",
            actions=("ec2:DescribePlacementGroups",),
            way="placement",
            without="`gpu-autoscaler doctor` cannot say whether the placement groups are there",
        ),
        Allowed(
            service="ec2",
            operation="DescribeCapacityReservations",
            actions=("ec2:DescribeCapacityReservations",),
            way="reservations",
            without="what is reserved is not used, and paid for all the same",
        ),
        Allowed(
            service="autoscaling",
            operation="DescribeAutoScalingGroups",
            actions=("autoscaling:DescribeAutoScalingGroups",),
            way="groups",
            without="no group is known, so nothing is for sale from one",
        ),
        Allowed(
            service="ec2",
            operation="DescribeLaunchTemplateVersions",
            actions=("ec2:DescribeLaunchTemplateVersions",),
            way="groups",
            without="a group needs cluster-autoscaler's tags to tell its instance type, and whether it buys spot",
        ),
        Allowed(
            service="autoscaling",
            operation="LaunchInstances",
            actions=("autoscaling:LaunchInstances", "ec2:CreateFleet", "ec2:RunInstances", "iam:PassRole"),
            way="launches",
            without="nothing is bought from a group",
        ),
        Allowed(
            service="ec2",
            operation="CreateTags",
            actions=("ec2:CreateTags",),
            way="groups",
            without="an instance of a group cannot be told from another's, so none is bought",
        ),
        Allowed(
            service="autoscaling",
            operation="TerminateInstanceInAutoScalingGroup",
            actions=("autoscaling:TerminateInstanceInAutoScalingGroup",),
            way="groups",
            without="instances of groups are never removed",
        ),
        Allowed(
            service="autoscaling",
            operation="SetDesiredCapacity",
            actions=("autoscaling:SetDesiredCapacity",),
            way="counted",
            without="nothing is bought from a group that is told a number",
        ),
        Allowed(
            service="autoscaling",
            operation="UpdateAutoScalingGroup",
            actions=("autoscaling:UpdateAutoScalingGroup",),
            way="maxima",
            without="nothing is bought from a group of aws.group_max_sizes that has another MaxSize",
        ),
        Allowed(
            service="autoscaling",
            operation="CreateOrUpdateTags",
            actions=("autoscaling:CreateOrUpdateTags",),
            way="counted",
            without="a group that is told a number cannot remember what was ordered, so nothing is bought from it",
        ),
        Allowed(
            service="autoscaling",
            operation="DeleteTags",
            actions=("autoscaling:DeleteTags",),
            way="counted",
            without="a group keeps tags of orders that it does not need any more",
        ),
        Allowed(
            service="autoscaling",
            operation="DescribeScalingActivities",
            actions=("autoscaling:DescribeScalingActivities",),
            way="counted",
            without="why a group makes no instance is not found out",
        ),
        Allowed(
            service="autoscaling",
            operation="DescribeLaunchConfigurations",
            actions=("autoscaling:DescribeLaunchConfigurations",),
            way="counted",
            without="a group with a launch configuration needs cluster-autoscaler's tags to tell what it buys",
        ),
        Allowed(
            service="autoscaling",
            operation="DetachInstances",
            actions=("autoscaling:DetachInstances",),
            way="groups",
            without="a group replaces an instance that is taken, and so do we: two are bought for one",
        ),
        Allowed(
            service="autoscaling",
            operation="DescribePolicies",
            actions=("autoscaling:DescribePolicies",),
            way="groups",
            without="a group that scales itself is not found out",
        ),
        Allowed(
            service="ec2",
            operation="TerminateInstances",
            actions=("ec2:TerminateInstances",),
            way="template",
            without="instances that were bought by launch template are never removed",
        ),
        Allowed(
            service="sqs",
            operation="ReceiveMessage",
            actions=("sqs:ReceiveMessage",),
            way="queue",
            without="notices come from nodes' own metadata alone",
        ),
        Allowed(
            service="sqs",
            operation="DeleteMessage",
            actions=("sqs:DeleteMessage",),
            way="queue",
            without="each event is read again until the queue forgets it",
        ),
        Allowed(
            service="sqs",
            operation="ChangeMessageVisibility",
            actions=("sqs:ChangeMessageVisibility",),
            way="queue",
            without="events that are not understood are read again and again",
        ),
        Allowed(
            service="sqs",
            operation="GetQueueAttributes",
            actions=("sqs:GetQueueAttributes",),
            way="queue",
            without="`gpu-autoscaler doctor` cannot say how the queue is set up",
        ),
        Allowed(
            service="autoscaling",
            operation="CompleteLifecycleAction",
            actions=("autoscaling:CompleteLifecycleAction",),
            way="queue",
            without="a group with a lifecycle hook waits until the hook's time is over",
        ),
        Allowed(
            service="autoscaling",
            operation="RecordLifecycleActionHeartbeat",
            actions=("autoscaling:RecordLifecycleActionHeartbeat",),
            way="queue",
            without="a group's instance may end before it is drained, when the hook's time is over",
        ),
    )
}


def actions_of(operation: str) -> tuple[str, ...]:
    """Return what has to be allowed for this call."""
    return CALLS[operation].actions


def policy_of(ways: Iterable[Way]) -> str:
    """Return the IAM policy, as JSON, for these ways of buying."""
    wanted = set(ways) | {"always"}
    actions = sorted({action for call in CALLS.values() if call.way in wanted for action in call.actions})
    statement = {"Sid": "GpuAutoscaler", "Effect": "Allow", "Action": actions, "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, indent=2)
