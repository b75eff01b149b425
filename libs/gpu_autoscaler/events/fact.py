"""What every fact is: a frozen struct whose class name is its subject, type, stream and schema name (one grammar)."""

import re
from functools import cache
from typing import ClassVar

import msgspec

_WORD = re.compile(r"[A-Z][a-z0-9]*")


@cache  # of the few hundred names that the code has: each message asks for its own
def _words(class_name: str) -> tuple[str, str]:
    """The domain, and the domain with what happened in it."""
    first, *rest = (word.lower() for word in _WORD.findall(class_name))
    return first, f"{first}.{'_'.join(rest)}"


# Frozen and made of frozen things: there are no cycles for the collector to find, here and in all structs of this kind.
# It looked through the whole state with every few thousand messages that were read.
class Fact(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something that happened. New fields have defaults; a field's meaning never changes, else a `v2` with an upcast.

    `SpotNoticeReceived` is subject `spot.notice_received`, type `spot.notice_received.v1`, stream `SPOT`.
    """

    VERSION: ClassVar[int] = 1

    @classmethod
    def domain(cls) -> str:
        """First word of the name: `spot`."""
        return _words(cls.__name__)[0]

    @classmethod
    def subject_root(cls) -> str:
        """The two tokens of the subject: `spot.notice_received`."""
        return _words(cls.__name__)[1]

    @classmethod
    def type_name(cls) -> str:
        """CloudEvents type: `spot.notice_received.v1`."""
        return f"{cls.subject_root()}.v{cls.VERSION}"

    @classmethod
    def stream(cls) -> str:
        """JetStream stream: `SPOT`."""
        return cls.domain().upper()

    def subject(self) -> str:
        """Subject that this very fact is published on; only telemetry adds a third token."""
        return self.subject_root()

    def condition(self) -> str | None:
        """Name of the standing condition that makes this fact unique (becomes its id), or None: id from the cause."""
        return None

    def entity(self) -> str | None:
        """What the fact is about, to follow a story: `job/<id>`, `node/<uid>`; None: the cluster."""
        return None


class Versioned(Fact, frozen=True, kw_only=True):
    """A fact about an entity with the source's own count. Older or equal versions of a source are ignored by fold.

    `epoch` is raised when the source starts over (for Kubernetes: creation second of the kube-system namespace);
    `version` is the source's count within the epoch (for Kubernetes: resourceVersion).
    """

    epoch: int
    version: int
