"""TLS of the gateway: certificate and key from files, which are read again when they change."""

import asyncio
import ssl
from pathlib import Path

import structlog

from gpu_autoscaler.model.errors import ConfigError

# A kubelet renews a mounted Secret within a minute or two; certificates are renewed days before they expire.
RELOAD_SECONDS = 10.0

log = structlog.get_logger()
_State = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate chain and its key. Connections that are open keep the one that they began with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError if the pair cannot be used."""
        self._certificate = certificate
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        try:
            self._state = self._stat()
            self._load(self.context)
        except OSError as error:  # ssl.SSLError is one
            paths = f"{certificate} and {key}"
            reason = f"tls_certificate_path, tls_key_path: {paths} are no certificate and its key: {error}"
            raise ConfigError("gateway", [reason]) from error

    def reload(self) -> bool:
        """Use the files if they have changed; return whether it did. An invalid pair is logged and changes nothing."""
        try:
            state = self._stat()
            if state == self._state:
                return False
            # Tried first: a context that has loaded a chain without its key would refuse every connection.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except OSError as error:
            log.warning(
                "certificate not reloaded, the last one is used; correct the files", error=str(error),
                certificate=str(self._certificate), key=str(self._key),
            )  # fmt: skip
            return False
        self._state = state
        log.info("certificate reloaded", certificate=str(self._certificate))
        return True

    async def follow(self) -> None:
        """Reload until canceled."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def _stat(self) -> _State:
        # A mounted Secret is exchanged by a symbolic link, so that both files change at once.
        found = (path.stat() for path in (self._certificate, self._key))
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate, self._key)
