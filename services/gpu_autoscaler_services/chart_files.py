"""Parts of the Helm chart generated from the code, by `make schemas`: its folder `files`, and in values.schema.json the
schemas of `settings` and `policy`."""

import argparse
from pathlib import Path

from gpu_autoscaler.bus.permissions import CALLOUT_SECONDS_MAX, password_variable
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.contracts.schemas import to_yaml
from gpu_autoscaler.providers.registry import PROVIDERS
from gpu_autoscaler_services.api_rights import ROLES, role_rules
from gpu_autoscaler_services.chart_settings import REFUSED_SETTINGS, values_schema
from gpu_autoscaler_services.node_gateway.admission import AUDIENCE
from gpu_autoscaler_services.permissions import users, users_file
from gpu_autoscaler_services.registry import specs
from gpu_autoscaler_services.service_spec import rules_of


def chart_files() -> dict[str, str]:
    """Return the files: name -> text."""
    known = {
        "providers": sorted(PROVIDERS),
        "broker": {
            "payloadBytesMax": SERVER_PAYLOAD_BYTES_MAX,
            "calloutSeconds": CALLOUT_SECONDS_MAX,
            "tokenAudience": AUDIENCE,
            "passwordVariables": {user: password_variable(user) for user in users()},
        },
        "refusedSettings": REFUSED_SETTINGS,
        "apiRoles": {role: role_rules(role) for role in ROLES},
        "rights": {
            spec.name: {
                "everywhere": spec.rules(is_for_jobs=False),
                "forJobs": spec.rules(is_for_jobs=True),
                "withKarpenter": spec.karpenter_rules(has_limits=False),
                "withKarpenterLimits": spec.karpenter_rules(has_limits=True),
                "withQuotas": rules_of(spec.rights_with_quotas),
                "withProvisioning": rules_of(spec.rights_with_provisioning),
                "withNamespaces": rules_of(spec.rights_with_namespaces),
            }
            for spec in specs()
        },
    }
    return {"code.yaml": to_yaml(known), "users.conf": users_file()}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the chart")
    folder = parser.parse_args().folder
    for name, text in chart_files().items():
        (folder / "files" / name).write_text(text, encoding="utf-8")
    schema = folder / "values.schema.json"
    schema.write_text(values_schema(schema.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
