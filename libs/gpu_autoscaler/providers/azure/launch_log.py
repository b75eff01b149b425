"""Launch log of a flexible scale set: its orders, recorded in tags of the set before a machine is created.

Azure shows nothing of a deleted machine: a restarted process that repeats a token would create a second one. The log is
written under the set's ETag; concurrent orders share one write. The newest orders are kept, each in twelve characters;
if two five-byte digests collide, the new order is reported as ended and ordered again. Source of the limits: Azure
documentation, "Use tags to organize your Azure resources" (read 2026-11-22).
"""

import base64
import binascii
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.azure.client import AzureClient
from gpu_autoscaler.providers.azure.translate import LAUNCH_LOG_TAG
from gpu_autoscaler.providers.protocol import misconfigured
from gpu_autoscaler.providers.shared_reads import SharedRead

TAGS_MAX, TAG_LENGTH_MAX = 40, 256  # of the 50 tags of a resource; the rest is for other users
UPDATE = "VirtualMachineScaleSets_Update"
TRIES_MAX = 5  # concurrent changes by others
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)
_DIGEST_BYTES, _TIME_BYTES = 5, 4
_WORD_LENGTH = (_DIGEST_BYTES + _TIME_BYTES) * 4 // 3
ORDERS_MAX = TAG_LENGTH_MAX // _WORD_LENGTH * TAGS_MAX

LaunchTimes = Mapping[bytes, datetime]  # first launch attempt of each order, by digest of the machine's name


class LaunchLog:
    """Launch log of one flexible scale set."""

    def __init__(self, client: AzureClient, scale_set: str) -> None:
        self._client = client
        self._scale_set = scale_set
        self._requested: dict[bytes, datetime] = {}
        self._writing = SharedRead(self._write)
        self._not_created: deque[bytes] = deque(maxlen=ORDERS_MAX)  # recorded by us, without a machine

    async def record(self, name: str, now: datetime) -> datetime | None:
        """Record the order of this machine; return when it was first recorded, None if no machine was created yet.
        Raises LaunchRefused, PermanentError, TransientError: the order may or may not be recorded then."""
        key = launch_digest(name)
        self._requested.setdefault(key, now)
        launches = await self._writing.fresh()
        return None if key in self._not_created else launches.get(key)

    def creating(self, name: str) -> None:
        self._forget({launch_digest(name)})

    def not_created(self, name: str) -> None:
        """Mark the order as free to be created again: no machine was created."""
        self._not_created.append(launch_digest(name))

    def _forget(self, keys: set[bytes]) -> None:
        for key in keys.intersection(self._not_created):
            self._not_created.remove(key)

    async def _write(self) -> LaunchTimes:
        """Record the requested orders; return the log before that."""
        requested, self._requested = self._requested, {}
        new: set[bytes] = set()
        for _ in range(TRIES_MAX):
            set_data = await self._client.find("VirtualMachineScaleSets_Get", scale_set=self._scale_set)
            if set_data is None:
                raise misconfigured(
                    f"scale set {self._scale_set} not found in {self._client.group_id}; check azure.scale_set",
                    "NoScaleSet",
                )
            tags: Mapping[str, str] = set_data.get("tags") or {}
            known = decode_launches(text for name, text in tags.items() if name.startswith(LAUNCH_LOG_TAG))
            self._forget(new)  # our write was rejected: another process may have recorded them
            new = requested.keys() - known.keys()
            if not new:
                return known
            self._not_created.extend(new)
            other_tags = {name: text for name, text in tags.items() if not name.startswith(LAUNCH_LOG_TAG)}
            texts = encode_launches({**requested, **known})
            body = {"tags": other_tags | {f"{LAUNCH_LOG_TAG}{number}": text for number, text in enumerate(texts)}}
            headers = {"If-Match": str(set_data["etag"])}
            written = await self._client.ask(UPDATE, body=body, headers=headers, scale_set=self._scale_set)
            if written.status != 412:
                self._client.checked(UPDATE, written)
                return known
        raise TransientError(f"{UPDATE}: {self._scale_set} was changed {TRIES_MAX} times by others; retried")


def launch_digest(name: str) -> bytes:
    """Return the digest that identifies an order."""
    return hashlib.sha256(name.encode()).digest()[:_DIGEST_BYTES]


def encode_launches(launches: LaunchTimes) -> list[str]:
    """Return the newest orders that fit, as tag values."""
    newest = sorted(launches.items(), key=lambda entry: (entry[1], entry[0]))[-ORDERS_MAX:]
    encoded = "".join(_word(key, at) for key, at in newest)
    length = TAG_LENGTH_MAX // _WORD_LENGTH * _WORD_LENGTH
    return [encoded[start : start + length] for start in range(0, len(encoded), length)]


def decode_launches(texts: Iterable[str]) -> LaunchTimes:
    """Return the recorded orders; unreadable texts are skipped, as people may write to the tags too."""
    launches: dict[bytes, datetime] = {}
    for text in texts:
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            continue
        size = _DIGEST_BYTES + _TIME_BYTES
        for start in range(0, len(raw) - size + 1, size):
            key, seconds = raw[start : start + _DIGEST_BYTES], raw[start + _DIGEST_BYTES : start + size]
            launches[key] = _EPOCH + timedelta(seconds=int.from_bytes(seconds, "big"))
    return launches


def _word(key: bytes, at: datetime) -> str:
    seconds = int((at - _EPOCH).total_seconds())
    return base64.urlsafe_b64encode(key + seconds.to_bytes(_TIME_BYTES, "big")).decode()
