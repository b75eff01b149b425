"""What the AWS driver is told: the settings under [aws], checked before anything is asked of the cloud."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD


class AwsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what instances are made."""

    region: str | None = None
    # Name, or id (lt-...), of what all other pools' instances are made from; the version is the template's default.
    launch_template: str | None = None
    subnets: tuple[str, ...] = ()  # ids; the first of a zone is used
    instance_types: tuple[str, ...] = ("g4dn.*", "g5.*", "g6.*", "g6e.*", "p4d.*", "p4de.*", "p5.*", "p5en.*")
    groups: tuple[str, ...] = ()  # `pool=name` of Auto Scaling groups: such a pool's instances come from there
    user_data_path: str | None = None  # a text with {labels} and {taints}; None: the launch template's own
    prices_path: str | None = None  # JSON, US dollars an hour by offer key or `type/*/capacity type`


def see_options(options: AwsOptions) -> None:
    """Raise ConfigError with every mistake at once."""
    mistakes = []
    if not options.region:
        mistakes.append("aws.region: is needed; set it to the region of the cluster, e.g. eu-west-1")
    mistakes += [f"aws.groups: {one!r} is not pool=group" for one in options.groups if not one.partition("=")[2]]
    if not options.launch_template and not options.groups:
        mistakes.append(
            "aws.launch_template: is needed where there are no aws.groups; name the template of your GPU nodes"
        )
    if not options.subnets and not options.groups:
        mistakes.append("aws.subnets: is needed; set it to the ids of subnets, one a zone")
    if not options.instance_types:
        mistakes.append("aws.instance_types: is empty; name types or patterns, e.g. g5.*")
    if mistakes:
        raise ConfigError("provider aws", mistakes)


def names_by_pool(groups: Sequence[str]) -> dict[str, str]:
    """Return the group's name by pool."""
    return {pool.strip(): name.strip() for pool, _, name in (one.partition("=") for one in groups)}


def text_of(path: str) -> str:
    """Return what stands in the file. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError("provider aws", [f"{path}: cannot be read: {exc.strerror}"]) from exc


def prices_of(path: str | None) -> dict[str, int]:
    """Return micro-dollars an hour by offer key, or by `type/*/capacity type`. Raises ConfigError."""
    if path is None:
        return {}
    try:
        prices = msgspec.json.decode(text_of(path), type=dict[str, float])
    except msgspec.DecodeError as exc:
        raise ConfigError("provider aws", [f"{path}: is no object of prices in US dollars an hour: {exc}"]) from exc
    return {key: round(usd * MICRO_USD_PER_USD) for key, usd in prices.items()}
