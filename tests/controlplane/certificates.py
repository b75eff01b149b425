"""Certificate authority of one control plane: server and client certificates, and the service account key.

Created with `openssl`, so that tests need no library for certificates.
"""

import secrets
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

_DAYS = "2"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority(msgspec.Struct, frozen=True):
    """Files below one folder, written by `make`."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """CA certificate."""
        return self.folder / "authority.crt"

    @property
    def server_certificate(self) -> Path:
        """The API server's."""
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        """The API server's."""
        return self.folder / "server.key"

    @property
    def accounts_key(self) -> Path:
        """Key that signs service account tokens."""
        return self.folder / "accounts.key"

    def make(self, address: str) -> None:
        """Write the server's files for this address. Skips the test if openssl is missing."""
        if not shutil.which("openssl"):
            pytest.skip("no openssl on the PATH, so the control plane has no certificates; install the package openssl")
        self.folder.mkdir(parents=True, exist_ok=True)
        # A name of its own for each: an issuer is found by its name, and another plane's is to be refused.
        _openssl("req", "-x509", *_CURVE, "-subj", f"/CN=authority {secrets.token_hex(8)}", "-days", _DAYS,
                 "-keyout", str(self.folder / "authority.key"), "-out", str(self.certificate))  # fmt: skip
        self._issue(
            "server", "/CN=kube-apiserver", "-addext", f"subjectAltName=IP:{address},DNS:kubernetes.default.svc"
        )
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self.accounts_key))

    def client(self, name: str, *groups: str, days: str = _DAYS) -> tuple[Path, Path]:
        """Return certificate and key of a user in these groups; negative `days` make one that has expired."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={name}"
        return self._issue(name, subject, "-addext", "extendedKeyUsage=clientAuth", days=days)

    def _issue(self, name: str, subject: str, *extensions: str, days: str = _DAYS) -> tuple[Path, Path]:
        certificate, key, request = (str(self.folder / f"{name}.{kind}") for kind in ("crt", "key", "csr"))
        _openssl("req", "-new", *_CURVE, "-subj", subject, *extensions, "-keyout", key, "-out", request)
        # Two steps, as one alone (`req -x509 -CA`) makes nothing that has expired already.
        signer = ("-CA", str(self.certificate), "-CAkey", str(self.folder / "authority.key"))
        _openssl(
            "x509", "-req", *signer, "-in", request, "-days", days, "-copy_extensions", "copy", "-out", certificate
        )
        return Path(certificate), Path(key)


def _openssl(*arguments: str) -> None:
    told = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, f"openssl {' '.join(arguments)}: {told.stderr}"
