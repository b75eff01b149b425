"""What a policy's pools want always, in the words of what people want for a while: a pause, at least so many nodes.

Called by `core/draft.py`, so that whatever asks about directives knows of them. The second opinion reads the policy by
itself (`core/checks/directives.py`).
"""

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.core.directives import ActiveDirectives
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.directives import FOR_GOOD, AnyDirective, Override, PausePool

_BY = "the policy"
_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)


@remembered(4)
def with_pool_directives(directives: ActiveDirectives, policy: ScalingPolicy) -> ActiveDirectives:
    """Return what is in force with the pools' own wants. Where a person speaks of a pool as well, the person's word is
    told; a person's most goes before a pool's least."""
    if not any(pool.is_paused or pool.nodes_count_min for pool in policy.pools):
        return directives
    paused = {
        pool.name: _word(PausePool(pool=pool.name), "the pool is switched off")
        for pool in policy.pools
        if pool.is_paused
    }
    return msgspec.structs.replace(
        directives,
        paused=paused | dict(directives.paused),
        overrides=(*directives.overrides, *_least(directives, policy)),
    )


def _least(directives: ActiveDirectives, policy: ScalingPolicy) -> Iterator[tuple[Override, PolicyDirectiveGiven]]:
    for pool in policy.pools:
        allowed = [
            override.nodes_count_max
            for override, _ in directives.overrides
            if override.nodes_count_max is not None
            and override.gpu_model is None
            and override.pool in (None, pool.name)
        ]
        if least := min([pool.nodes_count_min, *allowed]):
            override = Override(pool=pool.name, nodes_count_min=least)
            yield override, _word(override, f"the pool is to have {pool.nodes_count_min} at least")


def _word(directive: AnyDirective, why: str) -> PolicyDirectiveGiven:
    return PolicyDirectiveGiven(directive=directive, reason=why, given_by=_BY, given_at=_ALWAYS, until=FOR_GOOD)
