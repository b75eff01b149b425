"""What a node watcher reports about its own instance, and the answer: requests on the broker, never stored.

The subject names the instance, because the broker's permissions are about subjects. The body names none, so that it
cannot name another one.
"""

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.observed import Instant

REPORT_ROOT = "node_report"
ALL_REPORTS = f"{REPORT_ROOT}.*"
WATCHER_INBOXES = "_INBOX_node_watcher"
NOTICES_COUNT_MAX = 16  # of one instance at a time; clouds show one or two
REPORT_BYTES_MAX = 16 * 1024
DRAINED_COUNT_MAX = 500
_PROVIDER_ID_LENGTH_MAX = 300


class ShownNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice as the metadata shows it (`protocol.py: ReclaimNotice`)."""

    kind: NoticeKind
    provider_event: Annotated[str, Meta(min_length=1, max_length=128)]
    reclaim_at: Instant | None = None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that the metadata of one instance shows now. No notices: the cloud has withdrawn those it showed before."""

    shown: Annotated[tuple[ShownNotice, ...], Meta(max_length=NOTICES_COUNT_MAX)] = ()
    rebalance_at: Instant | None = None  # None: not recommended
    needs_drained: bool = False  # the answer lists drained instances


class ReportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a report."""

    is_settled: bool = False  # the state knows all of it; otherwise it was taken and is to be repeated
    error: str | None = None  # why it was refused; repeating it does not help
    drained: tuple[ProviderId, ...] = ()  # if needed: drained instances, at most DRAINED_COUNT_MAX


_decoder = msgspec.json.Decoder(NodeReport)


def instance_token(provider_id: ProviderId) -> str:
    """Return the provider id as one token of a subject."""
    return base64.urlsafe_b64encode(provider_id.encode()).decode().rstrip("=")


def report_subject(provider_id: ProviderId) -> str:
    """Return the subject of an instance's reports."""
    return f"{REPORT_ROOT}.{instance_token(provider_id)}"


def watcher_inbox(provider_id: ProviderId) -> str:
    """Return the prefix of the subjects on which a watcher receives answers: its own, so that no other reads them."""
    return f"{WATCHER_INBOXES}.{instance_token(provider_id)}"


def reporting_instance(subject: str) -> ProviderId:
    """Return the instance that a report is about. Raises InvalidFact for another subject."""
    root, _, token = subject.partition(".")
    try:
        provider_id = ProviderId(
            base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
        )
    except (binascii.Error, ValueError) as exc:
        raise InvalidFact(f"{subject[:100]!r} names no instance: {exc}") from exc
    # One instance has one subject: another spelling of the token would not be the one that credentials allow.
    if (
        root != REPORT_ROOT
        or not 0 < len(provider_id) <= _PROVIDER_ID_LENGTH_MAX
        or report_subject(provider_id) != subject
    ):
        raise InvalidFact(f"{subject[:100]!r} is not the subject of an instance's reports")
    return provider_id


def read_report(payload: bytes) -> NodeReport:
    """Return the report. Raises InvalidFact naming the field."""
    if len(payload) > REPORT_BYTES_MAX:
        raise InvalidFact(f"report of {len(payload)} bytes; at most {REPORT_BYTES_MAX} are allowed")
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidFact(f"invalid report: {exc}") from exc
