"""Google Cloud. Needs the extra `gcp`."""

from gpu_autoscaler.providers.gcp.capacity import GcpCapacity
from gpu_autoscaler.providers.gcp.options import GcpOptions

__all__ = ["GcpCapacity", "GcpOptions"]
