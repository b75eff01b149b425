"""Settings of the AWS driver ([aws]), validated before any call."""

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.spot_ceilings import ceiling_violations

OWNER = "provider aws"


class AwsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what instances are launched."""

    region: str | None = None
    # Name, or id (lt-...), of the launch template of all pools without a group; its default version is used.
    launch_template: str | None = None
    subnets: tuple[str, ...] = ()  # ids; the first of each zone is used
    instance_types: tuple[str, ...] = ("g4dn.*", "g5.*", "g6.*", "g6e.*", "p4d.*", "p4de.*", "p5.*", "p5en.*")
    groups: tuple[str, ...] = ()  # `pool=name` of Auto Scaling groups that provide the pool's instances
    # The same for groups without LaunchInstances, sized by desired capacity (`providers/aws/desired_capacity.py`).
    desired_capacity_groups: tuple[str, ...] = ()
    # Names of `groups` that are used although their own scaling policies size them as well.
    shared_groups: tuple[str, ...] = ()
    # `group=instances` for any group above whose MaxSize may be written, before a launch from it.
    group_max_sizes: tuple[str, ...] = ()
    # Ids (cr-...) of capacity reservations and capacity blocks to use, with the launch template.
    capacity_reservations: tuple[str, ...] = ()
    # `pool=name` of placement groups for the pool's instances from the launch template.
    placement_groups: tuple[str, ...] = ()
    # Launch the equal nodes of a gang from the launch template by one instant EC2 Fleet, all or none.
    fleets: bool = False
    # `type=US dollars per hour`, types may be patterns: maximum spot price; the lowest match applies. Without one AWS's
    # own ceiling applies, the on-demand price. Instances of groups use their own template's.
    spot_ceilings: tuple[str, ...] = ()
    # Data file of AWS's Spot Instance advisor (source: `advisor.py`): interruption rates
    spot_advisor_path: str | None = None
    # Target capacity of the spot placement score request that extends back-offs (`spot_scores.py`); None: disabled.
    placement_score_count: Annotated[int, Meta(ge=1)] | None = None
    # SQS queue of EventBridge rules and lifecycle hooks; None: only the nodes' own metadata reports interruptions.
    queue_url: str | None = None
    user_data_path: str | None = None  # text with {labels} and {taints}; None: the launch template's own
    prices_path: str | None = None  # JSON, US dollars per hour by offer key or `type/*/capacity type`


def validate_options(options: AwsOptions) -> None:
    """Raise ConfigError with all violations."""
    violations = []
    if not options.region:
        violations.append("aws.region: is required; set it to the region of the cluster, e.g. eu-west-1")
    for setting, entries in (
        ("groups", options.groups),
        ("desired_capacity_groups", options.desired_capacity_groups),
        ("placement_groups", options.placement_groups),
    ):
        violations += [
            f"aws.{setting}: {entry!r} is not pool=group" for entry in entries if not entry.partition("=")[2]
        ]
    twice = sorted(names_by_pool(options.groups).keys() & names_by_pool(options.desired_capacity_groups).keys())
    violations += [
        f"aws.desired_capacity_groups: pool {pool} also has a group in aws.groups; remove one of them" for pool in twice
    ]
    violations += [
        f"aws.shared_groups: {name!r} is not in aws.groups; groups sized by desired capacity cannot be shared"
        for name in options.shared_groups
        if name not in names_by_pool(options.groups).values()
    ]
    ours = {*names_by_pool(options.groups).values(), *names_by_pool(options.desired_capacity_groups).values()}
    violations += _max_size_violations(options.group_max_sizes, ours)
    if not options.launch_template and not options.groups and not options.desired_capacity_groups:
        violations.append(
            "aws.launch_template: is required without aws.groups; name the launch template of your GPU nodes"
        )
    if not options.subnets and not options.groups and not options.desired_capacity_groups:
        violations.append("aws.subnets: is required; set it to the ids of subnets, one per zone")
    if options.fleets and not options.launch_template:
        violations.append("aws.fleets: requires aws.launch_template, which is not set")
    if options.fleets and options.user_data_path is not None:
        violations.append(
            "aws.fleets: fleets pass no user data; move the content of aws.user_data_path into the launch template, or"
            " remove one of them"
        )
    if options.capacity_reservations and not options.launch_template:
        violations.append("aws.capacity_reservations: requires aws.launch_template, which is not set")
    violations += [
        f"aws.capacity_reservations: {reservation!r} is not a reservation id (cr-...)"
        for reservation in options.capacity_reservations
        if not reservation.startswith("cr-")
    ]
    if not options.instance_types:
        violations.append("aws.instance_types: is empty; name types or patterns, e.g. g5.*")
    violations += ceiling_violations("aws.spot_ceilings", options.spot_ceilings)
    if options.queue_url is not None and not options.queue_url.startswith(("http://", "https://")):
        violations.append(f"aws.queue_url: {options.queue_url!r} is not a URL; SQS shows it as https://sqs.<region>...")
    if violations:
        raise ConfigError(OWNER, violations)


def names_by_pool(groups: Sequence[str]) -> dict[str, str]:
    """Return the group name of each pool."""
    return {pool.strip(): name.strip() for pool, _, name in (group.partition("=") for group in groups)}


def max_size_by_group(maxima: Sequence[str]) -> dict[str, int]:
    """Return the configured MaxSize by group name, without invalid entries."""
    parts = ((name.strip(), count.strip()) for name, _, count in (entry.rpartition("=") for entry in maxima))
    return {name: int(count) for name, count in parts if name and count.isdecimal() and int(count) > 0}


def _max_size_violations(max_sizes: Sequence[str], groups: Collection[str]) -> list[str]:
    known = [max_size_by_group([entry]) for entry in max_sizes]
    invalid = [entry for entry, parsed in zip(max_sizes, known, strict=True) if not parsed]
    names = [name for parsed in known for name in parsed]
    return [
        *(f"aws.group_max_sizes: {entry!r} is not group=instances, e.g. gpu-workers=40" for entry in invalid),
        *(
            f"aws.group_max_sizes: {name!r} is not in aws.groups or aws.desired_capacity_groups"
            for name in dict.fromkeys(names)
            if name not in groups
        ),
        *(f"aws.group_max_sizes: {name!r} is set twice" for name in dict.fromkeys(names) if names.count(name) > 1),
    ]
