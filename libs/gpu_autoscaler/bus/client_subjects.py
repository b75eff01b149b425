"""Subjects that carry the identity of a client: `job.requested.<client>`, granted to one user of the broker each.

The broker maps them to `client_request.<kind>.<client>`, outside of every stream. The gateway answers them, and
publishes the fact on its own subject, so that every reader of a stream, those of 0.2 included, sees known subjects
alone. The broker checks permissions after the mapping (seen with nats-server 2.15): the mapped subjects are granted.
"""

import base64
import binascii

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.errors import InvalidFact

CLIENT_REQUEST_ROOT = "client_request"
ALL_CLIENT_REQUESTS = f"{CLIENT_REQUEST_ROOT}.*.*"
CLIENT_LENGTH_MAX = 150  # of a name; a subject has at most a few hundred characters
CLIENT_REQUESTS: tuple[type[Fact], ...] = (JobRequested, JobCancelRequested)
_KINDS = {fact.subject_root().replace(".", "_"): fact for fact in CLIENT_REQUESTS}
# Published subject -> the one that the gateway answers.
MAPPINGS = {
    f"{fact.subject_root()}.*": f"{CLIENT_REQUEST_ROOT}.{kind}.{{{{wildcard(1)}}}}" for kind, fact in _KINDS.items()
}


def client_token(client: str) -> str:
    """Return the client's name as one token of a subject: base64url without padding."""
    return base64.urlsafe_b64encode(client.encode()).decode().rstrip("=")


def client_subjects(client: str) -> tuple[str, ...]:
    """Return the subjects that a client may publish on."""
    return tuple(f"{CLIENT_REQUEST_ROOT}.{kind}.{client_token(client)}" for kind in _KINDS)


def read_client_subject(subject: str) -> tuple[type[Fact], str]:
    """Return what the client publishes, and its name. Raises InvalidFact for another subject."""
    root, kind, token = (*subject.split(".", 2), "", "")[:3]
    try:
        client = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as exc:
        raise InvalidFact(f"{subject[:100]!r} names no client: {exc}") from exc
    fact = _KINDS.get(kind)
    # One client has one subject: another spelling of the token would not be the one that its permissions allow.
    if root != CLIENT_REQUEST_ROOT or fact is None or not 0 < len(client) <= CLIENT_LENGTH_MAX:
        raise InvalidFact(f"{subject[:100]!r} is not the subject of a client's requests")
    if client_token(client) != token or not client.isprintable():
        raise InvalidFact(f"{subject[:100]!r} is another spelling of a client's subject")
    return fact, client
