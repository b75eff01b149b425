"""Google Cloud credentials: a token is kept while it is valid and renewed when it is refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from aiohttp import web
from tests.support.small_servers import serving

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.gcp import client
from gpu_autoscaler.providers.gcp.client import GcpClient

pytestmark = pytest.mark.skipif(
    find_spec("google.auth") is None or find_spec("cryptography") is None,
    reason="NOT RUN: google-auth or cryptography is not installed (extra `gcp`, `make .venv/.dev`)",
)


class Google:
    """Gives tokens, and answers calls that carry the one that is good."""

    def __init__(self) -> None:
        self.tokens_count = 0
        self.good = "token-1"
        self.is_granting = True

    async def answer(self, request: web.Request) -> web.Response:
        """As token endpoint and as Compute Engine."""
        if request.path == "/token":
            assert "jwt-bearer" in str((await request.post())["grant_type"])
            if not self.is_granting:
                return web.json_response({"error": "invalid_grant", "error_description": "clock?"}, status=400)
            self.tokens_count += 1
            return web.json_response({"access_token": f"token-{self.tokens_count}", "expires_in": 3600})
        if request.headers["Authorization"] != f"Bearer {self.good}":
            body = {"error": {"message": "Invalid Credentials", "errors": [{"reason": "authError"}]}}
            return web.json_response(body, status=401)
        return web.json_response({"name": "europe-west4"})


@asynccontextmanager
async def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Google, GcpClient]]:
    """A driver's calls with a service account's key in a file, to a Google of the test's own."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - comes with google-auth's signers
    from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415 - as above

    google = Google()
    async with serving(google.answer) as url:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = tmp_path / "key.json"
        account = {
            "type": "service_account",
            "project_id": "p1",
            "private_key_id": "k1",
            "private_key": pem.decode(),
            "client_email": "gpu@p1.iam.gserviceaccount.com",
            "token_uri": f"{url}/token",
        }
        path.write_text(json.dumps(account), encoding="utf-8")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        monkeypatch.setitem(client.BASE_URLS, "compute", url)
        made = GcpClient("p1", url=None, call_seconds_max=20.0)
        yield google, made
        await made.close()


async def test_a_token_is_reused_until_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with an expired token is transient; its retry gets a new token."""
    async with called(tmp_path, monkeypatch) as (google, made):
        for _ in range(3):
            assert (await made.call("regions.get", region="europe-west4"))["name"] == "europe-west4"
        assert google.tokens_count == 1
        google.good = "token-2"
        with pytest.raises(TransientError, match=r"authError.*check the credentials and this machine's clock"):
            await made.call("regions.get", region="europe-west4")
        assert await made.find("regions.get", region="europe-west4") == {"name": "europe-west4"}
        assert google.tokens_count == 2
        assert made.cloud_ahead is not None


async def test_without_a_token_no_call_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong clock, deleted key, no credentials: the error has the next step."""
    async with called(tmp_path, monkeypatch) as (google, made):
        google.is_granting = False
        with pytest.raises(TransientError, match=r"invalid_grant.*Workload Identity"):
            await made.call("regions.get", region="europe-west4")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gone.json"))
        with pytest.raises(TransientError, match=r"gone\.json.*GOOGLE_APPLICATION_CREDENTIALS"):
            await made.call("regions.get", region="europe-west4")
