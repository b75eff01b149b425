"""The declaration of the DCGM ingest."""

from gpu_autoscaler.dcgm.exporter_pages import Scraper
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest
from gpu_autoscaler_services.service_spec import Process, ServiceSpec
from gpu_autoscaler_services.wiring import open_bus, resume_state


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    sensing = context.settings.sensing
    scraper = Scraper()
    context.closing.push_async_callback(scraper.close)
    service = DcgmIngest(
        context.view,
        scraper,
        dcgm_url=sensing.dcgm_url,
        scrape_seconds=sensing.dcgm_scrape_seconds,
        on_up=context.metrics.dcgm_up.set,
    )
    bus = await open_bus(context, DcgmIngest)
    await resume_state(context, DcgmIngest, bus)
    return service, bus


SPEC = ServiceSpec(service=DcgmIngest, compose=compose, processes=(Process(name="dcgm-ingest", uses=("snapshots",)),))
