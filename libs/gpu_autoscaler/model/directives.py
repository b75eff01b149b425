"""What a person says that overrules the policy for a while: a freeze, a pause of one pool, bounds on what there is."""

from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.model.observed import Instant

FOR_GOOD = datetime(9999, 1, 1, tzinfo=UTC)  # the end of a word that the policy itself says


class Directive(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="directive"):
    """Base of them all. Of one key the last word counts."""

    @property
    def key(self) -> str:
        """What the word is about, as people name it when they take it back."""
        return str(self.__struct_config__.tag)


class Freeze(Directive, frozen=True, kw_only=True, tag="freeze"):
    """Nothing is bought, and nothing goes by our choice.

    What was decided before goes on to its end. What the cloud takes is still answered: its node is cordoned, work is
    told to save and leaves by the deadline; a notice that is withdrawn gives the node back. No replacement is bought.
    """


class PausePool(Directive, frozen=True, kw_only=True, tag="pause"):
    """Nothing is bought for one pool, and none of its nodes goes by our choice; other pools may be bought from."""

    pool: str

    @property
    def key(self) -> str:
        """The pause of this pool."""
        return f"pause/{self.pool}"


class Override(Directive, frozen=True, kw_only=True, tag="override"):
    """At least or at most so many nodes or GPUs of ours, in all, of one pool, of one GPU model, or of both.

    Up to the least is bought, and kept. Beyond the most nothing is bought, and what is empty goes without a wait; nodes
    with work on them stay. Both alike are a target. The policy's own limits hold besides.
    """

    pool: str | None = None
    gpu_model: str | None = None
    nodes_count_min: int | None = None
    nodes_count_max: int | None = None
    gpu_count_min: int | None = None
    gpu_count_max: int | None = None

    @property
    def key(self) -> str:
        """The override of this scope."""
        parts = (("pool", self.pool), ("kind", self.gpu_model))
        named = "/".join(f"{kind}/{name}" for kind, name in parts if name is not None)
        return f"override/{named or 'cluster'}"


AnyDirective = Freeze | PausePool | Override


class Attribution(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A directive as reasons carry it: whose word it is."""

    key: str
    by: str
    why: str
    until: Instant
