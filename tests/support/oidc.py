"""An OpenID Connect provider on loopback, over TLS: discovery, keys, and tokens that they sign."""

import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.support.certificates import Authority

AUDIENCE = "gpu-autoscaler"
_Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


class Provider:
    """Signs tokens. `body_padding` makes its answers large; `is_away` lets them fail."""

    def __init__(self) -> None:
        self.url = ""
        self.ca = Path()
        self.reads_count = 0  # of the keys
        self.is_away = False
        self.configured_issuer: str | None = None  # None: its own
        self.body_padding = ""
        self.keys: dict[str, _Key] = {}
        self.add_key("first")

    def add_key(self, name: str) -> None:
        """Publish one key more: EC if its name says so."""
        is_ec = name.startswith("ec")
        self.keys[name] = ec.generate_private_key(ec.SECP256R1()) if is_ec else rsa.generate_private_key(65537, 2048)

    def token(self, *, key: str = "first", signer: _Key | None = None, **claims: Any) -> str:  # noqa: ANN401
        """Return a token; a claim of None is left out."""
        now = int(time.time())
        all_claims = {"iss": self.url, "aud": AUDIENCE, "sub": "anna", "iat": now, "exp": now + 600, **claims}
        named = {name: value for name, value in all_claims.items() if value is not None}
        private = signer or self.keys[key]
        algorithm = "ES256" if isinstance(private, ec.EllipticCurvePrivateKey) else "RS256"
        return jwt.encode(named, private, algorithm=algorithm, headers={"kid": key})

    async def configuration(self, _: web.Request) -> web.Response:
        """Answer the discovery."""
        self._answer()
        document = {"issuer": self.configured_issuer or self.url, "jwks_uri": f"{self.url}/keys"}
        return web.json_response(document | {"padding": self.body_padding})

    async def published_keys(self, _: web.Request) -> web.Response:
        """Answer with the public keys."""
        self._answer()
        self.reads_count += 1
        documents = []
        for name, key in self.keys.items():
            kind = jwt.algorithms.ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else None
            text = (kind or jwt.algorithms.RSAAlgorithm).to_jwk(key.public_key())  # type: ignore[arg-type]
            documents.append({**json.loads(text), "kid": name, "use": "sig"})
        return web.json_response({"keys": documents})

    def _answer(self) -> None:
        if self.is_away:
            raise web.HTTPServiceUnavailable


@contextlib.asynccontextmanager
async def serving_provider(folder: Path) -> AsyncIterator[Provider]:
    """Serve a provider on a free port."""
    authority, provider = Authority(folder / "provider"), Provider()
    pair = authority.signed("provider", "IP:127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", provider.configuration)
    app.router.add_get("/keys", provider.published_keys)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        provider.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        provider.ca = authority.certificate
        yield provider
    finally:
        await runner.cleanup()
