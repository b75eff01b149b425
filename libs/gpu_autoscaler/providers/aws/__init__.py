"""Amazon Web Services. Needs the extra `aws`."""

from gpu_autoscaler.providers.aws.capacity import AwsCapacity
from gpu_autoscaler.providers.aws.options import AwsOptions

__all__ = ["AwsCapacity", "AwsOptions"]
