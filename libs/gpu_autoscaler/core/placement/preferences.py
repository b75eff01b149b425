"""Preferences of a shape about its node and the pods around it.

They are satisfied where that costs nothing, else dropped in the order of `core/placement/preference_scores.py`.
"""

import msgspec

from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm, SpreadConstraint, Tally
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.scheduling import AffinityPreference, NodePreference


class WeightedTerm(msgspec.Struct, frozen=True):
    """An affinity term, and its weight for or against a node."""

    weight: int
    near: AffinityTerm


class PlacementPreferences(msgspec.Struct, frozen=True, kw_only=True):
    """All preferences of a shape."""

    gpu_models: tuple[str, ...] = ()  # acceptable models, the preferred first; empty: no preference
    nodes: tuple[NodePreference, ...] = ()
    spreads: tuple[SpreadConstraint, ...] = ()
    apart: tuple[WeightedTerm, ...] = ()
    together: tuple[WeightedTerm, ...] = ()

    @property
    def depends_on_pods(self) -> bool:
        """True if each placed pod may change what the next one prefers."""
        return bool(self.spreads or self.apart or self.together)


NO_PREFERENCES = PlacementPreferences()


def job_preferences(spec: JobSpec) -> PlacementPreferences:
    """Return the preferences of a job's members. Those of their pods are written by the scheduler for one placement."""
    return PlacementPreferences(gpu_models=spec.models) if len(spec.models) > 1 else NO_PREFERENCES


def pod_preferences(pod: PodObserved) -> PlacementPreferences:
    """Return the preferences of a pod."""
    declared = pod.preferences
    if declared is None:
        return NO_PREFERENCES
    return PlacementPreferences(
        nodes=declared.nodes,
        spreads=tuple(
            SpreadConstraint(spread.topology_key, Tally(spread.group), spread.skew_count_max)
            for spread in declared.spreads
        ),
        apart=tuple(map(_weighted, declared.apart)),
        together=tuple(map(_weighted, declared.together)),
    )


def _weighted(preference: AffinityPreference) -> WeightedTerm:
    selector = preference.selector
    return WeightedTerm(preference.weight, AffinityTerm(selector.topology_key, Tally(selector.group)))
