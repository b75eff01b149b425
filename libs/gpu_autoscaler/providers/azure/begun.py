"""Which orders a flexible scale set has been asked for: written on the set before a machine is made, and kept there.

Azure shows nothing of a machine that is gone, and its name is free again: a token that is used once more, by a process
that has just started, would make a second one. So whoever makes a machine first writes the order into tags of the set,
under its ETag; an order that stands there already is looked for, and never made again. Orders that come at once are
written by one call.

The newest are kept, of which each takes twelve characters; an order that was taken for another's by its five bytes
would be told as ended, and ordered anew. Source of the limits: Azure documentation, "Use tags to organize your Azure
resources" (read 2026-11-22).
"""

import base64
import binascii
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.translate import BEGUN_TAG
from gpu_autoscaler.providers.protocol import LaunchRefused
from gpu_autoscaler.providers.shared_reads import SharedRead

TAGS_MAX, TAG_LENGTH_MAX = 40, 256  # of the fifty that a resource has; some are other people's
UPDATE = "VirtualMachineScaleSets_Update"
TRIES_MAX = 5  # with a set that others change as well
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)
_DIGEST_BYTES, _TIME_BYTES = 5, 4
_WORD_LENGTH = (_DIGEST_BYTES + _TIME_BYTES) * 4 // 3
ORDERS_MAX = TAG_LENGTH_MAX // _WORD_LENGTH * TAGS_MAX

Begun = Mapping[bytes, datetime]  # when each order was first begun, by digest of the machine's name


class BegunOrders:
    """What stands on one flexible scale set."""

    def __init__(self, calls: AzureClient, scale_set: str) -> None:
        self._calls = calls
        self._scale_set = scale_set
        self._wanted: dict[bytes, datetime] = {}
        self._writing = SharedRead(self._write)
        self._unmade: deque[bytes] = deque(maxlen=ORDERS_MAX)  # begun by us, and known to have made nothing

    async def begin(self, name: str, now: datetime) -> datetime | None:
        """See that the order of this machine stands on the set; return since when, None if nothing was made of it yet.

        Raises LaunchRefused, PermanentError, TransientError: then it may stand there, or not.
        """
        key = digest_of(name)
        self._wanted.setdefault(key, now)
        begun = await self._writing.fresh()
        return None if key in self._unmade else begun.get(key)

    def making(self, name: str) -> None:
        """The machine is asked for now."""
        self._forget({digest_of(name)})

    def unmade(self, name: str) -> None:
        """Nothing was made after all: the order may be begun anew."""
        self._unmade.append(digest_of(name))

    def _forget(self, keys: set[bytes]) -> None:
        for key in keys.intersection(self._unmade):
            self._unmade.remove(key)

    async def _write(self) -> Begun:
        """Add what is wanted; return what stood there before."""
        wanted, self._wanted = self._wanted, {}
        new: set[bytes] = set()
        for _ in range(TRIES_MAX):
            told = await self._calls.find("VirtualMachineScaleSets_Get", scale_set=self._scale_set)
            if told is None:
                raise LaunchRefused(
                    f"there is no scale set {self._scale_set} in {self._calls.group_id}; see azure.scale_set",
                    code="NoScaleSet",
                    kind="configuration",
                    scope="offer",
                )
            tags: Mapping[str, str] = told.get("tags") or {}
            known = read_begun(text for name, text in tags.items() if name.startswith(BEGUN_TAG))
            self._forget(new)  # what we have written was not taken: who stands there now was faster
            new = wanted.keys() - known.keys()
            if not new:
                return known
            self._unmade.extend(new)
            others = {name: text for name, text in tags.items() if not name.startswith(BEGUN_TAG)}
            texts = texts_of({**wanted, **known})
            body = {"tags": others | {f"{BEGUN_TAG}{number}": text for number, text in enumerate(texts)}}
            headers = {"If-Match": str(told["etag"])}
            written = await self._calls.ask(UPDATE, body=body, headers=headers, scale_set=self._scale_set)
            if written.status != 412:
                self._calls.seen(UPDATE, written)
                return known
        raise TransientError(f"{UPDATE}: {self._scale_set} was changed by others {TRIES_MAX} times; asked again")


def digest_of(name: str) -> bytes:
    """Return what an order is remembered by."""
    return hashlib.sha256(name.encode()).digest()[:_DIGEST_BYTES]


def texts_of(begun: Begun) -> list[str]:
    """Return the newest orders as texts of tags; as many as there is room for."""
    newest = sorted(begun.items(), key=lambda one: (one[1], one[0]))[-ORDERS_MAX:]
    whole = "".join(_word(key, at) for key, at in newest)
    length = TAG_LENGTH_MAX // _WORD_LENGTH * _WORD_LENGTH
    return [whole[start : start + length] for start in range(0, len(whole), length)]


def read_begun(texts: Iterable[str]) -> Begun:
    """Return what the texts say; one that cannot be read, as people may write there too, is skipped."""
    found: dict[bytes, datetime] = {}
    for text in texts:
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            continue
        size = _DIGEST_BYTES + _TIME_BYTES
        for start in range(0, len(raw) - size + 1, size):
            key, seconds = raw[start : start + _DIGEST_BYTES], raw[start + _DIGEST_BYTES : start + size]
            found[key] = _EPOCH + timedelta(seconds=int.from_bytes(seconds, "big"))
    return found


def _word(key: bytes, at: datetime) -> str:
    seconds = int((at - _EPOCH).total_seconds())
    return base64.urlsafe_b64encode(key + seconds.to_bytes(_TIME_BYTES, "big")).decode()
