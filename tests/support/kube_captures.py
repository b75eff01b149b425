"""Recorded answers of a real kube-apiserver, and their comparison with a server's answers.

Status code and shape are compared: every used field that the real server sent, with its JSON type; for refusals also
reason, code and causes. Times, versions, uids and field managers always differ.

The recordings are in GPU_AUTOSCALER_CAPTURES, else in `../shared/captures` beside the repository.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.kube_http import Answer, Json, KubeHttp

REPOSITORY = Path(__file__).resolve().parents[2]
CAPTURES = Path(os.environ.get("GPU_AUTOSCALER_CAPTURES", REPOSITORY.parent / "shared" / "captures")) / "k8s-1.36"

needs_captures = pytest.mark.skipif(
    not CAPTURES.is_dir(), reason=f"no recorded Kubernetes answers in {CAPTURES} (GPU_AUTOSCALER_CAPTURES)"
)

# What a real server sends and nobody here reads.
UNREAD = {
    "managedFields",
    "nodeInfo",
    "daemonEndpoints",
    "remainingItemCount",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "node.alpha.kubernetes.io/ttl",
    "kwok.x-k8s.io/node",
}


def recorded(name: str) -> Json:
    """One recording."""
    return dict(json.loads((CAPTURES / f"{name}.json").read_text()))


def differences(real: object, ours: object, at: str = "") -> list[str]:
    """Where `ours` lacks what `real` has, or has another JSON type. More than the real server sends is fine."""
    if isinstance(real, dict):
        if not isinstance(ours, dict):
            return [f"{at}: an object there, {ours!r} here"]
        if at.endswith(".state"):
            return []  # how far a container is depends on the moment, and KWOK never ends one
        kept = {key: value for key, value in real.items() if key not in UNREAD and not _is_empty(value)}
        missing = [f"{at}.{key}: missing here" for key in kept if key not in ours]
        return missing + [d for key in kept if key in ours for d in differences(kept[key], ours[key], f"{at}.{key}")]
    if isinstance(real, list):
        if not isinstance(ours, list):
            return [f"{at}: a list there, {ours!r} here"]
        if at.endswith(".conditions"):
            return _conditions(real, ours, at)
        if at.endswith((".items", ".taints", ".tolerations")):
            return differences(real[0], ours[0], at + "[0]") if real and ours else []
        pairs = enumerate(zip(real, ours, strict=False))
        return [line for index, (there, here) in pairs for line in differences(there, here, f"{at}[{index}]")]
    if type(real) is not type(ours):
        return [f"{at}: {type(real).__name__} there, {ours!r} here"]
    return []


def _is_empty(value: object) -> bool:
    return value in (None, "", {}, [])


def _conditions(real: list[Json], ours: list[Json], at: str) -> list[str]:
    """Conditions are compared by type; those of a kubelet's own housekeeping are nobody's business."""
    here = {entry["type"]: entry for entry in ours}
    unread = {"MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"}
    return [
        line
        for entry in real
        if entry["type"] not in unread
        for line in (
            differences({"status": entry["status"]}, here[entry["type"]], f"{at}[{entry['type']}]")
            if entry["type"] in here
            else [f"{at}: no {entry['type']} here"]
        )
    ]


class Replay:
    """Sends recorded requests to a server and collects where its answers differ."""

    def __init__(self, kube: KubeHttp) -> None:
        self.kube = kube
        self.done: set[str] = set()
        self.wrong: list[str] = []

    async def request(self, name: str, content_type: str = "application/json", **changes: str) -> Answer:
        """Replay one recorded request, with texts in path and body exchanged, and compare the answer."""
        capture = recorded(name)
        asked, real = capture["request"], capture["response"]
        text = json.dumps(asked["body"])
        path = asked["path"]
        for old, new in changes.items():
            text, path = text.replace(old, new), path.replace(old, new)
        body = None if asked["body"] is None else json.loads(text)
        answer = await self.kube.send(asked["method"], path, body, content_type=content_type)
        self.compare(name, real, answer)
        return answer

    def compare(self, name: str, real: Json, answer: Answer) -> None:
        """Note where status, shape or refusal differ."""
        self.done.add(name)
        if answer.status != real["status"]:
            self.wrong.append(f"{name}: {real['status']} there, {answer.status} here: {answer.body}")
            return
        body = real["body"]
        if isinstance(body, dict) and body.get("kind") == "Node":
            body["status"].pop("phase", None)  # KWOK's own: the field is deprecated and kubelets leave it out
        self.wrong += [f"{name}{line}" for line in differences(body, answer.body)]
        if isinstance(real["body"], dict) and real["body"].get("kind") == "Status":
            for field in ("status", "reason", "code"):
                if real["body"].get(field) != answer.body.get(field):
                    self.wrong.append(f"{name}.{field}: {real['body'].get(field)} there, {answer.body.get(field)} here")
            there, here = (_causes(body) for body in (real["body"], answer.body))
            if there != here:
                self.wrong.append(f"{name}: causes {there} there, {here} here")
        if ("retry-after" in real["headers"]) != ("retry-after" in answer.headers):
            self.wrong.append(f"{name}: Retry-After differs")

    async def until(self, name: str, holds: Callable[[Json], object]) -> Json:
        """Read the recorded path until it holds, then compare."""
        capture = recorded(name)
        body = await self.kube.until(capture["request"]["path"], holds)
        self.compare(name, capture["response"], Answer(200, body, {}))
        return body

    async def watch(self, name: str, path: str, *, more_count: int = 0) -> None:
        """Replay a watch at this path and compare the types of its lines, and the shape of the first of each.

        The recording stopped after its lines; `more_count` is how many more there may be before they are all heard.
        """
        real = recorded(name)["response"]["lines"]
        ours = await self.kube.watch(path, lines=(len(real) or 1) + more_count)
        self.done.add(name)
        kinds = [{line["type"] for line in lines} for lines in (real, ours)]
        if kinds[0] != kinds[1]:
            self.wrong.append(f"{name}: lines {sorted(kinds[0])} there, {sorted(kinds[1])} here")
        for kind in kinds[0] & kinds[1] - {"BOOKMARK"}:
            first = [next(line for line in lines if line["type"] == kind) for lines in (real, ours)]
            self.wrong += [f"{name}[{kind}]{line}" for line in differences(first[0], first[1])]


def _causes(body: Json) -> list[tuple[object, object]]:
    causes = body.get("details", {}).get("causes") or ()
    return [(cause.get("field"), cause["reason"]) for cause in causes]
