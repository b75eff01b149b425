"""Writes the schema of pod templates from the API server of the tests: `python -m tests.controlplane.pod_schema`.

Only names, types and required fields are kept; texts are not.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tests.controlplane.plane import running_plane
from tests.support.kube_http import KubeHttp

from gpu_autoscaler.kube.pod_templates import schema

_ROOT = "io.k8s.api.core.v1.PodTemplateSpec"
_KEPT = frozenset({"type", "format", "required", "properties", "items", "additionalProperties", "$ref"})


async def pod_schema(outside: KubeHttp) -> dict[str, Any]:
    """Return the definitions that a pod template uses, by their last name, and the version that published them."""
    definitions = (await outside.read("/openapi/v2"))["definitions"]
    version = (await outside.read("/version"))["gitVersion"]
    kept: dict[str, Any] = {}
    waiting = [_ROOT]
    while waiting:
        name = waiting.pop()
        short = name.rpartition(".")[2]
        if short not in kept:
            kept[short] = _slim(definitions[name], waiting)
    source = f"Kubernetes {version}, /openapi/v2, {_ROOT} and what it refers to"
    return {"source": source, "definitions": dict(sorted(kept.items()))}


def _slim(node: dict[str, Any], used: list[str]) -> dict[str, Any]:
    slim: dict[str, Any] = {}
    for key, value in node.items():
        if key == "$ref":
            name = value.rpartition("/")[2]
            used.append(name)
            slim[key] = name.rpartition(".")[2]
        elif key == "properties":
            slim[key] = {name: _slim(child, used) for name, child in sorted(value.items())}
        elif key in ("items", "additionalProperties"):
            slim[key] = _slim(value, used)
        elif key in _KEPT:
            slim[key] = value
    return slim


def encoded(document: dict[str, Any]) -> str:
    """Return the text of the file, one definition a line."""
    lines = (
        f"{msgspec.json.encode(name).decode()}:{msgspec.json.encode(definition).decode()}"
        for name, definition in document["definitions"].items()
    )
    return '{"source":%s,\n"definitions":{\n%s\n}}\n' % (  # noqa: UP031 - braces
        msgspec.json.encode(document["source"]).decode(),
        ",\n".join(lines),
    )


async def _main() -> None:
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder)) as plane:
        async with aiohttp.ClientSession() as session:
            document = await pod_schema(KubeHttp(session, plane.url, plane.admin_token, plane.tls))
    (Path(schema.__file__).parent / schema.FILE_NAME).write_text(encoded(document), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(_main())
