"""Certificates of an authority that a test makes, by openssl."""

import subprocess
from pathlib import Path

import msgspec


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its key, PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for brokers and clients."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._pair = Pair(folder / f"{name}.pem", folder / f"{name}-key.pem")
        subject = ("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE")
        _openssl("req", "-x509", *_new_key(self._pair.key), "-out", self._pair.certificate, "-days", "2", *subject)

    @property
    def certificate(self) -> Path:
        """What clients and servers trust."""
        return self._pair.certificate

    def signed(self, name: str, *hosts: str) -> Pair:
        """Return a certificate for these hosts (DNS names, or addresses as `IP:127.0.0.1`)."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        names = ", ".join(host if host.startswith("IP:") else f"DNS:{host}" for host in hosts or (name,))
        extensions.write_text(f"subjectAltName = {names}\nextendedKeyUsage = serverAuth, clientAuth\n")
        _openssl("req", *_new_key(pair.key), "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", self._pair.certificate, "-CAkey", self._pair.key, "-CAcreateserial", "-days", "2")
        _openssl("x509", "-req", "-in", request, *signer, "-out", pair.certificate, "-extfile", extensions)
        return pair

    def server_lines(self, pair: Pair, *, verifies_clients: bool = False) -> tuple[str, ...]:
        """Return the tls block of a broker's configuration."""
        files = (f'cert_file: "{pair.certificate}"', f'key_file: "{pair.key}"', f'ca_file: "{self.certificate}"')
        return (f"tls {{ {', '.join((*files, *(['verify: true'] if verifies_clients else [])))} }}",)


def _new_key(path: Path) -> tuple[object, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
