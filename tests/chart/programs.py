"""Tools of the chart's tests: Helm, kubeconform, and the CRDs of the Prometheus operator.

Built as the control plane is (`tests/controlplane/recipes.py`), in two minutes of one core: `make chart` does it.
"""

import sys
from pathlib import Path

from tests.controlplane import programs
from tests.controlplane.recipes import Recipe

_OPERATOR = "github.com/prometheus-operator/prometheus-operator"
_KINDS = "example/prometheus-operator-crd/monitoring.coreos.com_"


def link_flags() -> str:
    """Return flags that set the Kubernetes version that Helm assumes without a cluster."""
    major, minor, _ = programs.version().removeprefix("v").split(".")
    packages = ("helm.sh/helm/v3/pkg/chartutil", "helm.sh/helm/v3/pkg/lint/rules")
    told = (f"-X {package}.k8sVersionMajor={major} -X {package}.k8sVersionMinor={minor}" for package in packages)
    return " ".join(["-s -w", *told])


CHART_TOOLS = Recipe(
    name="chart",
    words="Helm",
    module=Path(__file__).parent / "module",
    programs={"helm": "helm.sh/helm/v3/cmd/helm", "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"},
    link_flags=link_flags,
    files={f"{kind}.yaml": (_OPERATOR, f"{_KINDS}{kind}.yaml") for kind in ("servicemonitors", "prometheusrules")},
)


if __name__ == "__main__":
    reason = CHART_TOOLS.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{CHART_TOOLS.build()}\n")
