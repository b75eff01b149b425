"""What the AWS driver is told: the settings under [aws], checked before anything is asked of the cloud."""

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.ceilings import ceiling_violations

OWNER = "provider aws"


class AwsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what instances are made."""

    region: str | None = None
    # Name, or id (lt-...), of what all other pools' instances are made from; the version is the template's default.
    launch_template: str | None = None
    subnets: tuple[str, ...] = ()  # ids; the first of a zone is used
    instance_types: tuple[str, ...] = ("g4dn.*", "g5.*", "g6.*", "g6e.*", "p4d.*", "p4de.*", "p5.*", "p5en.*")
    groups: tuple[str, ...] = ()  # `pool=name` of Auto Scaling groups: such a pool's instances come from there
    # The same for groups that allow no LaunchInstances: they are told a number (`providers/aws/counted.py`).
    desired_capacity_groups: tuple[str, ...] = ()
    # Names of those of `groups` that are bought from although policies of their own size them too: at the user's word.
    shared_groups: tuple[str, ...] = ()
    # `group=instances` of those of both whose MaxSize is ours to write: so many, before anything is bought from them.
    group_max_sizes: tuple[str, ...] = ()
    # Ids (cr-...) of capacity reservations and capacity blocks that are ours to use, beside the launch template.
    capacity_reservations: tuple[str, ...] = ()
    # `pool=name` of placement groups: instances of such a pool that come from the launch template are launched into it.
    placement_groups: tuple[str, ...] = ()
    # A gang's nodes that are alike, and come from the launch template, are made by one instant EC2 Fleet, all or none.
    fleets: bool = False
    # `type=US dollars an hour`, patterns among the types: what spot costs at most; the least of those that match. None:
    # AWS's own ceiling, the on-demand price. Launches from a group carry what its own template says.
    spot_ceilings: tuple[str, ...] = ()
    # The file behind AWS's Spot Instance advisor (`advisor.py` says whence): how often types are taken
    spot_advisor_path: str | None = None
    # For so many instances spot placement scores are asked for, to weigh refusals (`scores.py`); None: never.
    placement_score_count: Annotated[int, Meta(ge=1)] | None = None
    # Of the SQS queue that EventBridge's rules and lifecycle hooks write to; None: nodes' own metadata alone tells.
    queue_url: str | None = None
    user_data_path: str | None = None  # a text with {labels} and {taints}; None: the launch template's own
    prices_path: str | None = None  # JSON, US dollars an hour by offer key or `type/*/capacity type`


def validate_options(options: AwsOptions) -> None:
    """Raise ConfigError with every mistake at once."""
    mistakes = []
    if not options.region:
        mistakes.append("aws.region: is needed; set it to the region of the cluster, e.g. eu-west-1")
    for setting, named in (
        ("groups", options.groups),
        ("desired_capacity_groups", options.desired_capacity_groups),
        ("placement_groups", options.placement_groups),
    ):
        mistakes += [f"aws.{setting}: {one!r} is not pool=group" for one in named if not one.partition("=")[2]]
    twice = sorted(names_by_pool(options.groups).keys() & names_by_pool(options.desired_capacity_groups).keys())
    mistakes += [
        f"aws.desired_capacity_groups: pool {pool} has a group in aws.groups; leave out one of them" for pool in twice
    ]
    mistakes += [
        f"aws.shared_groups: {name!r} is none of aws.groups; one that is told a number has one writer alone"
        for name in options.shared_groups
        if name not in names_by_pool(options.groups).values()
    ]
    ours = {*names_by_pool(options.groups).values(), *names_by_pool(options.desired_capacity_groups).values()}
    mistakes += _in_maxima(options.group_max_sizes, ours)
    if not options.launch_template and not options.groups and not options.desired_capacity_groups:
        mistakes.append(
            "aws.launch_template: is needed where there are no aws.groups; name the template of your GPU nodes"
        )
    if not options.subnets and not options.groups and not options.desired_capacity_groups:
        mistakes.append("aws.subnets: is needed; set it to the ids of subnets, one a zone")
    if options.fleets and not options.launch_template:
        mistakes.append("aws.fleets: are made from aws.launch_template, which is not set")
    if options.fleets and options.user_data_path is not None:
        mistakes.append(
            "aws.fleets: a fleet passes no user data; put what aws.user_data_path says into the launch template, or"
            " leave out one of them"
        )
    if options.capacity_reservations and not options.launch_template:
        mistakes.append("aws.capacity_reservations: are launched into by aws.launch_template, which is not set")
    mistakes += [
        f"aws.capacity_reservations: {reservation!r} is no id of a reservation (cr-...)"
        for reservation in options.capacity_reservations
        if not reservation.startswith("cr-")
    ]
    if not options.instance_types:
        mistakes.append("aws.instance_types: is empty; name types or patterns, e.g. g5.*")
    mistakes += ceiling_violations("aws.spot_ceilings", options.spot_ceilings)
    if options.queue_url is not None and not options.queue_url.startswith(("http://", "https://")):
        mistakes.append(f"aws.queue_url: {options.queue_url!r} is no address; SQS shows it as https://sqs.<region>...")
    if mistakes:
        raise ConfigError(OWNER, mistakes)


def names_by_pool(groups: Sequence[str]) -> dict[str, str]:
    """Return the group's name by pool."""
    return {pool.strip(): name.strip() for pool, _, name in (group.partition("=") for group in groups)}


def maxima_by_group(maxima: Sequence[str]) -> dict[str, int]:
    """Return how many instances each group may have at most, by its name; without those that are no such text."""
    parts = ((name.strip(), count.strip()) for name, _, count in (one.rpartition("=") for one in maxima))
    return {name: int(count) for name, count in parts if name and count.isdecimal() and int(count) > 0}


def _in_maxima(maxima: Sequence[str], ours: Collection[str]) -> list[str]:
    known = [maxima_by_group([one]) for one in maxima]
    unread = [one for one, found in zip(maxima, known, strict=True) if not found]
    names = [name for found in known for name in found]
    return [
        *(f"aws.group_max_sizes: {one!r} is not group=instances, e.g. gpu-workers=40" for one in unread),
        *(
            f"aws.group_max_sizes: {name!r} is none of aws.groups and aws.desired_capacity_groups"
            for name in dict.fromkeys(names)
            if name not in ours
        ),
        *(f"aws.group_max_sizes: {name!r} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1),
    ]
