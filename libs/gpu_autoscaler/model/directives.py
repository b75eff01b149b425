"""Temporary operator directives that overrule the policy: a freeze, a pause of one pool, bounds on nodes or GPUs."""

from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.model.format import counted, instant
from gpu_autoscaler.model.observed import Instant

PERMANENT = datetime(9999, 1, 1, tzinfo=UTC)  # the end of a directive that the policy itself sets


BRAKE = "brake"  # what `gpu-autoscaler resume` takes after the brake has tripped; it is no directive


class Directive(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="directive"):
    """Base of all directives. A new directive replaces the previous one of the same key."""

    @property
    def key(self) -> str:
        """What the directive is about, as `gpu-autoscaler resume` takes it."""
        return str(self.__struct_config__.tag)


class Freeze(Directive, frozen=True, kw_only=True, tag="freeze"):
    """Suspend purchases and voluntary removals.

    Actions already started complete. Interruption notices are still handled: the node is cordoned, pods save a
    checkpoint and leave before the deadline; the node is kept if the notice is withdrawn. No replacement is bought.
    """


class PausePool(Directive, frozen=True, kw_only=True, tag="pause"):
    """Suspend purchases and voluntary removals of one pool; other pools may be bought from."""

    pool: str

    @property
    def key(self) -> str:
        return f"pause/{self.pool}"


class Override(Directive, frozen=True, kw_only=True, tag="override"):
    """Set a minimum or maximum of our nodes or GPUs: in all, of one pool, of one GPU model, or of both.

    Nodes are bought and kept up to the minimum. Beyond the maximum nothing is bought and empty nodes are removed
    without a wait; nodes with work stay. Equal minimum and maximum are a target. The policy's limits still apply.
    """

    pool: str | None = None
    gpu_model: str | None = None
    nodes_count_min: int | None = None
    nodes_count_max: int | None = None
    gpu_count_min: int | None = None
    gpu_count_max: int | None = None

    @property
    def key(self) -> str:
        parts = (("pool", self.pool), ("kind", self.gpu_model))
        named = "/".join(f"{kind}/{name}" for kind, name in parts if name is not None)
        return f"override/{named or 'cluster'}"


AnyDirective = Freeze | PausePool | Override


class Attribution(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The directive that a reason stems from: who set it, why, and until when."""

    key: str  # of the directive: freeze, pause/<pool>, override/<scope>
    by: str  # who set it
    why: str  # as they explained it
    until: Instant

    def text(self) -> str:
        """`by ada until 2026-11-21 14:00:00 UTC (maintenance)`; without an end where the policy sets it."""
        until = "" if self.until >= PERMANENT else f" until {instant(self.until)}"
        return f"by {self.by}{until} ({self.why.strip().rstrip('.')})"

    def override(self, bound: str, limit: int, unit: str, count: int) -> str:
        """`an override requires at least 4 nodes in pool training (now: 1), set by ...`; `bound`: requires at least."""
        parts = self.key.split("/")[1:]
        words = {"pool": "in pool", "kind": "of GPU model"}
        named = [f"{words.get(kind, kind)} {name}" for kind, name in zip(parts[::2], parts[1::2], strict=False)]
        scope = " ".join(named) or "in the cluster"
        return f"an override {bound} {counted(limit, unit)} {scope} (now: {count}), set {self.text()}"

    def remedy(self) -> str:
        if self.until >= PERMANENT:
            return f"The policy itself sets {self.key}: change the pool in the policy."
        return f"Wait until {instant(self.until)}, or run gpu-autoscaler resume {self.key}."
