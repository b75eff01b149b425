"""The token that makes a second try harmless, in the forms that clouds ask for."""

import hashlib
import uuid

from gpu_autoscaler.model.ids import ActionId


def idempotency_token(installation: str, action_id: ActionId) -> str:
    """Return 32 hex digits of SHA-256. Two installations in one account never share one."""
    return hashlib.sha256(f"{installation}/{action_id}".encode()).hexdigest()[:32]


def idempotency_uuid(installation: str, action_id: ActionId, *, attempt: int = 0) -> str:
    """Return the same token as a UUID, for clouds that take nothing else; a later attempt has one of its own.

    For clouds that answer a token with its first answer, a refusal too: a new attempt has to be a new request there.
    """
    named = action_id if attempt == 0 else ActionId(f"{action_id}/{attempt}")
    return str(uuid.UUID(hex=idempotency_token(installation, named)))
