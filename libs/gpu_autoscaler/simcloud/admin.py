"""Admin API of a fake cloud: faults, and the calls it received.

GET    /admin/asked    calls, oldest first, with their parameters GET    /admin/faults   active faults POST
/admin/faults   a `Fault`; 400 with the reason if it is invalid DELETE /admin/faults   clear all faults
"""

from collections.abc import Iterable

import msgspec

from gpu_autoscaler.simcloud.faults import Fault, Faults


def answer_admin(
    method: str, path: str, body: bytes, faults: Faults, asked: Iterable[msgspec.Struct]
) -> tuple[int, bytes]:
    """Return HTTP status and JSON."""
    match method, path:
        case "GET", "/admin/asked":
            return 200, msgspec.json.encode(list(asked))
        case "GET", "/admin/faults":
            return 200, msgspec.json.encode(faults.standing)
        case "DELETE", "/admin/faults":
            faults.clear()
            return 200, b"[]"
        case "POST", "/admin/faults":
            try:
                faults.add(msgspec.json.decode(body, type=Fault))
            except (msgspec.DecodeError, ValueError) as exc:
                return 400, msgspec.json.encode({"error": str(exc)})
            return 200, msgspec.json.encode(faults.standing)
    return 404, msgspec.json.encode({"error": "doors: /admin/asked, /admin/faults"})
