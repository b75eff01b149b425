"""The declaration of the cost tracker."""

from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.service_spec import Process, ServiceSpec
from gpu_autoscaler_services.wiring import open_bus, open_process_store


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    store = await open_process_store(context)
    service = CostTracker(context.view, store, instances_without_price=context.metrics.instances_without_price)
    return service, await open_bus(context, CostTracker)


SPEC = ServiceSpec(service=CostTracker, compose=compose, processes=(Process(name="cost-tracker", uses=("store",)),))
