"""Microsoft Azure. Needs the extra `azure`."""

from gpu_autoscaler.providers.azure.capacity import AzureCapacity
from gpu_autoscaler.providers.azure.options import AzureOptions

__all__ = ["AzureCapacity", "AzureOptions"]
