"""Kubernetes tokens: owner and permissions, reviewed once a minute."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.front import front

from gpu_autoscaler_services.gateway.auth import Caller, TokenReviews
from gpu_autoscaler_services.gateway.spec import Gateway


class Reviews:
    """Kubernetes' two review APIs for given users: token -> (name, verbs)."""

    def __init__(self, users: Mapping[str, tuple[str, frozenset[str]]]) -> None:
        self.users = users
        self.reviews_count = 0

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer as the API server does (Kubernetes API reference, TokenReview and SubjectAccessReview)."""
        self.reviews_count += 1
        spec = body["spec"]
        if path.endswith("/tokenreviews"):
            if spec["token"] not in self.users:
                return {"status": {"error": "unknown"}}
            name = self.users[spec["token"]][0]
            return {"status": {"authenticated": True, "user": {"username": name, "groups": ["staff"]}}}
        verbs = next(verbs for name, verbs in self.users.values() if name == spec["user"])
        return {"status": {"allowed": spec["resourceAttributes"]["verb"] in verbs}}


@pytest.mark.parametrize(
    ("verbs", "caller"),
    [
        (frozenset({"get", "create"}), Caller("anna", may_write=True)),
        (frozenset({"get"}), Caller("anna", may_write=False)),
        (frozenset({"create"}), None),
    ],
)
async def test_kubernetes_decides_what_a_caller_may_do(verbs: frozenset[str], caller: Caller | None) -> None:
    """`get` grants reading, `create` writing; without `get` a caller is refused."""
    assert await TokenReviews(Reviews({"t": ("anna", verbs)})).caller("t") == caller


async def test_a_token_is_reviewed_once_a_minute() -> None:
    """Unknown tokens are cached too, so that guessing does not load the API server."""
    reviews = Reviews({"t": ("anna", frozenset({"get"}))})
    tokens = TokenReviews(reviews)

    for _ in range(3):
        assert await tokens.caller("t") is not None
        assert await tokens.caller("guess") is None

    assert reviews.reviews_count == 4


async def test_keys_expire_after_a_day(tmp_path: Path) -> None:
    """The tick deletes old keys and keeps recent ones."""
    async with front(tmp_path) as gate:
        store, now = gate.model.store, datetime(2026, 11, 21, tzinfo=UTC)
        await store.begin_request("old", request_digest="d", started_at=now - timedelta(days=2) - timedelta(seconds=1))
        await store.begin_request("recent", request_digest="d", started_at=now)

        assert await Gateway(store, timedelta(days=2)).on_tick(now) == ()

        assert await store.begin_request("old", request_digest="other", started_at=now) is None
        assert await store.begin_request("recent", request_digest="other", started_at=now) is not None
