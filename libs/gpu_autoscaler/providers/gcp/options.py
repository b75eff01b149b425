"""What the Google Cloud driver is told: the settings under [gcp], checked before anything is asked of the cloud."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError

ANY_POOL = "*"
_ZONE = re.compile(r"^[a-z]+-[a-z]+[0-9]+-[a-z]$")  # europe-west4-a


class GcpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what instances are made."""

    project: str | None = None
    # `pool=zone/name` of zonal managed instance groups, pool `*` for all: such a pool's instances come from there. A
    # pool may have several; each sells the one machine type of its template, as spot or on-demand as that says.
    groups: tuple[str, ...] = ()
    # `zone/name` of those that are bought from although an autoscaler of their own sizes them: at the user's word.
    shared_groups: tuple[str, ...] = ()
    # `zone/name=machine type` of those whose gangs are made by resize requests, all nodes at once or none. What is made
    # so ends after its run duration, and begins without the metadata that tells its node's labels: so by choice.
    together_groups: tuple[str, ...] = ()
    # From when such an instance runs until Google deletes it; ten minutes to seven days, as Google has it.
    together_run_seconds: Annotated[int, Meta(ge=600, le=604800)] = 604800
    # Cluster time that a request may wait for room before it is cancelled. Source: our own, a third of a boot deadline.
    together_wait_seconds_max: Annotated[float, Meta(ge=30, le=3600)] = 300.0
    # As other clouds have it, and refused by name: Compute Engine takes none.
    spot_ceilings: tuple[str, ...] = ()
    prices_path: str | None = None  # JSON, US dollars an hour by offer key or `type/*/capacity type`


class GroupName(msgspec.Struct, frozen=True, kw_only=True):
    """One group of the settings."""

    pool: str
    zone: str
    name: str
    is_shared: bool = False  # with an autoscaler of its own, by choice
    together_type: str | None = None  # its machine type, where gangs are made of it all at once, by choice
    run_seconds: int | None = None  # of what is made so

    @property
    def region(self) -> str:
        """The zone's."""
        return self.zone.rpartition("-")[0]


def validate_options(options: GcpOptions) -> None:
    """Raise ConfigError with every mistake at once."""
    mistakes = []
    if not options.project:
        mistakes.append("gcp.project: is needed; set it to the id of the cluster's project, e.g. my-project")
    if not options.groups:
        mistakes.append("gcp.groups: is needed; name zonal managed groups as pool=zone/name, e.g. *=europe-west4-a/l4")
    if options.spot_ceilings:
        mistakes.append(
            "gcp.spot_ceilings: Compute Engine takes no ceiling, and never takes a machine for its price; leave it out,"
            " and limit what an hour of the pool may cost in the policy"
        )
    for text in options.groups:
        named = _named(text)
        if named is None:
            mistakes.append(f"gcp.groups: {text!r} is not pool=zone/name")
        elif not _ZONE.match(named.zone):
            mistakes.append(f"gcp.groups: {text!r}: {named.zone!r} is no zone; regional groups are not bought from")
    known = {f"{named.zone}/{named.name}" for named in group_names(options)}
    mistakes += [
        f"gcp.shared_groups: {group_name!r} is none of gcp.groups"
        for group_name in options.shared_groups
        if group_name not in known
    ]
    for text in options.together_groups:
        group, _, machine_type = text.partition("=")
        if not machine_type.strip():
            mistakes.append(f"gcp.together_groups: {text!r} is not zone/name=machine type")
        elif group.strip() not in known:
            mistakes.append(f"gcp.together_groups: {group.strip()!r} is none of gcp.groups")
    if mistakes:
        raise ConfigError("provider gcp", mistakes)


def group_names(options: GcpOptions) -> tuple[GroupName, ...]:
    """Return the groups, in the order of the settings."""
    together = {
        group.strip(): machine_type.strip()
        for group, _, machine_type in (entry.partition("=") for entry in options.together_groups)
    }
    return tuple(
        msgspec.structs.replace(
            named,
            is_shared=f"{named.zone}/{named.name}" in options.shared_groups,
            together_type=together.get(f"{named.zone}/{named.name}"),
            run_seconds=options.together_run_seconds if f"{named.zone}/{named.name}" in together else None,
        )
        for text in options.groups
        if (named := _named(text)) is not None
    )


def _named(text: str) -> GroupName | None:
    pool, _, rest = text.partition("=")
    zone, _, name = rest.partition("/")
    if not (pool.strip() and zone.strip() and name.strip()):
        return None
    return GroupName(pool=pool.strip(), zone=zone.strip(), name=name.strip())
