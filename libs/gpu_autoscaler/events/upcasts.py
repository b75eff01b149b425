"""Conversion of old versions of facts, which stay in streams for weeks, to the next version."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import InvalidFact


class Upcast:
    """Converts the payload of `old_type` to `new_type`, one version up, by a pure function on its decoded object."""

    def __init__(self, old_type: str, new_type: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.old_type = old_type
        self.new_type = new_type
        self._change = change

    def lift(self, payload: bytes) -> tuple[str, bytes]:
        """Return the new type and payload. Raises InvalidFact for an invalid payload."""
        try:
            lifted = self._change(msgspec.json.decode(payload, type=dict[str, Any]))
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as exc:
            raise InvalidFact(f"cannot convert {self.old_type} to {self.new_type}: {exc!r}") from exc
        return self.new_type, msgspec.json.encode(lifted)


# No published fact has changed its meaning yet.
UPCASTS: Mapping[str, Upcast] = {}
