"""What each service starts from is said by the service, and holds for the snapshots that the scaler keeps."""

import pytest

from gpu_autoscaler.runtime.service import FoldInput, Service
from gpu_autoscaler_services.registry import SERVICES
from gpu_autoscaler_services.scaler.service import Scaler

FOLDING = tuple(service for service in SERVICES if service.folds)


@pytest.mark.parametrize("service", FOLDING, ids=lambda service: service.name)
def test_every_service_that_folds_says_what_it_starts_from(service: type[Service]) -> None:
    """Forgetting is no answer: who needs history and starts from a snapshot has lost it."""
    assert isinstance(getattr(service, "starts_from_snapshot", None), bool)


@pytest.mark.parametrize(
    "service", [each for each in FOLDING if getattr(each, "starts_from_snapshot", False)], ids=lambda each: each.name
)
def test_who_starts_from_a_snapshot_folds_its_streams_as_the_scaler_does(service: type[Service]) -> None:
    """Else the part that it does not fold would stay as it was for ever. And it sees no facts on their way."""
    streams = {fact.stream() for fact in service.folds}

    assert set(service.folds) == {fact for fact in Scaler.folds if fact.stream() in streams}
    assert not issubclass(service, FoldInput)
