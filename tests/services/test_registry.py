"""Each service declares what it starts from, which must fit the snapshots that the scaler saves."""

import pytest

from gpu_autoscaler.runtime.service import FoldInput, MemoryInput, Service
from gpu_autoscaler_services.registry import services
from gpu_autoscaler_services.scaler.service import Scaler


@pytest.mark.parametrize(
    "service",
    [service for service in services() if service.folds and not issubclass(service, MemoryInput)],  # has its own
    ids=lambda service: service.name,
)
def test_services_with_snapshot_fold_streams_as_the_scaler(service: type[Service]) -> None:
    """Otherwise the part that it does not fold would never change. What it keeps besides is the last fact of a type."""
    remembered = set(getattr(service, "remembers", ()))
    streams = {fact.stream() for fact in service.folds}
    saved = {fact for fact in Scaler.folds if fact.stream() in streams}

    assert saved <= set(service.folds) <= saved | remembered
    assert issubclass(service, FoldInput) == bool(remembered)
