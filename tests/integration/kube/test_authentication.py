"""Authentication at a real API server, and the errors when it fails."""

import asyncio
import base64
import json
import shlex
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import LOOPBACK, ControlPlane, running_plane
from tests.support.cluster import until

from gpu_autoscaler.kube import credentials
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection, from_kubeconfig, from_service_account
from gpu_autoscaler.kube.protocol import NAMESPACES, NODES
from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

ACCOUNT_API = "/api/v1/namespaces/default/serviceaccounts"


async def who(connection: Connection) -> str:
    """Return as whom the server knows us."""
    kube = KubeClient(connection, now=Clock().now)
    try:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = await kube.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    finally:
        await kube.close()
    return str(answer["status"]["userInfo"]["username"])


async def account_token(plane: ControlPlane, name: str, *, seconds: int = 3600) -> str:
    """Make the service account if it is not there, and return a token of it that lives so long (600 s at least)."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    try:
        known = json.loads(plane.kubectl("get", "serviceaccounts", "--namespace=default", "--output=json"))["items"]
        if name not in {item["metadata"]["name"] for item in known}:
            await kube.create(ACCOUNT_API, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        answer = await kube.create(f"{ACCOUNT_API}/{name}/token", asked)
    finally:
        await kube.close()
    return str(answer["status"]["token"])


def plugin(folder: Path, text: str, **more: object) -> dict[str, object]:
    """A kubeconfig's user with a plugin that is this shell script."""
    path = folder / "plugin.sh"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    api = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": api, "command": str(path), "interactiveMode": "Never", **more}}


def credential(**status: object) -> str:
    """Return the output of a plugin."""
    return json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})


async def test_a_token_and_a_client_certificate_are_believed(plane: ControlPlane) -> None:
    """A token, a certificate in files, and one in the kubeconfig itself: each is the user that it names."""
    certificate, key = plane.authority.client("alice", "research")
    inline = {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(key.read_bytes()).decode(),
    }
    files = {"client-certificate": str(certificate.relative_to(plane.folder)), "client-key": str(key)}

    assert await who(from_kubeconfig(str(plane.kubeconfig()))) == "admin"
    assert await who(from_kubeconfig(str(plane.kubeconfig("inline", inline)))) == "alice"
    assert await who(from_kubeconfig(str(plane.kubeconfig("files", files)))) == "alice"


async def test_a_plugin_is_run_once_for_as_long_as_its_token_lives(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten calls at once run it once; when the token ends it is run again, and so it is after a 401."""
    runs, spoken = tmp_path / "runs", tmp_path / "spoken"
    end = datetime.now(UTC) + timedelta(hours=1)
    spoken.write_text(credential(token=plane.admin_token, expirationTimestamp=f"{end:%Y-%m-%dT%H:%M:%SZ}"))
    user = plugin(tmp_path, f"echo run >> {runs}; cat {spoken}")
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig("plugged", user))), now=Clock().now)
    try:
        await asyncio.gather(*(kube.get(NAMESPACES, "", "default") for _ in range(10)))
        assert len(runs.read_text().split()) == 1
        later = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
        monkeypatch.setattr(credentials, "time", later)
        spoken.write_text(credential(token=plane.admin_token))
        await kube.get(NAMESPACES, "", "default")
        assert len(runs.read_text().split()) == 2

        spoken.write_text(credential(token="of-somebody-else"))
        await asyncio.to_thread(plane.kill, "kube-apiserver")
        await asyncio.to_thread(plane.start_api)
        await asyncio.to_thread(plane.wait_ready)
        await kube.get(NAMESPACES, "", "default")
        assert len(runs.read_text().split()) == 2, "a token without an end is kept"
    finally:
        await kube.close()


async def test_a_token_that_is_refused_is_asked_for_again(plane: ControlPlane, tmp_path: Path) -> None:
    """The rejected call is retryable; the next one runs the plugin again."""
    spoken = tmp_path / "spoken"
    spoken.write_text(credential(token="was-good-yesterday"))
    user = plugin(tmp_path, f"cat {spoken}")
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig("stale", user))), now=Clock().now)
    try:
        with pytest.raises(TransientError, match=r"401: https://.* rejects user 'stale' of .*; renew it"):
            await kube.get(NAMESPACES, "", "default")
        spoken.write_text(credential(token=plane.admin_token))
        assert (await kube.get(NAMESPACES, "", "default")).metadata.name == "default"
    finally:
        await kube.close()


async def test_a_plugin_may_give_a_certificate_and_exchange_it(plane: ControlPlane, tmp_path: Path) -> None:
    """New connections present the certificate; a rejected one is replaced by the plugin's next output."""
    spoken = tmp_path / "spoken"

    def say(certificate: Path, key: Path) -> None:
        data = {"clientCertificateData": certificate.read_text(), "clientKeyData": key.read_text()}
        spoken.write_text(credential(**data))

    say(*plane.authority.client("late", days="-1"))
    connection = from_kubeconfig(str(plane.kubeconfig("certified", plugin(tmp_path, f"cat {spoken}"))))
    with pytest.raises(TransientError, match="401"):
        await who(connection)
    say(*plane.authority.client("bob"))
    assert await who(connection) == "bob"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no network >&2; exit 3", r"exited with 3: no network; ask the platform team"),
        ("echo hello", "did not return an ExecCredential"),
        ("echo '" + credential() + "'", "returned neither a token nor a certificate"),
        (
            "echo '" + credential(token="x").replace("/v1", "/v1beta1") + "'",
            r"returned client\.authentication\.k8s\.io/v1beta1, but the kubeconfig requires .*/v1",
        ),
    ],
)
async def test_a_plugin_that_fails_is_an_outage(plane: ControlPlane, tmp_path: Path, script: str, why: str) -> None:
    """The error holds the plugin's output and the install hint of the kubeconfig; the call is retryable."""
    user = plugin(tmp_path, script, installHint="ask the platform team")
    with pytest.raises(TransientError, match=why):
        await who(from_kubeconfig(str(plane.kubeconfig("failing", user))))


async def test_a_plugin_receives_the_cluster_info(plane: ControlPlane, tmp_path: Path) -> None:
    """If the kubeconfig asks for it, the plugin gets the server and its authority; interactive is always false."""
    heard = tmp_path / "heard"
    script = f'printf %s "$KUBERNETES_EXEC_INFO" > {heard}; printf %s "$EXTRA" >> {heard}.env\n'
    script += f"echo '{credential(token=plane.admin_token)}'"
    user = plugin(tmp_path, script, provideClusterInfo=True, env=[{"name": "EXTRA", "value": "told"}])

    assert await who(from_kubeconfig(str(plane.kubeconfig("informed", user)))) == "admin"
    spec = json.loads(heard.read_text())["spec"]
    assert spec["interactive"] is False
    assert spec["cluster"]["server"] == plane.url
    assert base64.b64decode(spec["cluster"]["certificate-authority-data"]) == plane.authority.certificate.read_bytes()
    assert heard.with_suffix(".env").read_text() == "told"


async def test_in_a_pod_the_token_is_read_again_as_it_rotates(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet exchanges the file; the next account's token is used within the minute, and at once after a 401."""
    (tmp_path / "ca.crt").write_bytes(plane.authority.certificate.read_bytes())
    (tmp_path / "token").write_text(await account_token(plane, "first"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", LOOPBACK)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", plane.url.rsplit(":", 1)[1])
    connection = from_service_account(tmp_path)

    assert await who(connection) == "system:serviceaccount:default:first"
    (tmp_path / "token").write_text(await account_token(plane, "second"))
    assert await who(connection) == "system:serviceaccount:default:first", "a minute has not passed"
    monkeypatch.setattr(credentials, "TOKEN_FILE_SECONDS_MAX", 0.0)
    assert await who(connection) == "system:serviceaccount:default:second"
    monkeypatch.setattr(credentials, "TOKEN_FILE_SECONDS_MAX", 60.0)

    (tmp_path / "token").write_text("nobody's")
    connection.credentials.invalidate()
    with pytest.raises(TransientError, match="rejects the service account in"):
        await who(connection)
    (tmp_path / "token").write_text(await account_token(plane, "second"))
    assert await who(connection) == "system:serviceaccount:default:second"


async def test_a_server_that_cannot_be_verified_receives_no_credentials(plane: ControlPlane, tmp_path: Path) -> None:
    """Another cluster's authority, the system's, or another name: refused before any token is sent, for good."""
    with running_plane(tmp_path / "other") as other:
        mixed = json.loads(plane.kubeconfig().read_text())
        mixed["clusters"][0]["cluster"]["certificate-authority"] = str(other.authority.certificate)
        path = tmp_path / "mixed.kubeconfig"
        path.write_text(json.dumps(mixed))
        with pytest.raises(PermanentError, match="untrusted certificate"):
            await who(from_kubeconfig(str(path)))

    del mixed["clusters"][0]["cluster"]["certificate-authority"]
    path.write_text(json.dumps(mixed))
    with pytest.raises(PermanentError, match="untrusted certificate"):
        await who(from_kubeconfig(str(path)))

    right = str(plane.authority.certificate)
    for name, is_trusted in (("kubernetes.default.svc", True), ("elsewhere.example", False)):
        mixed["clusters"][0]["cluster"] |= {"certificate-authority": right, "tls-server-name": name}
        path.write_text(json.dumps(mixed))
        if is_trusted:
            assert await who(from_kubeconfig(str(path))) == "admin"
        else:
            with pytest.raises(PermanentError, match=r"elsewhere\.example"):
                await who(from_kubeconfig(str(path)))


async def test_verification_cannot_be_switched_off(plane: ControlPlane) -> None:
    """A kubeconfig with insecure-skip-tls-verify is refused, and the error names the alternative."""
    document = json.loads(plane.kubeconfig("careless").read_text())
    document["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    (plane.folder / "careless.kubeconfig").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="set certificate-authority-data instead"):
        from_kubeconfig(str(plane.folder / "careless.kubeconfig"))


async def test_an_expired_token_is_reported_with_its_expiry(plane: ControlPlane) -> None:
    """The error contains the expiry of the token."""
    parts = (await account_token(plane, "late")).split(".")
    claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    claims["exp"] = int(datetime(2026, 11, 1, 12, 30, tzinfo=UTC).timestamp())
    parts[1] = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    with pytest.raises(TransientError, match=r"user 'late' of .*: token expired at 2026-11-01 12:30:00Z; renew it"):
        await who(from_kubeconfig(str(plane.kubeconfig("late", {"token": ".".join(parts)}))))


@pytest.mark.parametrize("is_account", [False, True])
async def test_a_missing_permission_is_reported_with_its_remedy(plane: ControlPlane, is_account: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """The 403 names right and resource; the command in it, run as it is, is all that was missing."""
    if is_account:
        token = await account_token(plane, "poor")
        path = plane.kubeconfig("poor", {"token": token})
    else:
        certificate, key = plane.authority.client("carol smith")
        path = plane.kubeconfig("carol", {"client-certificate": str(certificate), "client-key": str(key)})
    kube = KubeClient(from_kubeconfig(str(path)), now=Clock().now)
    try:
        with pytest.raises(PermanentError, match=r'cannot list resource "nodes".*; grant it: kubectl create') as told:
            await kube.list_page(NODES, {})
        command = str(told.value).partition("grant it: ")[2]
        for each in command.split(" && "):
            plane.kubectl(*shlex.split(each)[1:])
        await until(lambda: may_list_nodes(kube))  # the server hears of the new role a moment later
    finally:
        await kube.close()


async def may_list_nodes(kube: KubeClient) -> bool:
    """Whether a list is answered."""
    try:
        await kube.list_page(NODES, {})
    except PermanentError:
        return False
    return True
