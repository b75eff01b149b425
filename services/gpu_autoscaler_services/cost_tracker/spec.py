"""The declaration of the cost tracker."""

from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler.runtime.snapshots import saving_periodically
from gpu_autoscaler_services.cost_tracker.housekeeping import Housekeeping
from gpu_autoscaler_services.cost_tracker.recovery import complete_ledger
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.service_spec import Process, ServiceSpec
from gpu_autoscaler_services.wiring import open_bus, open_process_store, resumed_snapshots


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    store = await open_process_store(context)
    settings = context.settings.store
    service = CostTracker(
        context.view,
        store,
        instances_without_price=context.metrics.instances_without_price,
        housekeeping=Housekeeping(
            store,
            span_days=settings.span_days,
            ledger_days=settings.ledger_days,
            plan_days=settings.plan_days,
            job_days=settings.job_days,
        ),
    )
    bus = await open_bus(context, CostTracker)
    await complete_ledger(store, bus, context.clock)
    snapshots = await resumed_snapshots(context, CostTracker, store, bus, memory=service)
    await context.closing.enter_async_context(saving_periodically(snapshots, settings.snapshot_seconds))
    return service, bus


SPEC = ServiceSpec(service=CostTracker, compose=compose, processes=(Process(name="cost-tracker", uses=("store",)),))
