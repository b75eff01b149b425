"""The programs of a real Kubernetes control plane, built from their Go modules: `make controlplane`.

`module/go.mod` pins their versions and nothing else; the programs land in a cache outside of the repository, so that
a second call only looks. Fixtures start them (`tests/controlplane/plane.py`).
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = Path(__file__).parent / "module"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpu-autoscaler"
PROGRAMS = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
}
_BUILD_SECONDS_MAX = 3600.0
_GO_MINOR_MIN = 21  # from here on Go fetches the version that a module asks for (go.dev/doc/toolchain, read 2026-11-21)
_PINS = ("go.mod", "go.sum")


def folder() -> Path:
    """Return where the programs of these very pins are, or would be."""
    digest = hashlib.sha256(b"".join((MODULE / name).read_bytes() for name in _PINS)).hexdigest()[:16]
    return CACHE / f"controlplane-{digest}"


def missing() -> str | None:
    """Return what keeps the programs from being built, with the next step; None: nothing does, or they are there."""
    if folder().is_dir():
        return None
    if not shutil.which("go"):
        return "no Go (1.26 or newer) on the PATH, so the Kubernetes control plane is not built; see go.dev/dl"
    said = subprocess.run(["go", "version"], capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"go1\.(\d+)", said)
    if found and int(found[1]) < _GO_MINOR_MIN:
        return f"{said.strip()} is too old to build the Kubernetes control plane; 1.26 or newer is in go.dev/dl"
    return None


def version() -> str:
    """Return the version of Kubernetes that is pinned, as v1.36.3."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert found, "go.mod does not require k8s.io/kubernetes"
    return found[1]


def build() -> Path:
    """Return the folder of the programs, built if they are not there yet: minutes, and about 5 GB of Go's own cache.

    It appears whole or not at all, also when several build at once.
    """
    target = folder()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "controlplane.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        parts = target.with_suffix(".part")
        shutil.rmtree(parts, ignore_errors=True)
        for name, package in PROGRAMS.items():
            print(f"building {name} ({package})", file=sys.stderr, flush=True)  # noqa: T201 - a command's progress
            command = ["go", "build", "-buildvcs=false", "-trimpath", "-ldflags", _link_flags()]
            command += ["-o", str(parts / name), package]
            environment = {**os.environ, "CGO_ENABLED": "0"}
            subprocess.run(command, cwd=MODULE, check=True, timeout=_BUILD_SECONDS_MAX, env=environment)
        parts.rename(target)
    return target


def _link_flags() -> str:
    """Kubernetes' programs learn their version from the linker; without it the server says v0.0.0-master."""
    git_version = version()
    major, minor, *_ = git_version.removeprefix("v").split(".")
    told = {"gitVersion": git_version, "gitMajor": major, "gitMinor": minor}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s -w", *(f"-X {package}.{key}={text}" for package in packages for key, text in told.items())])


if __name__ == "__main__":
    reason = missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{build()}\n")
