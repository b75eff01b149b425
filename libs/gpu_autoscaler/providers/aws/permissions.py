"""Every call that the driver makes, with what each needs to be allowed: the source of the policy and of its errors.

A test holds this table against what was asked of the fake. Sources: Service Authorization Reference, "Actions,
resources, and condition keys" of Amazon EC2, EC2 Auto Scaling, AWS Price List and Service Quotas; EC2 Auto Scaling User
Guide, "Launching instances with synchronous provisioning" (read 2026-11-21).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Way = Literal["always", "template", "groups", "prices"]


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
            without="a group needs overrides or cluster-autoscaler's tag to tell its instance type",
        ),
        Allowed(
            service="autoscaling",
            operation="LaunchInstances",
            actions=("autoscaling:LaunchInstances", "ec2:CreateFleet", "ec2:RunInstances", "iam:PassRole"),
            way="groups",
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
            service="ec2",
            operation="TerminateInstances",
            actions=("ec2:TerminateInstances",),
            way="template",
            without="instances that were bought by launch template are never removed",
        ),
    )
}


def actions_of(operation: str) -> tuple[str, ...]:
    """Return what has to be allowed for this call."""
    return CALLS[operation].actions


def policy_of(ways: Iterable[Way]) -> str:
    """Return the IAM policy, as JSON, for these ways of buying."""
    wanted = set(ways) | {"always"}
    actions = sorted({action for one in CALLS.values() if one.way in wanted for action in one.actions})
    statement = {"Sid": "GpuAutoscaler", "Effect": "Allow", "Action": actions, "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, indent=2)
