"""Each service declares what it starts from, which must fit the snapshots that the scaler saves."""

import pytest

from gpu_autoscaler.runtime.service import FoldInput, MemoryInput, Service
from gpu_autoscaler_services.registry import services
from gpu_autoscaler_services.scaler.service import Scaler

FOLDING = tuple(service for service in services() if service.folds)


@pytest.mark.parametrize("service", FOLDING, ids=lambda service: service.name)
def test_each_folding_service_declares_its_start(service: type[Service]) -> None:
    """A service that needs history must not start from a snapshot by accident."""
    assert isinstance(getattr(service, "starts_from_snapshot", None), bool)


@pytest.mark.parametrize(
    "service",
    [
        service
        for service in FOLDING
        if getattr(service, "starts_from_snapshot", False) and not issubclass(service, MemoryInput)  # has its own
    ],
    ids=lambda service: service.name,
)
def test_services_with_snapshot_fold_streams_as_the_scaler(service: type[Service]) -> None:
    """Otherwise the part that it does not fold would never change. And it gets no folded facts."""
    streams = {fact.stream() for fact in service.folds}

    assert set(service.folds) == {fact for fact in Scaler.folds if fact.stream() in streams}
    assert not issubclass(service, FoldInput)
