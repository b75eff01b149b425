"""What the Helm chart takes from the code: `deploy/charts/gpu-autoscaler/files`, written by `make schemas`."""

import argparse
from pathlib import Path

from gpu_autoscaler.bus.permissions import password_variable
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.providers.registry import PROVIDERS
from gpu_autoscaler.tools.schemas import to_yaml
from gpu_autoscaler_services.permissions import users, users_file
from gpu_autoscaler_services.registry import SERVICES
from gpu_autoscaler_services.rights import rules, rules_with_karpenter


def chart_files() -> dict[str, str]:
    """File name -> text."""
    known = {
        "providers": sorted(PROVIDERS),
        "broker": {
            "payloadBytesMax": SERVER_PAYLOAD_BYTES_MAX,
            "passwordVariables": {user: password_variable(user) for user in users()},
        },
        "rights": {
            service.name: {
                "everywhere": rules(service.name, is_for_jobs=False),
                "forJobs": rules(service.name, is_for_jobs=True),
                "withKarpenter": rules_with_karpenter(service.name, has_limits=False),
                "withKarpenterLimits": rules_with_karpenter(service.name, has_limits=True),
            }
            for service in SERVICES
        },
    }
    return {"code.yaml": to_yaml(known), "users.conf": users_file()}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in chart_files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
