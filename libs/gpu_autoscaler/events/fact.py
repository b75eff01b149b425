"""The base of all facts: frozen structs whose class name determines subject, type, stream and schema name."""

import re
from functools import cache
from typing import ClassVar

import msgspec

_WORD = re.compile(r"[A-Z][a-z0-9]*")


@cache  # a few hundred class names, looked up for every message
def _words(class_name: str) -> tuple[str, str]:
    """The domain, and the subject root."""
    first, *rest = (word.lower() for word in _WORD.findall(class_name))
    return first, f"{first}.{'_'.join(rest)}"


# gc=False: frozen structs of frozen values have no cycles. The collector scanned the whole state otherwise, every few
# thousand messages.
class Fact(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something that happened. New fields have defaults; a new meaning needs a `v2` and an upcast.

    `SpotNoticeReceived` is subject `spot.notice_received`, type `spot.notice_received.v1`, stream `SPOT`.
    """

    VERSION: ClassVar[int] = 1
    # Fields with an instant read from the publisher's clock that the fold measures ages by: a clock that is ahead is
    # corrected in them (`events/envelope.py: recorded`).
    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ()
    IS_PUBLIC: ClassVar[bool] = False  # anybody may publish it: its time is judged where it is admitted, not corrected

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
        """The subject of this fact; only telemetry adds a third token."""
        return self.subject_root()

    def condition(self) -> str | None:
        """Key that makes this fact unique, from which its id is derived; None: the id derives from the cause."""
        return None

    def entity(self) -> str | None:
        """The key of the object that the fact is about: `job/<id>`, `node/<uid>`; None: the cluster."""
        return None


class Versioned(Fact, frozen=True, kw_only=True):
    """A fact about an object with a version of its source. The fold ignores versions that are not newer.

    `epoch` is raised when the source starts over (for Kubernetes: creation second of the kube-system namespace);
    `version` is the source's count within the epoch (for Kubernetes: resourceVersion).
    """

    epoch: int  # rises when the source starts over; `version` counts within it
    version: int  # rises with each change at the source; of Kubernetes, the resourceVersion
