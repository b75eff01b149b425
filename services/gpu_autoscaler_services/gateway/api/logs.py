"""Logs of jobs over REST: what a member's container has written, read from the Kubernetes API as it is asked for."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Protocol

import aiohttp
import msgspec
from aiohttp import web

from gpu_autoscaler.core.intake.admission import JOB_MEMBERS_COUNT_MAX
from gpu_autoscaler.kube.protocol import PODS, Kind, NotFound, Rejected
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler_services.api_rights import READ_JOBS
from gpu_autoscaler_services.gateway.access import ACCESS
from gpu_autoscaler_services.gateway.api.jobs import find_job
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.routes import INVALID, MISSING, Route, read_query

INDEX = "batch.kubernetes.io/job-completion-index"  # Kubernetes' label and annotation of the pods of an indexed Job
LOG_BYTES_MAX = 16 << 20  # without follow
TAIL_LINES_MAX = 100_000
STREAMS_COUNT_MAX = 50  # at once
SILENCE_SECONDS_MAX = 3600.0  # of a container that is followed
WRITE_SECONDS_MAX = 30.0  # without progress for this long the client is considered gone
BUSY_RETRY_SECONDS = 5.0
_SINCE_MIN, _SINCE_MAX = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)  # all lines, and none


class PodLogs(Protocol):
    """The calls of the Kubernetes client that logs need."""

    async def list_all(self, kind: Kind[core.Pod], query: Mapping[str, str]) -> Sequence[core.Pod]:
        """Return the pods of a query."""

    async def open_log(
        self, namespace: str, name: str, query: Mapping[str, str], *, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        """Open the log of a container."""


class LogSource:
    """The cluster's logs, with a limit of streams at once. `kube` is None where the gateway reaches no cluster."""

    def __init__(self, kube: PodLogs | None, missing_reason: str = "") -> None:
        self.kube = kube
        self.missing_reason = missing_reason
        self.streams_count = 0


LOGS: web.AppKey[LogSource] = web.AppKey("logs", LogSource)


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of logs."""

    member: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            lt=JOB_MEMBERS_COUNT_MAX,
            description="Member of the job, from 0: its completion index, else its place by name.",
        ),
    ] = 0
    container: Annotated[
        str, msgspec.Meta(description="Container of the pod. Default: the first of the pod's containers.")
    ] = ""
    follow: Annotated[bool, msgspec.Meta(description="Stream new lines until the container ends.")] = False
    tail_lines: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=TAIL_LINES_MAX)] | None,
        msgspec.Meta(description="Only this many of the last lines."),
    ] = None
    since_time: Annotated[
        Instant | None, msgspec.Meta(description="Only lines since this second, to go on with a log that broke off.")
    ] = None
    previous: Annotated[bool, msgspec.Meta(description="Of the container before its last restart.")] = False
    timestamps: Annotated[bool, msgspec.Meta(description="Begin each line with the time it was written.")] = False

    def of_kubernetes(self, pod: core.Pod) -> dict[str, str]:
        """Return the query of the Kubernetes API."""
        names = [container.name for container in pod.spec.containers]
        flags = (("follow", self.follow), ("previous", self.previous), ("timestamps", self.timestamps))
        query = {"container": self.container or names[0], **{name: "true" for name, is_on in flags if is_on}}
        if self.tail_lines is not None:
            query["tailLines"] = str(self.tail_lines)
        if self.since_time is not None:  # Kubernetes counts whole seconds
            since = min(max(self.since_time, _SINCE_MIN), _SINCE_MAX).astimezone(UTC)
            query["sinceTime"] = f"{since:%Y-%m-%dT%H:%M:%SZ}"
        return query if self.follow else {**query, "limitBytes": str(LOG_BYTES_MAX)}


async def read_job_logs_handler(request: web.Request) -> web.StreamResponse:
    """Read what a member of a job has written, at most 16 MiB, or follow it."""
    query = read_query(request, LogsQuery)
    row, status = await find_job(request.app[READ_MODEL], JobId(request.match_info["job_id"]))
    await request[ACCESS].require(READ_JOBS, row.spec.project_id)
    source = request.app[LOGS]
    if source.kube is None:
        raise Problem(HTTPStatus.NOT_IMPLEMENTED, f"this gateway has no access to Kubernetes: {source.missing_reason}")
    if source.streams_count >= STREAMS_COUNT_MAX:
        detail = f"the gateway reads at most {STREAMS_COUNT_MAX} logs at once; retry, or close one that is followed"
        raise Problem(HTTPStatus.TOO_MANY_REQUESTS, detail, retry_after_seconds=BUSY_RETRY_SECONDS)
    source.streams_count += 1
    try:
        pod = await _member(source.kube, row.spec.job_id, query.member, f"job {row.spec.job_id!r} is {status}")
        with closing(await _opened(source.kube, pod, query)) as log:
            return await _copied(request, log)
    finally:
        source.streams_count -= 1


async def _member(kube: PodLogs, job_id: str, member: int, state: str) -> core.Pod:
    """Return the member's newest pod, which belongs to the last attempt."""
    try:
        pods = await kube.list_all(PODS, {"labelSelector": f"{labels.JOB_ID}={job_id}"})
    except PermanentError as error:  # the gateway's own rights, not the request
        raise _unreadable(error) from error
    members: dict[int, core.Pod] = {}
    unindexed: list[core.Pod] = []
    for pod in sorted(pods, key=_created):
        index = pod.metadata.labels.get(INDEX) or pod.metadata.annotations.get(INDEX, "")
        if index.isdecimal():
            members[int(index)] = pod
        else:
            unindexed.append(pod)
    first = max(members, default=-1) + 1
    members |= dict(enumerate(sorted(unindexed, key=lambda pod: pod.metadata.name), start=first))
    if member in members:
        return members[member]
    known = f"members with a pod: {', '.join(map(str, sorted(members)))}" if members else "it has no pod"
    detail = f"no log of member {member}: {state} and {known}; ask why with `GET /api/v1/why/job/{job_id}`"
    raise Problem(HTTPStatus.NOT_FOUND, detail)


def _created(pod: core.Pod) -> tuple[datetime, str]:
    return pod.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC), pod.metadata.name


async def _opened(kube: PodLogs, pod: core.Pod, query: LogsQuery) -> aiohttp.ClientResponse:
    namespace, name = pod.metadata.namespace, pod.metadata.name
    if not pod.spec.node_name:  # Kubernetes would answer 204
        detail = f"pod {namespace}/{name} has no node yet; ask why with `GET /api/v1/why/pod/{namespace}/{name}`"
        raise Problem(HTTPStatus.CONFLICT, detail)
    try:
        return await kube.open_log(namespace, name, query.of_kubernetes(pod), read_seconds_max=SILENCE_SECONDS_MAX)
    except NotFound as error:
        raise Problem(HTTPStatus.NOT_FOUND, f"pod {namespace}/{name} is gone, and its log with it") from error
    except Rejected as error:  # not started yet, no such container, or no previous one
        raise Problem(HTTPStatus.CONFLICT, f"pod {namespace}/{name} has no such log: {error}") from error
    except PermanentError as error:
        raise _unreadable(error) from error


def _unreadable(error: PermanentError) -> Problem:
    detail = f"Kubernetes refuses the log to the gateway: {error}; grant its account list pods and get pods/log"
    return Problem(HTTPStatus.NOT_IMPLEMENTED, detail)


async def _copied(request: web.Request, log: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass the log on as it comes. A log that breaks off breaks the response, so that it does not seem complete."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/plain; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Accel-Buffering": "no",  # else nginx buffers lines
        }
    )
    response.enable_chunked_encoding()
    await response.prepare(request)
    try:
        async for block in log.content.iter_any():
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await response.write(block)
    except (OSError, aiohttp.ClientError):  # of either side
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


ROUTES = (
    Route(
        "GET",
        "/api/v1/gpu/jobs/{job_id}/logs",
        read_job_logs_handler,
        "jobs",
        str,
        (READ_JOBS,),
        (*MISSING, *INVALID, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.NOT_IMPLEMENTED),
        aliases=("/jobs/{job_id}/logs",),
        query=LogsQuery,
        media_type="text/plain",
    ),
)
