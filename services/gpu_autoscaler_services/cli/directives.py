"""Commands that overrule the policy for a while: freeze, pause, override, resume, and what is in force."""

import getpass
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpu_autoscaler_services.cli.client import Document, Gateway, part
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import Columns, Output, show, words

HERE = Gateway()
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN = re.compile(r"(?:\d+[smhd])+")

Reason = Annotated[str, Parameter(help="Why, for those who find the cluster like that.")]
For = Annotated[str, Parameter(name="--for", help="How long, in cluster time: 90m, 2h, 1h30m, 3d.")]

_COLUMNS: Columns = (
    ("KEY", lambda row: row["key"]),
    ("WHAT", lambda row: told(row["directive"])),
    ("BY", lambda row: row["given_by"]),
    ("UNTIL", lambda row: row["until"][:19] + "Z"),
    ("WHY", lambda row: row["reason"]),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the flags of an override add up to."""

    at_least: Annotated[int | None, Parameter(help="So many are bought, and kept.")] = None
    at_most: Annotated[int | None, Parameter(help="No more are bought; empty ones beyond go without a wait.")] = None
    target: Annotated[int | None, Parameter(help="Both at once: so many.")] = None
    unit: Annotated[Literal["nodes", "gpus"], Parameter(help="What is counted.")] = "nodes"
    pool: Annotated[str | None, Parameter(help="Of this pool alone.")] = None
    gpu_type: Annotated[str | None, Parameter(help="Of this GPU model alone, e.g. A100.")] = None

    def body(self) -> Document:
        """The override that is meant. Raises Stop where two flags say the same thing."""
        if self.target is not None and (self.at_least is not None or self.at_most is not None):
            raise Stop("--target says both bounds; leave --at-least and --at-most out", Exit.USAGE)
        name = "nodes_count" if self.unit == "nodes" else "gpu_count"
        least, most = (self.at_least, self.at_most) if self.target is None else (self.target, self.target)
        said = {"pool": self.pool, "gpu_model": self.gpu_type, f"{name}_min": least, f"{name}_max": most}
        return {"directive": "override", **{key: value for key, value in said.items() if value is not None}}


def freeze(*, reason: Reason, long: For, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Buy nothing and remove nothing by choice for a while.

    What was decided before goes on to its end. What the cloud takes is still answered: cordoned, told to save, drained
    by the deadline, given back when the notice is withdrawn; but no replacement is bought. Jobs start where room is.
    """
    _give({"directive": "freeze"}, reason, long, gateway, output)


def pause(pool: str, /, *, reason: Reason, long: For, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Leave one pool as it is for a while: nothing is bought for it, none of its nodes goes by choice.

    Parameters
    ----------
    pool: str
        Its name in the policy.
    """
    _give({"directive": "pause", "pool": pool}, reason, long, gateway, output)


def override(
    *,
    bounds: Bounds = Bounds(),
    reason: Reason,
    long: For,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Want at least or at most so many nodes or GPUs for a while. Nodes with work on them stay.

    The policy's own limits hold besides. Of one scope (all, a pool, a GPU model, both) the last word counts.
    """
    _give(bounds.body(), reason, long, gateway, output)


def resume(
    key: Annotated[str, Parameter(help="As `directives` lists it: freeze, pause/<pool>, override/<scope>.")] = "freeze",
    /,
    *,
    reason: Annotated[str, Parameter(help="Why, if there is something to say.")] = "",
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Take a freeze, pause or override back before its time is over; the freeze where nothing is named."""
    query = f"?reason={part(reason)}&lifted_by={part(_who())}"
    document = gateway.send("DELETE", f"directives/{part(key)}{query}")
    if output == "table":
        words(f"taken back: {document['key']}; the policy alone holds again there")
    else:
        show(document, [document], _COLUMNS, lambda row: str(row["key"]), output)


def directives(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """What overrules the policy now, who said so, why, and until when."""
    document = gateway.read("directives")
    if output == "table" and not document["items"]:
        words("nothing overrules the policy")
        return
    show(document, document["items"], _COLUMNS, lambda row: str(row["key"]), output)


def told(directive: Document) -> str:
    """A directive in a few words: `at least 16 GPUs of pool training`."""
    if directive["directive"] == "freeze":
        return "freeze: buy nothing, remove nothing"
    if directive["directive"] == "pause":
        return f"pause pool {directive['pool']}"
    bounds = (("nodes", directive.get("nodes_count_min"), directive.get("nodes_count_max")),
              ("GPUs", directive.get("gpu_count_min"), directive.get("gpu_count_max")))  # fmt: skip
    said = [_bound(unit, least, most) for unit, least, most in bounds if least is not None or most is not None]
    parts = [f"of pool {directive['pool']}" if directive.get("pool") else "", directive.get("gpu_model") or ""]
    return " ".join(filter(None, (", ".join(said), *parts)))


def _bound(unit: str, least: int | None, most: int | None) -> str:
    if least == most:
        return f"{least} {unit}"
    return " and ".join(
        f"{word} {count} {unit}" for word, count in (("at least", least), ("at most", most)) if count is not None
    )


def _give(directive: dict[str, Any], reason: str, long: str, gateway: Gateway, output: Output) -> None:
    now = datetime.fromisoformat(gateway.read("status")["as_of"])
    until = now + timedelta(seconds=seconds_of(long))
    body = {"directive": directive, "reason": reason, "until": until.isoformat(), "given_by": _who()}
    accepted = gateway.send("POST", "directives", body)
    if output == "table":
        words(f"accepted; take it back with: gpu-autoscaler resume {accepted['key']}")
    show(accepted, [accepted], _COLUMNS, lambda row: str(row["key"]), output)


def seconds_of(text: str) -> float:
    """`1h30m` as seconds. Raises Stop for what is no span of time."""
    if not _SPAN.fullmatch(text):
        raise Stop(f"--for {text!r} is no span of time; say for instance 90m, 2h, 1h30m or 3d", Exit.USAGE)
    return float(sum(int(count) * _UNIT_SECONDS[unit] for count, unit in re.findall(r"(\d+)([smhd])", text)))


def _who() -> str:
    """The name of the person at this machine, for people; the gateway's own knowledge goes before it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user, as in some containers
        return ""
