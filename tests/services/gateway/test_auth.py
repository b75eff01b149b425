"""Kubernetes tokens and rights: whose they are and what they grant, reviewed at intervals."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.front import front

from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.api_rights import API_GROUP, FREEZE, READ_COSTS, READ_JOBS, RIGHTS, SUBMIT_JOBS, ApiRight
from gpu_autoscaler_services.gateway import access
from gpu_autoscaler_services.gateway.access import (
    GRANT_SECONDS_MAX,
    REFUSAL_SECONDS_MAX,
    AccessReviews,
    Caller,
    CheckedNamespaces,
    namespaces_of,
)
from gpu_autoscaler_services.gateway.auth import TOKEN_AUDIENCE, TokenReviews
from gpu_autoscaler_services.gateway.spec import Gateway

CLUSTER = "https://kubernetes.default.svc"
ANNA = Caller(name="anna")
Grant = tuple[str, str, str, str]
NO_GRANTS: Mapping[str, frozenset[Grant]] = {}


class Reviews:
    """Kubernetes' two review APIs: token -> (name, audience); name -> granted (verb, resource, group, namespace)."""

    def __init__(
        self, tokens: Mapping[str, tuple[str, str]], grants: Mapping[str, frozenset[Grant]] = NO_GRANTS
    ) -> None:
        self.tokens = tokens
        self.grants = grants
        self.asked: list[Mapping[str, Any]] = []

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer as the API server does (Kubernetes API reference, TokenReview and SubjectAccessReview)."""
        spec = body["spec"]
        self.asked.append(spec)
        if path.endswith("/tokenreviews"):
            name, audience = self.tokens.get(spec["token"], ("", ""))
            if audience not in spec.get("audiences", [CLUSTER]):
                return {"status": {"error": "unknown"}}
            return {"status": {"authenticated": True, "audiences": [audience], "user": {"username": name}}}
        asked = spec["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource", ""))))
        wanted = (asked["verb"], resource, asked["group"])
        granted = self.grants.get(spec["user"], frozenset())
        return {"status": {"allowed": bool({(*wanted, asked.get("namespace", "")), (*wanted, "")} & granted)}}


@pytest.mark.parametrize(
    ("token", "accepts_cluster_tokens", "name"),
    [("ours", True, "anna"), ("ours", False, "anna"), ("clusters", True, "bob"), ("clusters", False, None)],
)
async def test_a_token_is_for_us_or_for_the_api_server(
    token: str,
    accepts_cluster_tokens: bool,  # noqa: FBT001 - a parameter of the test
    name: str | None,
) -> None:
    """A token of our audience always; one of the API server only if the settings accept it."""
    reviews = Reviews({"ours": ("anna", TOKEN_AUDIENCE), "clusters": ("bob", CLUSTER)})
    caller = await TokenReviews(reviews, is_cluster_token_accepted=accepts_cluster_tokens).caller(token)
    assert (caller and caller.name) == name


async def test_a_token_is_reviewed_once_a_minute() -> None:
    """Unknown tokens are cached too, so that guessing does not load the API server."""
    reviews = Reviews({"t": ("anna", TOKEN_AUDIENCE)})
    tokens = TokenReviews(reviews)

    for _ in range(3):
        assert await tokens.caller("t") is not None
        assert await tokens.caller("guess") is None

    assert [spec["token"] for spec in reviews.asked] == ["t", "guess", "guess"]


async def test_a_grant_is_remembered_for_a_minute_and_a_refusal_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was refused does not wait long after the grant."""
    now = 1000.0
    monkeypatch.setattr(Clock, "monotonic_seconds", lambda: now)
    reviews = Reviews({}, {"anna": frozenset({("get", "costs", API_GROUP, "system")})})
    rights = AccessReviews(reviews, is_single_right_accepted=False)

    async def asks(right: ApiRight) -> int:
        before = len(reviews.asked)
        await rights.allows(ANNA, right, "system")
        return len(reviews.asked) - before

    assert [await asks(READ_COSTS), await asks(FREEZE), await asks(READ_COSTS), await asks(FREEZE)] == [1, 1, 0, 0]
    now += REFUSAL_SECONDS_MAX + 1
    assert [await asks(READ_COSTS), await asks(FREEZE)] == [0, 1]
    now += GRANT_SECONDS_MAX
    assert await asks(READ_COSTS) == 1


async def test_remembered_reviews_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one unused for longest is forgotten: names of projects come from callers."""
    monkeypatch.setattr(access, "REVIEWS_COUNT_MAX", 2)
    reviews = Reviews({})
    rights = AccessReviews(reviews, is_single_right_accepted=False)
    for namespace in ("a", "b", "a", "c"):
        await rights.allows(ANNA, READ_JOBS, namespace)
    assert len(reviews.asked) == 3

    await rights.allows(ANNA, READ_JOBS, "a")
    assert len(reviews.asked) == 3, "a was used last"
    await rights.allows(ANNA, READ_JOBS, "b")
    assert len(reviews.asked) == 4


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("verbs", [(), ("get",), ("create",), ("get", "create")])
async def test_the_single_right_of_0_2_grants_what_it_did(right: ApiRight, verbs: tuple[str, ...]) -> None:
    """In all namespaces `get` reads everything, and `get` with `create` writes everything; `create` alone nothing."""
    grants = {"anna": frozenset((verb, "jobs", "gpu-autoscaler.io", "") for verb in verbs)}
    expected = "get" in verbs and (right.verb == "get" or "create" in verbs)

    assert await AccessReviews(Reviews({}, grants)).allows(ANNA, right, "research") is expected
    assert not await AccessReviews(Reviews({}, grants), is_single_right_accepted=False).allows(ANNA, right, "research")


async def test_the_single_right_in_one_namespace_grants_nothing() -> None:
    """0.2 looked at all namespaces alone."""
    grants = {"anna": frozenset((verb, "jobs", "gpu-autoscaler.io", "research") for verb in ("get", "create"))}
    assert not await AccessReviews(Reviews({}, grants)).allows(ANNA, SUBMIT_JOBS, "research")


def test_a_project_is_checked_in_its_namespace() -> None:
    """That of the settings, else that of all others, else the project's name; the rest in the release's."""
    checked = CheckedNamespaces(namespace="system", by_project=namespaces_of(["research=team-r", "*=jobs"]))
    assert checked.of(SUBMIT_JOBS, "research") == "team-r"
    assert checked.of(SUBMIT_JOBS, "vision") == "jobs"
    assert checked.of(FREEZE, "research") == "system"
    assert CheckedNamespaces(namespace="system").of(SUBMIT_JOBS, "vision") == "vision"


async def test_keys_expire_after_a_day(tmp_path: Path) -> None:
    """The tick deletes old keys and keeps recent ones."""
    async with front(tmp_path) as gate:
        store, now = gate.model.store, datetime(2026, 11, 21, tzinfo=UTC)
        await store.begin_request("old", request_digest="d", started_at=now - timedelta(days=2) - timedelta(seconds=1))
        await store.begin_request("recent", request_digest="d", started_at=now)

        assert await Gateway(store, timedelta(days=2), timedelta(days=2)).on_tick(now) == ()

        assert await store.begin_request("old", request_digest="other", started_at=now) is None
        assert await store.begin_request("recent", request_digest="other", started_at=now) is not None
