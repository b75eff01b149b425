"""Settings of the Google Cloud driver ([gcp]), validated before any call."""

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError

OWNER = "provider gcp"
ANY_POOL = "*"
_ZONE = re.compile(r"^[a-z]+-[a-z]+[0-9]+-[a-z]$")  # europe-west4-a


class GcpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what instances are launched."""

    project: str | None = None
    region: str | None = None  # of groups named without a zone
    # `pool=zone/name` of zonal managed instance groups that provide the pool's instances; pool `*`: all pools. A pool
    # may have several; each offers the one machine type of its template, as spot or on-demand. `pool=name` stands for
    # the groups of that name in all zones of `region`.
    groups: tuple[str, ...] = ()
    # `zone/name` of groups that are used although their own autoscaler sizes them as well.
    shared_groups: tuple[str, ...] = ()
    # `zone/name=machine type` of groups that launch gangs by resize requests, all nodes or none. Their instances end
    # after the run duration, and start without the metadata that declares their nodes' labels.
    resize_request_groups: tuple[str, ...] = ()
    # Run duration after which Google deletes such an instance; Google allows ten minutes to seven days.
    resize_request_run_seconds: Annotated[int, Meta(ge=600, le=604800)] = 604800
    # Cluster time that a resize request may wait for capacity. Source: our own, a third of a boot deadline.
    resize_request_wait_seconds_max: Annotated[float, Meta(ge=30, le=3600)] = 300.0
    # Rejected with an explanation: Compute Engine accepts no ceiling.
    spot_ceilings: tuple[str, ...] = ()
    prices_path: str | None = None  # JSON, US dollars per hour by offer key or `type/*/capacity type`


class GroupName(msgspec.Struct, frozen=True, kw_only=True):
    """One group of the settings."""

    pool: str
    zone: str  # empty: every zone of the region that has such a group
    name: str
    is_shared: bool = False  # despite an autoscaler of its own
    gang_type: str | None = None  # its machine type, if it launches gangs by resize requests
    run_seconds: int | None = None  # of such gangs

    @property
    def text(self) -> str:
        """The group as the settings name it."""
        return f"{self.zone}/{self.name}" if self.zone else self.name


def validate_options(options: GcpOptions) -> None:
    """Raise ConfigError with all violations."""
    violations = []
    if not options.project:
        violations.append("gcp.project: is required; set it to the id of the cluster's project, e.g. my-project")
    if not options.groups:
        violations.append("gcp.groups: is required; name zonal groups as pool=zone/name, e.g. *=europe-west4-a/l4")
    if options.spot_ceilings:
        violations.append(
            "gcp.spot_ceilings: Compute Engine accepts no ceiling and never preempts for a price; remove it, and limit"
            " the hourly price in the policy"
        )
    violations += [*_group_violations(options), *_reference_violations(options)]
    if violations:
        raise ConfigError(OWNER, violations)


def _group_violations(options: GcpOptions) -> Iterator[str]:
    for text in options.groups:
        group_name = _named(text)
        if group_name is None:
            yield f"gcp.groups: {text!r} is not pool=zone/name"
        elif not group_name.zone and not options.region:
            yield f"gcp.groups: {text!r} names no zone; write pool=zone/name, or set gcp.region"
        elif group_name.zone and not _ZONE.match(group_name.zone):
            yield f"gcp.groups: {text!r}: {group_name.zone!r} is not a zone; regional groups are not supported"


def _reference_violations(options: GcpOptions) -> Iterator[str]:
    """Settings that name groups of `groups` again."""
    known = {group_name.text for group_name in group_names(options)}
    for text in options.shared_groups:
        if text not in known:
            yield f"gcp.shared_groups: {text!r} is not in gcp.groups"
    for text in options.resize_request_groups:
        group, _, machine_type = text.partition("=")
        if not machine_type.strip():
            yield f"gcp.resize_request_groups: {text!r} is not zone/name=machine type"
        elif "/" not in group:
            yield f"gcp.resize_request_groups: {group.strip()!r} names no zone; write zone/name here and in gcp.groups"
        elif group.strip() not in known:
            yield f"gcp.resize_request_groups: {group.strip()!r} is not in gcp.groups"


def group_names(options: GcpOptions) -> tuple[GroupName, ...]:
    """Return the configured groups, in the order of the settings."""
    gang_types = {
        group.strip(): machine_type.strip()
        for group, _, machine_type in (entry.partition("=") for entry in options.resize_request_groups)
    }
    return tuple(
        msgspec.structs.replace(
            group_name,
            is_shared=group_name.text in options.shared_groups,
            gang_type=gang_types.get(group_name.text),
            run_seconds=options.resize_request_run_seconds if group_name.text in gang_types else None,
        )
        for text in options.groups
        if (group_name := _named(text)) is not None
    )


def _named(text: str) -> GroupName | None:
    pool, _, rest = text.partition("=")
    zone, slash, name = rest.rpartition("/")
    if not (pool.strip() and name.strip()) or (slash and not zone.strip()):
        return None
    return GroupName(pool=pool.strip(), zone=zone.strip(), name=name.strip())
