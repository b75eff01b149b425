"""Amazon Web Services. Needs the extra `aws`."""

from gpu_autoscaler.providers.aws.capacity import AwsCapacity, AwsOptions

__all__ = ["AwsCapacity", "AwsOptions"]
