"""AWS API calls: boto3 clients in a bounded thread pool; each call has a time limit and an API rate limit.

botocore validates requests against AWS's own models before they are sent. There are no retries here: the caller
retries with the same token.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gpu_autoscaler.model.errors import AutoscalerError, ConfigError, PermanentError, TransientError
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.providers.aws.permissions import CALLS
from gpu_autoscaler.providers.aws.translate import error_in, failure, is_throttled
from gpu_autoscaler.providers.throttling import BoundedCalls, rate_limits

THREADS_COUNT = 8
PAGES_MAX = 1000
FILTER_COUNT_MAX = 200  # filter values (EC2 API Reference, "DescribeInstances", `Filters`)
# AWS serves the price list in few regions (AWS Price List, "AWS services endpoints"; read 2026-11-21).
PRICE_LIST_REGION = "us-east-1"
# Part of the account's limits, to leave capacity for others: RunInstances and TerminateInstances refill at 2 and 5 per
# second, reads at 20 (EC2 Developer Guide, "Request throttling for the Amazon EC2 API", read 2026-11-21).
RATES: Mapping[str, tuple[float, int]] = {"launches": (2.0, 5), "ends": (5.0, 50), "reads": (10.0, 50)}
_LAUNCHES = frozenset(
    {"RunInstances", "CreateFleet", "LaunchInstances", "SetDesiredCapacity", "UpdateAutoScalingGroup"}
)
_ENDS = frozenset({"TerminateInstances", "TerminateInstanceInAutoScalingGroup", "DetachInstances", "CreateTags"})


class AwsClient:
    """Client of one region and account, with the credentials that boto3 finds. `url` redirects all calls to a fake."""

    def __init__(self, region: str, *, url: str | None, call_seconds_max: float) -> None:
        """Raises ConfigError if boto3 is not installed or finds no credentials."""
        try:
            import boto3  # noqa: PLC0415 - an extra, and slow to load
            from botocore.config import Config  # noqa: PLC0415 - as boto3
        except ImportError as exc:
            raise ConfigError("provider aws", ["boto3: is not installed; install gpu-autoscaler[aws]"]) from exc
        self.region = region
        self._url = url
        self._config = Config(
            connect_timeout=call_seconds_max,
            read_timeout=call_seconds_max,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=THREADS_COUNT,
        )
        # A fake must not receive real credentials.
        keys = {"aws_access_key_id": "fake", "aws_secret_access_key": "fake"} if url is not None else {}
        self._session = boto3.Session(region_name=region, **keys)
        self._clients: dict[str, Any] = {}
        self._calls = BoundedCalls("aws", threads_count=THREADS_COUNT, call_seconds_max=call_seconds_max)
        self._rate_limits = rate_limits(RATES, call_seconds_max)

    async def call(self, operation: str, **parameters: object) -> Mapping[str, Any]:
        """Return the answer. Raises LaunchRefused, PermanentError, TransientError."""
        rate_limit = self._rate_limits[
            "launches" if operation in _LAUNCHES else "ends" if operation in _ENDS else "reads"
        ]
        await rate_limit.take(operation)
        try:
            answer: Mapping[str, Any] = await self._calls.run(operation, lambda: self._perform(operation, parameters))
        except AutoscalerError:
            raise
        except Exception as exc:
            error = self._translated(operation, exc)
            if error is None:
                raise
            if is_throttled(str(error_in(exc).get("Code", ""))):
                rate_limit.throttled()
            raise error from exc
        rate_limit.succeeded()
        return answer

    async def pages(self, operation: str, **parameters: object) -> AsyncIterator[Mapping[str, Any]]:
        """Yield every page, or raise: part of a list proves nothing. Each page has its own time limit."""
        token: dict[str, object] = {}
        for _ in range(PAGES_MAX):
            page = await self.call(operation, **parameters, **token)
            yield page
            if not page.get("NextToken"):
                return
            token = {"NextToken": page["NextToken"]}
        raise PermanentError(f"{operation}: more than {PAGES_MAX} pages; narrow the settings under [aws]")

    async def items(self, operation: str, key: str, **parameters: object) -> list[Mapping[str, Any]]:
        """Return the entries under this key of all pages. Raises as `pages`."""
        return [item async for page in self.pages(operation, **parameters) for item in page[key]]

    async def instances(self, by: str, values: Sequence[str], **more: object) -> list[Mapping[str, Any]]:
        """Return the instances that match the filter. Raises as `pages`."""
        filters = [{"Name": by, "Values": list(values)}]
        reservations = await self.items("DescribeInstances", "Reservations", Filters=filters, **more)
        return [instance for reservation in reservations for instance in reservation["Instances"]]

    async def instances_of(
        self, installation: str | None, by: str, values: Sequence[str]
    ) -> dict[str, Mapping[str, Any]]:
        """Return an installation's instances (None: anybody's) that match the filter, by id. Raises as `pages`."""
        ours = [] if installation is None else [{"Name": f"tag:{INSTALLATION}", "Values": [installation]}]
        instances: dict[str, Mapping[str, Any]] = {}
        for start in range(0, len(values), FILTER_COUNT_MAX):
            wanted = {"Name": by, "Values": values[start : start + FILTER_COUNT_MAX]}
            for reservation in await self.items("DescribeInstances", "Reservations", Filters=[wanted, *ours]):
                instances |= {instance["InstanceId"]: instance for instance in reservation["Instances"]}
        return instances

    def known_regions(self) -> list[str]:
        """Return the regions known to the installed SDK; newer ones may be missing."""
        regions: list[str] = self._session.get_available_regions("ec2")
        return regions

    def close(self) -> None:
        self._calls.close()
        for client in self._clients.values():
            client.close()

    def _perform(self, operation: str, parameters: Mapping[str, object]) -> Mapping[str, Any]:
        from botocore import xform_name  # noqa: PLC0415 - as boto3

        method = getattr(self._client(CALLS[operation].service), xform_name(operation))
        answer: Mapping[str, Any] = method(**parameters)
        return answer

    def _client(self, service: str) -> Any:  # noqa: ANN401 - boto3 ships no types
        if service not in self._clients:
            region = PRICE_LIST_REGION if service == "pricing" else self.region
            self._clients[service] = self._session.client(
                service, region_name=region, endpoint_url=self._url, config=self._config
            )
        return self._clients[service]

    @staticmethod
    def _translated(operation: str, exc: Exception) -> AutoscalerError | None:
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError  # noqa: PLC0415 - as boto3
        from botocore.parsers import ResponseParserError  # noqa: PLC0415 - as boto3

        if isinstance(exc, ClientError):
            error, is_launch = error_in(exc), operation in _LAUNCHES
            return failure(operation, error.get("Code", ""), error.get("Message", ""), of_launch=is_launch)
        if isinstance(exc, ParamValidationError):
            return PermanentError(f"{operation}: request rejected by AWS's API model: {exc}")
        if isinstance(exc, ResponseParserError):  # from a proxy, or from an address that is not AWS
            return TransientError(f"{operation}: answer is not AWS's: {str(exc)[:200]}; check the provider URL")
        if isinstance(exc, BotoCoreError):
            return TransientError(f"{operation}: {exc}; safe to retry")
        return None
