"""What work would like of its node and of the pods near it: data of a shape, as placement reads it.

This is never a condition: what is liked is kept where that costs nothing, else dropped, in the order told in
`core/placement/preference_scores.py`.
"""

import msgspec

from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm, SpreadConstraint, Tally
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.scheduling import NearPreference, NodePreference


class WeightedTerm(msgspec.Struct, frozen=True):
    """Pods of a tally that are near, and how much that counts for or against a node."""

    weight: int
    near: AffinityTerm


class PlacementPreferences(msgspec.Struct, frozen=True, kw_only=True):
    """All that a shape would like."""

    gpu_models: tuple[str, ...] = ()  # of those that will do, the best first; empty: all the same
    nodes: tuple[NodePreference, ...] = ()
    spreads: tuple[SpreadConstraint, ...] = ()
    apart: tuple[WeightedTerm, ...] = ()
    together: tuple[WeightedTerm, ...] = ()

    @property
    def depends_on_pods(self) -> bool:
        """True where each pod that is placed may change what the next one likes."""
        return bool(self.spreads or self.apart or self.together)


NO_PREFERENCES = PlacementPreferences()


def job_preferences(spec: JobSpec) -> PlacementPreferences:
    """Return what members of a job would like. What their pods say is what we wrote there, of one placement."""
    return PlacementPreferences(gpu_models=spec.models) if len(spec.models) > 1 else NO_PREFERENCES


def pod_preferences(pod: PodObserved) -> PlacementPreferences:
    """Return what a pod would like."""
    said = pod.preferences
    if said is None:
        return NO_PREFERENCES
    return PlacementPreferences(
        nodes=said.nodes,
        spreads=tuple(
            SpreadConstraint(each.topology_key, Tally(each.group), each.skew_count_max) for each in said.spreads
        ),
        apart=tuple(map(_liked, said.apart)),
        together=tuple(map(_liked, said.together)),
    )


def _liked(said: NearPreference) -> WeightedTerm:
    return WeightedTerm(said.weight, AffinityTerm(said.nearness.topology_key, Tally(said.nearness.group)))
