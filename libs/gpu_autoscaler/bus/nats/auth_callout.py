"""Auth callout: the server asks a service who a client is, and the service answers with the client's permissions.

Questions and answers are JSON Web Tokens, signed with Ed25519 by nkeys. The server believes answers of one issuer, an
account key whose public half is in its configuration.
Source: NATS documentation, "Auth Callout" and ADR-26, "NATS Authorization Callouts" (read 2026-11-23).
"""

import base64
import os
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import nkeys

from gpu_autoscaler.bus.permissions import Permissions
from gpu_autoscaler.model.errors import ConfigError, InvalidFact

CALLOUT_SUBJECT = "$SYS.REQ.USER.AUTH"
ACCOUNT = "$G"  # of a server without accounts
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError)


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """A client that wants to connect. Only the broker sends them: no other user may publish on CALLOUT_SUBJECT."""

    server_id: str
    user_key: str  # that the server has chosen for this connection
    token: str  # empty: the client has sent none
    user: str = ""
    host: str = ""


class _Server(msgspec.Struct):
    id: str


class _Client(msgspec.Struct):
    host: str = ""


class _Options(msgspec.Struct):
    auth_token: str = ""
    user: str = ""


class _Question(msgspec.Struct):
    server_id: _Server
    user_nkey: str
    client_info: _Client
    connect_opts: _Options


class _Claims(msgspec.Struct):
    nats: _Question


def read_login(payload: bytes) -> Login:
    """Return the login that the server asks about. Raises InvalidFact."""
    try:
        _, claims, _ = payload.split(b".")
        question = msgspec.json.decode(base64.urlsafe_b64decode(claims + b"=" * (-len(claims) % 4)), type=_Claims).nats
    except _UNREADABLE as exc:
        raise InvalidFact(
            f"question of the broker about a login is unreadable: {exc}; is it encrypted (xkey)?"
        ) from exc
    return Login(
        server_id=question.server_id.id,
        user_key=question.user_nkey,
        token=question.connect_opts.auth_token,
        user=question.connect_opts.user,
        host=question.client_info.host,
    )


class Issuer:
    """The key that signs answers. Whoever has its seed can give any permission: only this service mounts it."""

    def __init__(self, seed: str) -> None:
        """Raises ConfigError for anything but the seed of an account key."""
        try:
            self._keys = nkeys.from_seed(bytearray(seed.strip().encode()))
            self.public_key: str = self._keys.public_key.decode()
        except (nkeys.NkeysError, ValueError) as exc:
            raise ConfigError(
                "auth callout", ["the issuer's seed is no nkey; create one (docs/operations.md)"]
            ) from exc
        if not self.public_key.startswith("A"):
            raise ConfigError("auth callout", ["the issuer's key is no account key; its seed starts with SA"])

    @classmethod
    def from_file(cls, path: Path) -> "Issuer":
        """Read the seed. Raises ConfigError."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ConfigError("auth callout", [f"seed not read from {path}: {exc.strerror}"]) from exc

    def accept(self, login: Login, *, name: str, permissions: Permissions, at: datetime, ends_at: datetime) -> bytes:
        """Return the answer that lets the client in until `ends_at` (wall time), with these permissions only.

        The server applies no limits of an answer (-1), only its own. Source: nats-server, server/auth_callout.go and
        `applyAccountLimits` in server/client.go (read 2026-11-28).
        """
        user = {
            "type": "user",
            "version": 2,
            "pub": {"allow": list(permissions.publish)},
            "sub": {"allow": list(permissions.subscribe)},
            "subs": -1,
            "data": -1,
            "payload": -1,
        }
        claims = {"name": name, "aud": ACCOUNT, "exp": int(ends_at.timestamp()), "nats": user}
        return self._answer(login, at, {"jwt": self._signed(claims, login.user_key, at)})

    def refuse(self, login: Login, *, reason: str, at: datetime) -> bytes:
        """Return the answer that turns the client away; the reason is in the server's log only."""
        return self._answer(login, at, {"error": reason})

    def _answer(self, login: Login, at: datetime, body: dict[str, str]) -> bytes:
        nats = {"type": "authorization_response", "version": 2, **body}
        return self._signed({"aud": login.server_id, "nats": nats}, login.user_key, at).encode()

    def _signed(self, claims: dict[str, Any], subject: str, at: datetime) -> str:
        common = {"jti": uuid.uuid4().hex, "iat": int(at.timestamp()), "iss": self.public_key, "sub": subject}
        parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, common | claims)
        message = b".".join(_base64(msgspec.json.encode(part)) for part in parts)
        return (message + b"." + _base64(self._keys.sign(message))).decode()


def new_issuer_seed() -> str:
    """Return the seed of a new account key."""
    return bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_ACCOUNT)).decode()


def _base64(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")
