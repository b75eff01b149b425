"""Commands that override the policy temporarily: freeze, pause, override, resume, directives."""

import getpass
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpu_autoscaler.model.directives import BRAKE
from gpu_autoscaler_services.cli.client import Document, Gateway, plain
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.options import Duration
from gpu_autoscaler_services.cli.output import Columns, Output, is_table, print_message, show
from gpu_manager_sdk.models import Freeze, Override, PausePool

HERE = Gateway()
AnyDirective = Freeze | PausePool | Override

Reason = Annotated[str, Parameter(help="Why; shown to others while it is active.")]
For = Annotated[Duration, Parameter(name="--for", help="Duration in cluster time: 90m, 2h, 1h30m, 3d.")]


def until(row: Mapping[str, Any]) -> str:
    """Return when the directive ends: the brake holds until somebody resumes."""
    return "resumed" if row["key"] == BRAKE else row["until"]


_COLUMNS: Columns = (
    ("KEY", lambda row: row["key"]),
    ("DIRECTIVE", lambda row: describe(row["directive"])),
    ("BY", lambda row: row["given_by"]),
    ("UNTIL", until),
    ("REASON", lambda row: row["reason"]),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The options of `override`."""

    at_least: Annotated[int | None, Parameter(help="Minimum: bought if missing, and kept.")] = None
    at_most: Annotated[
        int | None, Parameter(help="Maximum: no more are bought; empty nodes above it are removed at once.")
    ] = None
    target: Annotated[int | None, Parameter(help="Minimum and maximum at once.")] = None
    unit: Annotated[Literal["nodes", "gpus"], Parameter(help="Unit of the numbers.")] = "nodes"
    pool: Annotated[str | None, Parameter(help="Only this pool.")] = None
    gpu_type: Annotated[str | None, Parameter(help="Only this GPU model, e.g. A100.")] = None

    def directive(self) -> Override:
        """Return the override. Raises Stop if --target is combined with a bound."""
        if self.target is not None and (self.at_least is not None or self.at_most is not None):
            raise Stop("--target sets both bounds; omit --at-least and --at-most", Exit.USAGE)
        least, most = (self.at_least, self.at_most) if self.target is None else (self.target, self.target)
        if self.unit == "nodes":
            return Override(pool=self.pool, gpu_model=self.gpu_type, nodes_count_min=least, nodes_count_max=most)
        return Override(pool=self.pool, gpu_model=self.gpu_type, gpu_count_min=least, gpu_count_max=most)


def freeze(*, reason: Reason, seconds: For, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Suspend purchases and voluntary removals."""
    _send(Freeze(), reason, seconds, gateway, output)


def pause(pool: str, /, *, reason: Reason, seconds: For, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Suspend purchases and voluntary removals of one pool.

    Parameters
    ----------
    pool: str
        Name of the pool in the policy.
    """
    _send(PausePool(pool=pool), reason, seconds, gateway, output)


def override(
    *, bounds: Bounds = Bounds(), reason: Reason, seconds: For, gateway: Gateway = HERE, output: Output = "table"
) -> None:
    """Set a temporary minimum or maximum of nodes or GPUs."""
    _send(bounds.directive(), reason, seconds, gateway, output)


def resume(
    key: Annotated[
        str, Parameter(help="Key listed by `directives`: freeze, pause/POOL, override/SCOPE, or brake.")
    ] = "freeze",
    /,
    *,
    reason: Annotated[str, Parameter(help="Why it ends early.")] = "",
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """End a directive early, or resume removals by force after the brake has tripped."""
    document = plain(gateway.client.lift(key, reason=reason, lifted_by=_who()))
    if is_table(output):
        again = "removals by force count anew" if document["key"] == BRAKE else "the policy applies again"
        print_message(f"{document['key']} ended; {again}")
    else:
        show(document, [document], _COLUMNS, lambda row: str(row["key"]), output)


def directives(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """List active directives."""
    document = gateway.read_all("directives")
    none = "no active freeze, pause or override, and the brake holds nothing"
    show(document, document["items"], _COLUMNS, lambda row: str(row["key"]), output, none=none)


def describe(directive: Document) -> str:
    """Return a directive as a phrase: `at least 16 GPUs of pool training`."""
    if directive["directive"] == "freeze":
        return "freeze: no purchases, no voluntary removals"
    if directive["directive"] == BRAKE:
        return "brake: no removals by force"
    if directive["directive"] == "pause":
        return f"pause pool {directive['pool']}"
    bounds = (("nodes", directive.get("nodes_count_min"), directive.get("nodes_count_max")),
              ("GPUs", directive.get("gpu_count_min"), directive.get("gpu_count_max")))  # fmt: skip
    phrases = [_bound(unit, least, most) for unit, least, most in bounds if least is not None or most is not None]
    parts = [f"of pool {directive['pool']}" if directive.get("pool") else "", directive.get("gpu_model") or ""]
    return " ".join(filter(None, (", ".join(phrases), *parts)))


def _bound(unit: str, least: int | None, most: int | None) -> str:
    if least == most:
        return f"{least} {unit}"
    return " and ".join(
        f"{prefix} {count} {unit}" for prefix, count in (("at least", least), ("at most", most)) if count is not None
    )


def _send(directive: AnyDirective, reason: str, seconds: float, gateway: Gateway, output: Output) -> None:
    client = gateway.client
    until = client.status().as_of + timedelta(seconds=seconds)
    accepted = plain(client.direct(directive, reason=reason, until=until, given_by=_who()))
    if is_table(output):
        print_message(f"accepted; end it early with: gpu-autoscaler resume {accepted['key']}")
    show(accepted, [accepted], _COLUMNS, lambda row: str(row["key"]), output)


def _who() -> str:
    """Return the local user's name. A gateway that authenticates callers uses their authenticated name instead."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user, as in some containers
        return ""
