"""Server-Sent Events, line by line. Source: HTML Living Standard, "Server-sent events" (read 2026-11-23)."""

from typing import Any

import msgspec

RECONNECT_SECONDS_DEFAULT = 2.0
RECONNECT_SECONDS_MAX = 10.0
CLOSED = "closed"  # the gateway stops, or the client is too slow; it may come back with its position


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact. `position`, given as `last_event_id`, continues after it."""

    position: str
    document: dict[str, Any]  # CloudEvent in structured JSON

    @property
    def type(self) -> str:
        return str(self.document["type"])

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.document["data"]
        return data


class EventReader:
    """Turns lines into events and remembers the position. One reader outlives its connections."""

    def __init__(self, last_event_id: str = "") -> None:
        self.position = last_event_id
        self.reconnect_seconds = RECONNECT_SECONDS_DEFAULT
        self.is_closed = False  # the gateway ends this connection
        self._fields: dict[str, str] = {}

    def connected(self) -> None:
        """Begin a connection: what was left of the previous one is incomplete."""
        self._fields = {}
        self.is_closed = False

    def read(self, raw: bytes) -> Event | None:
        """Take one line; return the event that it completes."""
        line = raw.decode().rstrip("\r\n")
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        self.position = fields.get("id") or self.position
        if fields.get("retry", "").isdecimal():
            self.reconnect_seconds = min(RECONNECT_SECONDS_MAX, int(fields["retry"]) / 1000)
        if fields.get("event") == CLOSED:
            self.is_closed = True
        elif "data" in fields:
            return Event(position=self.position, document=msgspec.json.decode(fields["data"]))
        return None
