"""Everything open is published again in a form from which it can be rebuilt."""

from datetime import timedelta

import pytest
from tests.support.stories import (
    T0,
    Story,
    TimedFact,
    bought,
    drained,
    given,
    instance,
    notice,
    purchase,
    record,
    synced,
)

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDocumentsAccepted
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.policy_documents import PolicyDocument
from gpu_autoscaler.sim.invariants.readability import living_differences
from gpu_autoscaler_services.scaler.living import living

LATER = T0 + timedelta(days=3)
FROZEN = PolicyDirectiveGiven(
    directive=Freeze(), reason="release", given_by="ada", given_at=T0, until=T0 + timedelta(days=20)
)
DOCUMENTS = PolicyDocumentsAccepted(
    documents=(PolicyDocument(name="gpu", uid="u", generation=1, created_at=T0),), accepted_at=T0
)
STORIES: dict[str, Story] = {
    "order": bought(purchase("buy-a")),
    "instance": instance(purchase("buy-a")),
    "drain": drained("n1"),
    "notice": notice("n1", reclaim_at=T0 + timedelta(days=9)),
    "directive": (TimedFact(FROZEN, T0),),
    "documents": (TimedFact(DOCUMENTS, T0),),
}


@pytest.mark.parametrize("name", STORIES)
def test_open_objects_can_be_rebuilt_from_what_is_published_again(name: str) -> None:
    """A reader that finds nothing else in the streams knows as much of them; one that knows them learns nothing."""
    original = given(STORIES[name])
    again = record([TimedFact(fact, LATER) for fact in living(original)])
    rebuilt = fold(given(synced(STORIES[name], as_of=T0), is_synced=False), again)
    assert living_differences(original, rebuilt, FACTS) == []
    assert again
    assert living_differences(original, fold(original, again), FACTS) == []
