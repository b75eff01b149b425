"""TLS at the gateway: a real handshake, and renewed certificates without a restart."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.support.certificates import Authority, Pair
from tests.support.front import front

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import GatewaySettings
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.gateway import tls
from gpu_autoscaler_services.gateway.server import make_app, serving


class Mounted:
    """Certificate and key in a folder that is exchanged by a symbolic link, as the kubelet mounts a Secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    @property
    def settings(self) -> GatewaySettings:
        """The settings of a gateway with these files."""
        return GatewaySettings(
            port=0, tls_certificate_path=str(self.folder / "tls.crt"), tls_key_path=str(self.folder / "tls.key")
        )

    def put(self, certificate: Path, key: Path) -> None:
        """Replace both at once."""
        self._count += 1
        version = self.folder / f"..{self._count}"
        version.mkdir(parents=True)
        shutil.copy(certificate, version / "tls.crt")
        shutil.copy(key, version / "tls.key")
        link = self.folder / "..next"
        link.symlink_to(version.name)
        link.replace(self.folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


@asynccontextmanager
async def encrypted(folder: Path, mounted: Mounted) -> AsyncIterator[str]:
    """A gateway that serves HTTPS; yields its address."""
    async with front(folder) as plain, serving(make_app(plain.model), mounted.settings) as url:
        yield url


async def served_by(url: str, authority: Path) -> str:
    """Return the serial number of the certificate that the gateway proves itself with."""
    context = ssl.create_default_context(cafile=str(authority))
    host, port = url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(certificate["serialNumber"])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority that the clients trust."""
    return Authority(tmp_path / "authority")


def pair_of(authority: Authority, name: str) -> Pair:
    """A certificate for the gateway on loopback."""
    return authority.signed(name, "IP:127.0.0.1")


async def test_the_gateway_serves_https_alone(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Browsers and the command line verify it; plain HTTP gets no answer."""
    mounted, pair = Mounted(tmp_path / "secret"), pair_of(authority, "gateway")
    mounted.put(pair.certificate, pair.key)
    async with encrypted(tmp_path, mounted) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(authority.certificate))
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/api/v1/nodes", ssl=trusting) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(f"{url}/api/v1/nodes")
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"{url}/api/v1/nodes".replace("https", "http"))
        assert await asyncio.to_thread(run, ("nodes", "--gateway", url)) == Exit.FAILURE
        assert "certificate verify failed" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        assert await asyncio.to_thread(run, ("nodes", "--gateway", url)) == Exit.OK


async def test_a_renewed_certificate_is_used_without_a_restart(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections get it; open ones stay. Files that do not belong together change nothing."""
    monkeypatch.setattr(tls, "RELOAD_SECONDS", 0.02)
    mounted = Mounted(tmp_path / "secret")
    first, second, third = (pair_of(authority, name) for name in ("first", "second", "third"))
    mounted.put(first.certificate, first.key)
    async with encrypted(tmp_path, mounted) as url, aiohttp.ClientSession() as http:
        trusting = ssl.create_default_context(cafile=str(authority.certificate))
        async with http.get(f"{url}/api/v1/events", ssl=trusting) as stream:
            assert stream.status == 200
            serial = await served_by(url, authority.certificate)
            mounted.put(second.certificate, first.key)
            await asyncio.sleep(0.3)
            assert await served_by(url, authority.certificate) == serial
            mounted.put(third.certificate, third.key)
            async with asyncio.timeout(20):
                while await served_by(url, authority.certificate) == serial:
                    await asyncio.sleep(0.02)
            assert not stream.content.at_eof()
            assert stream.connection is not None


async def test_files_that_are_no_pair_stop_the_start(authority: Authority, tmp_path: Path) -> None:
    """The error names both paths."""
    mounted = Mounted(tmp_path / "secret")
    first, second = pair_of(authority, "first"), pair_of(authority, "second")
    mounted.put(first.certificate, second.key)
    with pytest.raises(ConfigError, match=r"tls\.crt and .*tls\.key are no certificate and its key"):
        async with encrypted(tmp_path, mounted):
            pass
