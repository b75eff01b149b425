"""Idempotency tokens in the formats that clouds accept."""

import hashlib
import uuid

from gpu_autoscaler.model.ids import ActionId


def idempotency_token(installation: str, action_id: ActionId) -> str:
    """Return 32 hex digits of SHA-256. Two installations in one account never share a token."""
    return hashlib.sha256(f"{installation}/{action_id}".encode()).hexdigest()[:32]


def idempotency_uuid(installation: str, action_id: ActionId, *, attempt: int = 0) -> str:
    """Return the token as a UUID, for clouds that accept nothing else; each attempt has its own. For clouds that repeat
    their first answer to a token, even a refusal: there a new attempt has to be a new request."""
    attempt_id = action_id if attempt == 0 else ActionId(f"{action_id}/{attempt}")
    return str(uuid.UUID(hex=idempotency_token(installation, attempt_id)))
