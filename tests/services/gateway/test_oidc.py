"""Tokens of an identity provider: whose they are, and every way in which one is not valid."""

import base64
import hmac
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.oidc import AUDIENCE, Provider, serving_provider

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.gateway import oidc
from gpu_autoscaler_services.gateway.oidc import (
    KEYS_OLD_SECONDS_MAX,
    KEYS_SECONDS_MAX,
    LEEWAY_SECONDS,
    REFRESH_SECONDS_MIN,
    OidcOptions,
    OidcTokens,
)
from gpu_autoscaler_services.gateway.problems import Problem


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider with one key."""
    async with serving_provider(tmp_path) as served:
        yield served


class Time:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Time that only the test moves."""
    moved = Time()
    monkeypatch.setattr(Clock, "monotonic_seconds", moved)
    return moved


def tokens_of(provider: Provider, **options: Any) -> OidcTokens:  # noqa: ANN401 - fields of the options
    """Return what checks the provider's tokens."""
    return OidcTokens(OidcOptions(issuer=provider.url, audience=AUDIENCE, ca_path=str(provider.ca), **options))


async def test_claims_name_user_and_groups(provider: Provider) -> None:
    """With prefixes, so that nobody takes a name of Kubernetes; keys of two kinds sign."""
    provider.add_key("ec-second")
    for key in ("first", "ec-second"):
        caller = await tokens_of(provider).caller(provider.token(key=key, groups=["research", "system:masters"]))
        assert caller is not None
        assert (caller.name, caller.has_all_rights) == ("oidc:anna", False)
        assert caller.groups == ("oidc:research", "oidc:system:masters", "system:authenticated")

    options = {"user_claim": "email", "user_prefix": "", "groups_claim": "roles", "groups_prefix": "r/"}
    caller = await tokens_of(provider, **options).caller(
        provider.token(email="anna@example.com", email_verified=True, roles="ops")
    )
    assert caller is not None
    assert (caller.name, caller.groups) == ("anna@example.com", ("r/ops", "system:authenticated"))


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": int(time.time()) - LEEWAY_SECONDS - 5}, "expired"),
        ({"exp": None}, 'missing the "exp" claim'),
        ({"nbf": int(time.time()) + 3600}, "not yet valid"),
        ({"aud": "another-program"}, "Audience"),
        ({"aud": None}, 'missing the "aud" claim'),
        ({"sub": None}, 'missing the "sub" claim'),
        ({"sub": ""}, "'sub' of the token is not a text"),
        ({"groups": 7}, "'groups' of the token is not a list of texts"),
        ({"groups": [7]}, "'groups' of the token is not a list of texts"),
        ({"groups": ["g"] * 1001}, "1001 groups; at most 1000"),
    ],
)
async def test_a_token_that_is_not_valid_is_refused_with_the_reason(
    provider: Provider, claims: dict[str, Any], reason: str
) -> None:
    """The caller reads what is wrong with a token that the provider signed."""
    with pytest.raises(Problem, match=reason) as refused:
        await tokens_of(provider).caller(provider.token(**claims))
    assert refused.value.status == 401


async def test_an_address_that_nobody_verified_is_no_user(provider: Provider) -> None:
    """Anybody may claim it."""
    token = provider.token(email="a@example.com", email_verified=False)
    with pytest.raises(Problem, match="not verified the e-mail"):
        await tokens_of(provider, user_claim="email").caller(token)


def signed_with_secret(claims: dict[str, Any], secret: bytes) -> str:
    """Return a token signed with a shared secret; libraries refuse to sign with a public key."""
    parts = ({"alg": "HS256", "kid": "first"}, claims)
    text = ".".join(_encoded(json.dumps(part).encode()) for part in parts)
    return f"{text}.{_encoded(hmac.digest(secret, text.encode(), 'sha256'))}"


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


async def test_a_signature_of_somebody_else_is_refused(provider: Provider) -> None:
    """Another key under a known name, no signature at all, and the public key as a shared secret."""
    tokens, claims = tokens_of(provider), {"iss": provider.url, "aud": AUDIENCE, "sub": "anna", "exp": 2**32}
    other = rsa.generate_private_key(65537, 2048)
    public = (
        provider.keys["first"]
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for forged in (
        provider.token(signer=other),
        jwt.encode(claims, "", algorithm="none", headers={"kid": "first"}),
        signed_with_secret(claims, public),
    ):
        with pytest.raises(Problem, match="refused"):
            await tokens.caller(forged)


async def test_a_token_of_another_issuer_is_left_to_others(provider: Provider) -> None:
    """Kubernetes reviews it; nothing is read for it."""
    tokens = tokens_of(provider)
    assert await tokens.caller(provider.token(iss="https://kubernetes.default.svc")) is None
    assert await tokens.caller("no-json-web-token") is None
    assert await tokens.caller("a" * 40_000) is None
    assert provider.reads_count == 0


async def test_a_new_key_is_found_and_a_removed_one_forgotten(provider: Provider, later: Time) -> None:
    """Keys are read when a token names an unknown one, at most twice a minute, and again after an hour."""
    tokens = tokens_of(provider)
    old = provider.token()
    assert await tokens.caller(old) is not None
    provider.add_key("second")
    with pytest.raises(Problem, match="no key 'second'"):
        await tokens.caller(provider.token(key="second"))
    assert provider.reads_count == 1
    later.now += REFRESH_SECONDS_MIN
    assert await tokens.caller(provider.token(key="second")) is not None
    for number in range(5):
        with pytest.raises(Problem, match="no key"):
            await tokens.caller(jwt.encode({"iss": provider.url}, "x" * 32, headers={"kid": f"guess-{number}"}))
    assert provider.reads_count == 2

    del provider.keys["first"]
    assert await tokens.caller(old) is not None, "until the keys are read again"
    later.now += KEYS_SECONDS_MAX + 1
    with pytest.raises(Problem, match="no key 'first'"):
        await tokens.caller(old)
    assert provider.reads_count == 3


async def test_a_provider_that_is_away_keeps_nobody_out_for_a_day(provider: Provider, later: Time) -> None:
    """Its last keys are used so long, then none; a gateway that has none answers that it cannot tell."""
    tokens = tokens_of(provider)
    assert await tokens.caller(provider.token()) is not None
    provider.is_away = True
    later.now += KEYS_OLD_SECONDS_MAX
    assert await tokens.caller(provider.token()) is not None
    later.now += REFRESH_SECONDS_MIN
    with pytest.raises(TransientError, match="cannot be read"):
        await tokens.caller(provider.token())
    with pytest.raises(TransientError, match="cannot be read"):
        await tokens_of(provider).caller(provider.token())
    provider.is_away = False
    later.now += REFRESH_SECONDS_MIN
    assert await tokens.caller(provider.token()) is not None


async def test_answers_of_a_provider_are_bounded(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large configuration, too many keys, and a configuration of another issuer are not used."""
    provider.body_padding = "x" * oidc.ANSWER_BYTES_MAX
    with pytest.raises(TransientError):
        await tokens_of(provider).caller(provider.token())
    provider.body_padding, provider.configured_issuer = "", "https://elsewhere.example"
    with pytest.raises(TransientError):
        await tokens_of(provider).caller(provider.token())
    provider.configured_issuer = None
    monkeypatch.setattr(oidc, "KEYS_COUNT_MAX", 1)
    provider.add_key("second")
    with pytest.raises(TransientError):
        await tokens_of(provider).caller(provider.token())
    del provider.keys["second"]
    assert await tokens_of(provider).caller(provider.token()) is not None


async def test_the_provider_proves_who_it_is(provider: Provider, tmp_path: Path) -> None:
    """By a certificate of the configured authority; a missing file is refused at the start."""
    with pytest.raises(TransientError):
        await OidcTokens(OidcOptions(issuer=provider.url, audience=AUDIENCE)).caller(provider.token())
    with pytest.raises(ConfigError, match="oidc_ca_path"):
        OidcTokens(OidcOptions(issuer=provider.url, audience=AUDIENCE, ca_path=str(tmp_path / "missing")))
