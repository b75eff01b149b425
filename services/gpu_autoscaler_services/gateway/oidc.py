"""Tokens of an OpenID Connect provider: signed by one of its keys, for our audience. Claims name user and groups.

Source: OpenID Connect Discovery 1.0, section 4; RFC 7517 "JSON Web Key"; RFC 8725 "JSON Web Token Best Current
Practices", section 3 (read 2026-11-23).
"""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import jwt
import msgspec
import structlog

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.gateway.access import Caller
from gpu_autoscaler_services.gateway.problems import unauthorized

# Asymmetric ones alone: with a shared secret, whoever verifies can sign.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
CALL_SECONDS_MAX = 5.0
ANSWER_BYTES_MAX = 256 * 1024
KEYS_COUNT_MAX = 100
KEYS_SECONDS_MAX = 3600.0  # keys are read again after this; a removed key is accepted for as long
# Keys that cannot be read again are used for this long. Providers announce a key days before they sign with it.
KEYS_OLD_SECONDS_MAX = 24 * 3600.0
REFRESH_SECONDS_MIN = 30.0  # between two reads, whatever keys tokens name
LEEWAY_SECONDS = 30.0  # between the clocks of provider and gateway
GROUPS_COUNT_MAX = 1000
TOKEN_BYTES_MAX = 32 * 1024

log = structlog.get_logger()


class OidcOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A provider, and how its claims name users. Prefixes keep its names apart from those of Kubernetes."""

    issuer: str
    audience: str
    user_claim: str = "sub"
    user_prefix: str = "oidc:"
    groups_claim: str = "groups"
    groups_prefix: str = "oidc:"
    ca_path: str | None = None  # PEM; None: the authorities of the system


class _Configuration(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _Keys(msgspec.Struct):
    keys: list[dict[str, Any]]


class OidcTokens:
    """Identifies the owners of a provider's tokens. Keys are read when the first token arrives."""

    def __init__(self, options: OidcOptions) -> None:
        """Raises ConfigError for an unreadable file of authorities."""
        self._options = options
        try:
            self._tls = ssl.create_default_context(cafile=options.ca_path)
        except OSError as error:
            raise ConfigError("gateway", [f"oidc_ca_path: {options.ca_path} cannot be read: {error}"]) from error
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at = self._tried_at = float("-inf")
        self._turn = asyncio.Lock()

    async def caller(self, token: str) -> Caller | None:
        """Return the token's owner; None for a token of another issuer.

        Raises a 401 with the reason for one of the issuer that is not valid, TransientError without keys.
        """
        if len(token) > TOKEN_BYTES_MAX or not self._is_issuers(token):
            return None
        options = self._options
        key = await self._key_of(token)
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=options.audience,
                issuer=options.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", options.user_claim]},
            )
        except jwt.PyJWTError as error:
            raise unauthorized(f"token of {options.issuer} refused: {error}; get a new one") from error
        return self._caller(claims)

    def _is_issuers(self, token: str) -> bool:
        try:
            claims = jwt.decode(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return False  # no JSON Web Token
        return claims.get("iss") == self._options.issuer

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        options = self._options
        user = claims[options.user_claim]
        if not isinstance(user, str) or not user:
            raise unauthorized(f"the claim {options.user_claim!r} of the token is not a text")
        # As Kubernetes does: anybody may claim an address that nobody has verified.
        if options.user_claim == "email" and claims.get("email_verified", True) is not True:
            raise unauthorized("the provider has not verified the e-mail address of the token")
        groups = claims.get(options.groups_claim, [])
        groups = [groups] if isinstance(groups, str) else groups
        if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
            raise unauthorized(f"the claim {options.groups_claim!r} of the token is not a list of texts")
        if len(groups) > GROUPS_COUNT_MAX:
            raise unauthorized(f"the token has {len(groups)} groups; at most {GROUPS_COUNT_MAX} are allowed")
        # Kubernetes adds this group to every authenticated user.
        named = (*(f"{options.groups_prefix}{group}" for group in groups), "system:authenticated")
        return Caller(name=f"{options.user_prefix}{user}", groups=named, authentication="oidc")

    async def _key_of(self, token: str) -> jwt.PyJWK:
        """Return the key that the token names, from memory or read again. Raises a 401 for an unknown one."""
        name = str(jwt.get_unverified_header(token).get("kid", ""))
        if name in self._keys and Clock.monotonic_seconds() - self._read_at <= KEYS_SECONDS_MAX:
            return self._keys[name]
        async with self._turn:  # tokens that arrive meanwhile need no read of their own
            now = Clock.monotonic_seconds()
            is_old = now - self._read_at > KEYS_SECONDS_MAX
            if (is_old or name not in self._keys) and now - self._tried_at >= REFRESH_SECONDS_MIN:
                await self._refresh(now)
            if now - self._read_at > KEYS_OLD_SECONDS_MAX:
                raise TransientError(
                    f"keys of {self._options.issuer} cannot be read; see the gateway's log",
                    retry_after_seconds=REFRESH_SECONDS_MIN,
                )
        key = self._keys.get(name)
        if key is None:
            raise unauthorized(f"token of {self._options.issuer} refused: it has no key {name[:100]!r}; get a new one")
        return key

    async def _refresh(self, now: float) -> None:
        self._tried_at = now
        try:
            self._keys = await self._read_keys()
            self._read_at = now
        except (aiohttp.ClientError, msgspec.MsgspecError, TimeoutError, OSError, ValueError) as error:
            log.warning(
                "keys of the identity provider not read, known ones are used", issuer=self._options.issuer,
                known_count=len(self._keys), error=str(error) or type(error).__name__,
            )  # fmt: skip

    async def _read_keys(self) -> dict[str, jwt.PyJWK]:
        issuer = self._options.issuer
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS_MAX)
        connector = aiohttp.TCPConnector(ssl=self._tls)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=True) as session:
            path = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
            configuration = msgspec.json.decode(await _body(session, path), type=_Configuration)
            if configuration.issuer != issuer:
                raise ValueError(f"its configuration is that of {configuration.issuer[:200]!r}")
            if urlsplit(configuration.jwks_uri).scheme != urlsplit(issuer).scheme:
                raise ValueError(f"jwks_uri {configuration.jwks_uri[:200]!r} has another scheme than the issuer")
            answer = msgspec.json.decode(await _body(session, configuration.jwks_uri), type=_Keys)
        return _signing_keys(answer.keys)


def _signing_keys(documents: list[dict[str, Any]]) -> dict[str, jwt.PyJWK]:
    """Return the keys for signatures by their id. Raises ValueError without any, and for too many."""
    if len(documents) > KEYS_COUNT_MAX:
        raise ValueError(f"{len(documents)} keys; at most {KEYS_COUNT_MAX} are read")
    keys = {}
    for document in documents:
        if document.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(document)
        except jwt.PyJWTError:
            continue  # of a kind that we do not know
        if key.algorithm_name in ALGORITHMS:
            keys[str(document.get("kid", ""))] = key
    if not keys:
        raise ValueError("no key for signatures with a known algorithm")
    return keys


async def _body(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url, allow_redirects=False) as response:
        response.raise_for_status()
        if response.status != 200:
            raise ValueError(f"{url} answered {response.status}")
        body = await response.content.read(ANSWER_BYTES_MAX + 1)
        while len(body) <= ANSWER_BYTES_MAX and (more := await response.content.read(ANSWER_BYTES_MAX + 1 - len(body))):
            body += more
    if len(body) > ANSWER_BYTES_MAX:
        raise ValueError(f"{url} answered with more than {ANSWER_BYTES_MAX} bytes")
    return body
