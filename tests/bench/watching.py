"""How many events of a watch are understood in a second: our list-then-watch beside that of kubernetes_asyncio.

A process of its own sends the same bytes to both, whole pods as a real server writes them, as fast as they are read.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Any

from tests.bench.line import Line
from tests.support.kube_objects import pod

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import PODS, Changed
from gpu_autoscaler.runtime.clock import Clock

RATIO_MIN = 20.0  # FACTS, "Kubernetes client", measured 1.5k against 102k a second for decoding alone
_OURS_COUNT, _THEIRS_COUNT = 60_000, 3_000
_ROUNDS_COUNT = 3
_EVENTS_PER_WRITE = 200


def measure() -> list[Line]:
    """Rounds of both, in turn; the best of each is what it can do."""
    with subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            pairs = [
                (asyncio.run(_ours(url, _OURS_COUNT)), asyncio.run(_theirs(url, _THEIRS_COUNT)))
                for _ in range(_ROUNDS_COUNT)
            ]
        finally:
            server.terminate()
    ours, theirs = (max(one) for one in zip(*pairs, strict=True))
    size = len(_event(1))
    return [
        Line(case="WATCH ours", value=ours, unit="events/s", against=f"pods of {size} bytes, one core"),
        Line(case="WATCH kubernetes_asyncio", value=theirs, unit="events/s", against="the same bytes"),
        Line(
            case="WATCH",
            value=ours / theirs,
            unit="x",
            against="events a second of kubernetes_asyncio's watch",
            target=f">= {RATIO_MIN:g}",
            met=ours / theirs >= RATIO_MIN,
        ),
    ]


async def _ours(url: str, events_count: int) -> float:
    kube = KubeClient(Connection(base_url=url), now=Clock().now)
    seen, began = 0, 0.0
    try:
        async with contextlib.aclosing(kube.watch(PODS)) as items:  # type: ignore[type-var]  # it is a generator
            async for item in items:
                if isinstance(item, Changed):
                    assert item.object.metadata.name
                    seen += 1
                    began = began or time.perf_counter()
                if seen == events_count:
                    break
    finally:
        await kube.close()
    return events_count / (time.perf_counter() - began)


async def _theirs(url: str, events_count: int) -> float:
    # Imported here: loading it takes seconds, and nothing else needs it.
    from kubernetes_asyncio import client, watch  # noqa: PLC0415 - see above

    settings = client.Configuration(host=url)
    seen, began = 0, 0.0
    async with client.ApiClient(settings) as api, watch.Watch() as watching:
        async for event in watching.stream(client.CoreV1Api(api).list_pod_for_all_namespaces, resource_version="1"):
            assert event["object"].metadata.name
            seen += 1
            began = began or time.perf_counter()
            if seen == events_count:
                break
    return events_count / (time.perf_counter() - began)


def _event(number: int) -> bytes:
    """One line of a watch: a pod of a training job that runs, with who wrote which field, as servers tell it."""
    item: dict[str, Any] = pod(
        f"train-{number:06}",
        gpus=8,
        labels={"app": "train", "team": "research", "topology.kubernetes.io/zone": "us-west-2a"},
        annotations={"gpu-autoscaler.io/job": f"job-{number:06}"},
        nodeName=f"node-{number % 1000:04}",
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        priority=0,
    )
    at = "2026-11-21T10:44:07Z"
    item["metadata"] |= {
        "namespace": "research",
        "uid": f"00000000-0000-4000-8000-{number:012}",
        "resourceVersion": str(number + 1),
        "creationTimestamp": at,
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u", "controller": True}],
        "managedFields": [
            {
                "manager": manager,
                "operation": "Update",
                "apiVersion": "v1",
                "time": at,
                "fieldsType": "FieldsV1",
                "fieldsV1": {
                    f"f:{part}": {f"f:field-{index}": {} for index in range(12)} for part in ("spec", "status")
                },
            }
            for manager in ("kube-controller-manager", "kubelet")
        ],
    }
    item["status"] = {
        "phase": "Running",
        "startTime": at,
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": name, "status": "True", "lastTransitionTime": at, "lastProbeTime": None}
            for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [
            {
                "name": "main",
                "image": "example.invalid/train:1",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": at}},
            }
        ],
    }
    return json.dumps({"type": "MODIFIED", "object": item}, separators=(",", ":")).encode() + b"\n"


async def _serve() -> None:
    """Answer lists with nothing and watches with events, until this process is ended."""
    blocks = [
        b"".join(_event(number) for number in range(first, first + _EVENTS_PER_WRITE))
        for first in range(1, _OURS_COUNT + _EVENTS_PER_WRITE, _EVENTS_PER_WRITE)
    ]
    listed = json.dumps({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                if b"watch=" not in asked.split(b"\r\n")[0]:
                    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(listed) + listed)
                    continue
                writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
                for block in blocks:
                    writer.write(b"%x\r\n" % len(block) + block + b"\r\n")
                    await writer.drain()
                await reader.read()  # silence, as on a watch on which nothing happens
                return

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201 - told to the bench
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
