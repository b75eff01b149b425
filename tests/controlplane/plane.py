"""Real Kubernetes control plane for tests: etcd, kube-apiserver and selected parts, on free loopback ports.

Each plane is a separate cluster below one folder; several can run at once. Its processes are in a group that ends with
the process that started it.
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.controlplane import certificates
from tests.controlplane.programs import CONTROL_PLANE

from gpu_autoscaler_services.local.child import free_port
from gpu_autoscaler_services.local.reaper import Reaper

Part = Literal["kube-controller-manager", "kube-scheduler", "kwok"]
EVERYTHING: tuple[Part, ...] = ("kube-controller-manager", "kube-scheduler", "kwok")

LOOPBACK = "127.0.0.1"
STAGES = Path(__file__).parent / "stages.yaml"
READY_SECONDS_MAX = 60.0  # two seconds on a quiet machine
STARTS_COUNT_MAX = 3  # a port that was free may be taken when the server comes to it
_POLL_SECONDS = 0.05
_LOG_CHARACTERS_SHOWN = 2000


def needed_programs() -> Path:
    """Return the folder of the programs. Skips the test if they are not built."""
    if CONTROL_PLANE.folder().is_dir():
        return CONTROL_PLANE.folder()
    pytest.skip(f"no Kubernetes control plane: {CONTROL_PLANE.missing() or 'it is not built yet'}; `make controlplane`")


class ControlPlane:
    """A control plane below `folder`. `parts` is what runs beside etcd and the API server.

    Service accounts are given to pods (`with_service_accounts`) only where a test is about them: otherwise a pod
    could not be made in the moment after its namespace.
    """

    def __init__(
        self,
        folder: Path,
        *,
        parts: Collection[Part] = (),
        with_service_accounts: bool = False,
        api_settings: Collection[str] = (),
    ) -> None:
        self.folder = folder
        self.admin_token = secrets.token_hex(16)
        self.pids: dict[str, int] = {}
        self._programs = needed_programs()
        self._parts = parts
        self._with_service_accounts = with_service_accounts
        self._api_settings = tuple(api_settings)
        self._reaper = Reaper()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port = self._peer_port = self._port = 0

    # ---- what a client needs

    @property
    def url(self) -> str:
        """URL of the API server; unchanged by restarts."""
        return f"https://{LOOPBACK}:{self._port}"

    @property
    def authority(self) -> certificates.Authority:
        """Authority of the server and client certificates."""
        return certificates.Authority(self.folder / "pki")

    @property
    def tls(self) -> ssl.SSLContext:
        """TLS context that trusts only this server."""
        return ssl.create_default_context(cafile=str(self.authority.certificate))

    def kubeconfig(self, name: str = "admin", user: Mapping[str, Any] | None = None) -> Path:
        """Write a kubeconfig for a user, the administrator with the token if none is given; return its path."""
        cluster = {"server": self.url, "certificate-authority": str(self.authority.certificate)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "plane", "cluster": cluster}],
            "users": [{"name": name, "user": dict(user or {"token": self.admin_token})}],
            "contexts": [{"name": name, "context": {"cluster": "plane", "user": name}}],
            "current-context": name,
        }
        path = self.folder / f"{name}.kubeconfig"
        # Moved into place whole: a program that reads it while it is written again would find nothing, and end.
        written = path.with_suffix(f".{secrets.token_hex(4)}")
        written.write_text(json.dumps(document), encoding="utf-8")
        written.chmod(0o600)
        return written.replace(path)

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl as the administrator and return its output."""
        command = [str(self._programs / "kubectl"), "--kubeconfig", str(self.kubeconfig()), *arguments]
        # HOME: its cache of what the server serves belongs to this plane.
        told = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"HOME": str(self.folder)},
        )
        assert told.returncode == 0, f"kubectl {' '.join(arguments)}: {told.stderr}"
        return told.stdout

    def ask(self, path: str) -> tuple[int, Any]:
        """Read a path as the administrator. Status 0 if the connection fails."""
        connection = http.client.HTTPSConnection(LOOPBACK, self._port, context=self.tls, timeout=5)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.admin_token}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    # ---- life

    def start(self) -> None:
        """Start all programs. Returns when the API server is ready and has its namespaces."""
        self._reaper.start()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.authority.make(LOOPBACK)
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f'{self.admin_token},admin,admin,"system:masters"\n', encoding="utf-8")
        for attempt in range(1, STARTS_COUNT_MAX + 1):
            self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
            self._start_etcd()
            self.start_api()
            try:
                self.wait_ready()
                break
            except _Ended:
                self._end("kube-apiserver")
                self._end("etcd")
                if attempt == STARTS_COUNT_MAX:
                    raise
        for part in self._parts:
            self.start_part(part)
        if "kube-controller-manager" in self._parts:
            self._wait_controllers()

    def stop(self) -> None:
        """Kill all programs; their state is not needed."""
        for name in list(self._processes):
            self._end(name)
        self._reaper.stop()

    def kill(self, name: str) -> None:
        """SIGKILL one program, as a crash would."""
        self._end(name)

    def start_api(self) -> None:
        """Start the API server on its port. `wait_ready` waits for it."""
        pki = self.authority
        off = [] if self._with_service_accounts else ["--disable-admission-plugins=ServiceAccount"]
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://{LOOPBACK}:{self._etcd_port}",
            f"--secure-port={self._port}",
            f"--bind-address={LOOPBACK}",
            "--advertise-address=192.0.2.1",  # of documentation (RFC 5737): told to pods, and none of them runs
            "--endpoint-reconciler-type=none",
            f"--cert-dir={self.folder / 'certs'}",
            f"--tls-cert-file={pki.server_certificate}",
            f"--tls-private-key-file={pki.server_key}",
            f"--client-ca-file={pki.certificate}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.accounts_key}",
            f"--service-account-signing-key-file={pki.accounts_key}",
            *off,
            *self._api_settings,
        )

    def start_part(self, part: Part) -> None:
        """Start a scheduler or controller."""
        kubeconfig = f"--kubeconfig={self.kubeconfig()}"
        quiet = ("--leader-elect=false", "--secure-port=0")
        if part == "kube-scheduler":
            self._spawn(part, kubeconfig, *quiet)
        elif part == "kube-controller-manager":
            pki = self.authority
            keys = (f"--service-account-private-key-file={pki.accounts_key}", f"--root-ca-file={pki.certificate}")
            self._spawn(part, kubeconfig, *quiet, *keys)
        else:
            mine = "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"
            self._spawn(
                part, kubeconfig, mine, f"--config={STAGES}", "--node-lease-duration-seconds=40", "--server-address="
            )

    def wait_ready(self) -> None:
        """Return when the API server is ready and has its first namespaces."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        asked = ("/readyz", "/api/v1/namespaces/kube-system", "/api/v1/namespaces/default")
        for path in asked:
            while (answer := self.ask(path))[0] != 200:
                if any(self._processes[name].poll() is not None for name in ("etcd", "kube-apiserver")):
                    raise _Ended(f"etcd or kube-apiserver ended; its log ends:\n{self.log_end('kube-apiserver')}")
                assert time.monotonic() < deadline, f"{path}: {answer}\n{self.log_end('kube-apiserver')}"
                time.sleep(_POLL_SECONDS)

    def _wait_controllers(self) -> None:
        """Return when the controllers run: the default service account exists."""
        deadline, process = time.monotonic() + READY_SECONDS_MAX, self._processes["kube-controller-manager"]
        while (answer := self.ask("/api/v1/namespaces/default/serviceaccounts/default"))[0] != 200:
            is_over = process.poll() is not None or time.monotonic() >= deadline
            assert not is_over, f"no controllers: {answer}\n{self.log_end('kube-controller-manager')}"
            time.sleep(_POLL_SECONDS)

    def compact(self) -> None:
        """Compact the history up to now, as the API server does every five minutes."""
        revision = self._ask_etcd("/v3/maintenance/status")["header"]["revision"]
        self._ask_etcd("/v3/kv/compaction", {"revision": revision, "physical": True})

    def back_up(self) -> Path:
        """Copy etcd's files while it is stopped, as a backup that is whole; return the copy."""
        copy = self.folder / f"backup-{secrets.token_hex(4)}"
        self._end("etcd")
        shutil.copytree(self._etcd_folder, copy)
        self._start_etcd()
        self.wait_ready()
        return copy

    def restore(self, copy: Path) -> None:
        """Give etcd the files of a backup; the API server, whose cache is of the time after it, is started again."""
        self._end("kube-apiserver")
        self._end("etcd")
        shutil.rmtree(self._etcd_folder)
        shutil.copytree(copy, self._etcd_folder)
        self._start_etcd()
        self.start_api()
        self.wait_ready()

    def log_end(self, name: str) -> str:
        """Return the end of a program's log."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")[-_LOG_CHARACTERS_SHOWN:]

    @property
    def _etcd_folder(self) -> Path:
        return self.folder / f"etcd-{self._etcd_port}"

    def _start_etcd(self) -> None:
        client, peer = (f"http://{LOOPBACK}:{port}" for port in (self._etcd_port, self._peer_port))
        self._spawn(
            "etcd",
            f"--data-dir={self._etcd_folder}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _ask_etcd(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        connection = http.client.HTTPConnection(LOOPBACK, self._etcd_port, timeout=10)
        try:
            connection.request("POST", path, json.dumps(body or {}))
            return json.load(connection.getresponse())
        finally:
            connection.close()

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(self._programs / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # GOGC: a plane lives for minutes, so it collects garbage later: an eighth less processor time.
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), "GOGC": "400"},
                process_group=self._reaper.process_group,
            )
        self.pids[name] = self._processes[name].pid

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()


class _Ended(RuntimeError):
    """A program ended while it was starting."""


@contextlib.contextmanager
def running_plane(folder: Path, parts: Collection[Part] = (), **settings: Any) -> Iterator[ControlPlane]:  # noqa: ANN401 - as `ControlPlane`
    """Run a control plane and stop it afterwards."""
    plane = ControlPlane(folder, parts=parts, **settings)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
