"""Programs of a real Kubernetes control plane, built from their Go modules by `make controlplane`.

`module/go.mod` pins their versions. The build takes minutes and about 5 GB of Go's cache. Fixtures start them
(`tests/controlplane/plane.py`).
"""

import re
import sys
from pathlib import Path

from tests.controlplane.recipes import Recipe

MODULE = Path(__file__).parent / "module"


def version() -> str:
    """Return the pinned Kubernetes version, as v1.36.3."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert found, "go.mod does not require k8s.io/kubernetes"
    return found[1]


def link_flags() -> str:
    """Return linker flags that set the programs' version; without them it is v0.0.0-master."""
    git_version = version()
    major, minor, *_ = git_version.removeprefix("v").split(".")
    told = {"gitVersion": git_version, "gitMajor": major, "gitMinor": minor}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s -w", *(f"-X {package}.{key}={text}" for package in packages for key, text in told.items())])


CONTROL_PLANE = Recipe(
    name="controlplane",
    words="the Kubernetes control plane",
    module=MODULE,
    programs={
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
        "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    },
    link_flags=link_flags,
)


if __name__ == "__main__":
    reason = CONTROL_PLANE.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{CONTROL_PLANE.build()}\n")
