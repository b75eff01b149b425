"""Published CustomResourceDefinitions of other projects, fetched into the cache by `make controlplane`.

Each is part of a Go module. The go command fetches it at the version below; the checksum of its content must equal the
one that is pinned here.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.controlplane.recipes import CACHE


class Published(msgspec.Struct, frozen=True):
    """A definition and the Go module that contains it."""

    module: str  # with its version
    sum: str  # as `go.sum` writes it
    path: str

    @property
    def file(self) -> Path:
        """Cache file; each version has its own."""
        return CACHE / "definitions" / f"{self.module.replace('/', '_')}_{Path(self.path).name}"


DEFINITIONS = {
    "jobsets.jobset.x-k8s.io": Published(
        "sigs.k8s.io/jobset@v0.8.0",
        "h1:80cJcPld+IMdKFOqzEW4et3Y6lGAPcP8YmBZ+aiKGYA=",
        "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
    ),
    "pytorchjobs.kubeflow.org": Published(
        "github.com/kubeflow/training-operator@v1.8.1",
        "h1:mVvoBSCInbMBX0gGSn4+Ihj3ycwoLO1iEAw+0qPhQfc=",
        "manifests/base/crds/kubeflow.org_pytorchjobs.yaml",
    ),
    "rayjobs.ray.io": Published(
        "github.com/ray-project/kuberay/ray-operator@v1.3.2",
        "h1:3tDr1WtLS8WgOg/PVvyokFFsCVuh44SsjPdtlOrHDY4=",
        "config/crd/bases/ray.io_rayjobs.yaml",
    ),
    "jobs.batch.volcano.sh": Published(
        "volcano.sh/volcano@v1.10.0",
        "h1:+GzQinGgeV0j58WpWpxByOXgF+YfUPW55zghM8GqjF0=",
        "config/crd/volcano/bases/batch.volcano.sh_jobs.yaml",
    ),
    **{
        f"{plural}.{group}.volcano.sh": Published(
            "volcano.sh/volcano@v1.10.0",
            "h1:+GzQinGgeV0j58WpWpxByOXgF+YfUPW55zghM8GqjF0=",
            f"config/crd/volcano/bases/{group}.volcano.sh_{plural}.yaml",
        )
        for group, plural in (("bus", "commands"), ("scheduling", "podgroups"), ("scheduling", "queues"))
    },
    "ec2nodeclasses.karpenter.k8s.aws": Published(
        "github.com/aws/karpenter-provider-aws@v1.6.3",
        "h1:+qI/dw3gaEEWTubxwYJUj+QBuh5yUTdBk2GBB+CLxzY=",
        "pkg/apis/crds/karpenter.k8s.aws_ec2nodeclasses.yaml",
    ),
    "nodepools.karpenter.sh": Published(
        "github.com/aws/karpenter-provider-aws@v1.6.3",
        "h1:+qI/dw3gaEEWTubxwYJUj+QBuh5yUTdBk2GBB+CLxzY=",
        "pkg/apis/crds/karpenter.sh_nodepools.yaml",
    ),
}
_FETCH_SECONDS_MAX = 300.0


def needed_definition(name: str) -> Path:
    """Return the file of a definition. Skips the test if it was not fetched."""
    published = DEFINITIONS[name]
    if not published.file.is_file():
        pytest.skip(f"CustomResourceDefinition {name} is not here ({published.module}); `make controlplane` fetches it")
    return published.file


def fetch() -> list[str]:
    """Fetch missing definitions. Return errors with the definitions' names."""
    return [f"{name}: {why}" for name, one in DEFINITIONS.items() if (why := _fetch(one)) is not None]


def _fetch(published: Published) -> str | None:
    """Fetch a definition into the cache. Return the error, or None."""
    if published.file.is_file():
        return None
    command = ["go", "mod", "download", "-json", published.module]
    published.file.parent.mkdir(parents=True, exist_ok=True)
    try:
        told = subprocess.run(
            command, capture_output=True, timeout=_FETCH_SECONDS_MAX, check=False, cwd=published.file.parent
        )
        found = json.loads(told.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as exc:
        return f"go mod download {published.module}: {exc}"
    if "Error" in found or "Dir" not in found:
        return str(found.get("Error", told.stderr.decode()))
    if found["Sum"] != published.sum:
        return f"{published.module} has sum {found['Sum']}, and {published.sum} is pinned: it is not what was tested"
    part = published.file.with_suffix(".part")
    shutil.copyfile(Path(found["Dir"]) / published.path, part)
    part.rename(published.file)
    return None


if __name__ == "__main__":
    sys.exit("\n".join(fetch()) or 0)
