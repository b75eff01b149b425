"""Identifiers, and ids derived from their cause. Imports nothing of this project."""

import hashlib
from typing import NewType

FactId = NewType("FactId", str)
JobId = NewType("JobId", str)
PodUid = NewType("PodUid", str)
NodeUid = NewType("NodeUid", str)
ProviderId = NewType("ProviderId", str)  # Kubernetes' spec.providerID, e.g. aws:///eu-west-1a/i-0abc
ActionId = NewType("ActionId", str)  # one decision of one plan; idempotency token and tag of what it buys
PlanId = NewType("PlanId", str)


def derive_id(*parts: object) -> str:
    """Return 32 hex digits that depend on all parts and their order. Equal parts, equal id, on any machine."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = str(part).encode()
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return digest.hexdigest()
