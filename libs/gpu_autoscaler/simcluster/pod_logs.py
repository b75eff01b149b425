"""Output of containers, the pod subresource `log`.

A simulated container writes one line when it starts and one when it ends; `annotations[OUTPUT]` of its pod are further
lines after the first. Source: Kubernetes API reference, "Pod v1: read log of the specified Pod" (read 2026-11-23).
"""

import asyncio
from datetime import datetime, timedelta

from aiohttp import web

from gpu_autoscaler.simcluster import answers
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.kinds import PODS
from gpu_autoscaler.simcluster.listing import positive_integer
from gpu_autoscaler.simcluster.objects import Json, is_finished, phase_of

OUTPUT = "simcluster/output"
_LOOK_SECONDS = 0.05  # wall time, as of everything that belongs to a connection
_TRUE = ("1", "true")


async def serve_log(api: Api, key: str, request: web.Request) -> web.StreamResponse:
    """Answer with what the container has written; with `follow`, until it ends. Raises ApiRefusal 400, 404."""
    query = request.query
    pod = api.record(PODS, key).object
    name = pod["metadata"]["name"]
    container = _container(pod, query.get("container", ""))
    tail = positive_integer(query.get("tailLines", ""), "tailLines") if "tailLines" in query else None
    bytes_max = positive_integer(query.get("limitBytes", ""), "limitBytes") or None
    if query.get("previous", "").lower() in _TRUE:
        raise answers.bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
    if not pod["spec"].get("nodeName"):
        return web.Response(status=204)  # as the real server: without a node there is nobody to ask
    if phase_of(pod) == "Pending":
        raise answers.bad_request(f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
    since = datetime.fromisoformat(query["sinceTime"]) if "sinceTime" in query else None
    stamped = query.get("timestamps", "").lower() in _TRUE
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    lines = _lines(pod, container, stamped=stamped, since=since)
    shown = len(lines)
    text = "".join(lines if tail is None else lines[max(0, shown - tail) :]).encode()
    await response.write(text[:bytes_max])
    while query.get("follow", "").lower() in _TRUE and not is_finished(pod):
        await asyncio.sleep(_LOOK_SECONDS)
        found = api.find(PODS, key)
        if found is None:
            break
        pod, lines = found, _lines(found, container, stamped=stamped, since=since)
        await response.write("".join(lines[shown:]).encode())
        shown = len(lines)
    await response.write_eof()
    return response


def _container(pod: Json, wanted: str) -> str:
    """Return the container's name. Raises ApiRefusal 400 for an unknown one, and where none is named of several."""
    pod_name = pod["metadata"]["name"]
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    if not wanted and len(names) > 1:
        chosen = f"choose one of: [{' '.join(names)}]"
        raise answers.bad_request(f"a container name must be specified for pod {pod_name}, {chosen}")
    if wanted and wanted not in names:
        raise answers.bad_request(f"container {wanted} is not valid for pod {pod_name}")
    return wanted or names[0]


def _lines(pod: Json, container: str, *, stamped: bool, since: datetime | None) -> list[str]:
    started_at = str(pod.get("status", {}).get("startTime") or pod["metadata"]["creationTimestamp"])
    texts = [f"{container} started on {pod['spec'].get('nodeName', '')}"]
    texts += str(pod["metadata"].get("annotations", {}).get(OUTPUT, "")).splitlines()
    if is_finished(pod):
        texts.append(f"{container} ended: {phase_of(pod)}")
    # A line each millisecond. Kubernetes leaves out zeros at the end of a fraction (RFC3339Nano).
    begun_at = datetime.fromisoformat(started_at)
    times = [begun_at + number * timedelta(milliseconds=1) for number in range(len(texts))]
    return [f"{_stamp(at)} {text}\n" if stamped else f"{text}\n" for at, text in zip(times, texts, strict=True)
            if since is None or at >= since]  # fmt: skip


def _stamp(at: datetime) -> str:
    seconds, fraction = f"{at:%Y-%m-%dT%H:%M:%S}", f"{at:%f}".rstrip("0")
    return f"{seconds}.{fraction}Z" if fraction else f"{seconds}Z"
