"""`gpu-autoscaler doctor`: whether the cloud can be bought from as the settings say, before anything is bought; with
`--live` by buying one instance.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from cyclopts import Parameter

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.examine import needed_policy
from gpu_autoscaler.providers.azure.examine import needed_role
from gpu_autoscaler.providers.gcp.permissions import role_text
from gpu_autoscaler.providers.karpenter import KarpenterOptions
from gpu_autoscaler.providers.karpenter.options import node_class_of, validate_options
from gpu_autoscaler.providers.registry import ProviderOptions, run_preflight
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.live import LiveAsked, see_live, walk_live
from gpu_autoscaler_services.cli.output import Output, show, print_message
from gpu_autoscaler_services.rights import RIGHTS_WITH_KARPENTER, rules_with_karpenter
from gpu_autoscaler_services.wiring import connection_of


def doctor(
    *,
    config: Annotated[Path | None, Parameter(help="TOML file of settings; the environment wins.")] = None,
    installation: Annotated[
        str, Parameter(help="UID of the namespace kube-system: whose instances are counted.")
    ] = "*",
    policy: Annotated[
        bool, Parameter(negative="", help="Print the permissions that these settings need, and ask nothing.")
    ] = False,
    live: Annotated[
        bool,
        Parameter(
            negative="", help="Then buy ONE instance, walk the driver's contract with it, end it; asks for --yes."
        ),
    ] = False,
    offer: Annotated[
        str | None, Parameter(help="With --live: which offer, as type/zone/capacity type; else the cheapest.")
    ] = None,
    pool: Annotated[
        str, Parameter(help="With --live: for which pool, where settings name groups by pool.")
    ] = "default",
    yes: Annotated[bool, Parameter(negative="", help="With --live: yes, buy it. It costs money.")] = False,
    output: Output = "table",
) -> int:
    """Look at credentials, region, subnets, groups, types, prices and quotas; buy nothing without --live --yes.

    Exits 0 when it can be bought from, 1 with faults or an instance that could not be ended, 2 with mistakes in the
    settings, 130 when it was interrupted.
    """
    given = os.environ.get("GPU_AUTOSCALER_CONFIG")
    settings = load_settings(config or (Path(given) if given else None), os.environ)
    if policy:
        return _print_policy(settings)
    if live:
        see_live(settings.provider.name, installation)
    options = ProviderOptions(
        installation=installation,
        url=settings.provider.url,
        call_seconds_max=settings.provider.call_seconds_max,
        aws=settings.aws,
        karpenter=settings.karpenter,
        kube=lambda: connection_of(settings.kube),
        azure=settings.azure,
        gcp=settings.gcp,
    )
    findings = list(asyncio.run(run_preflight(settings.provider.name, options)))
    code = Exit.FAILURE if any(finding.level == "error" for finding in findings) else Exit.OK
    if live and code is Exit.OK:
        asked = LiveAsked(pool=pool, offer_key=offer, is_agreed=yes)
        steps, code = asyncio.run(walk_live(settings.provider.name, options, asked))
        findings += steps
    rows = [msgspec.to_builtins(finding) for finding in findings]
    columns = [(key, lambda row, key=key: row[key]) for key in ("level", "subject", "said", "next_step")]
    show(rows, rows, columns, lambda row: str(row["subject"]), output)
    faults_count = sum(1 for finding in findings if finding.level == "error")
    if faults_count:
        print_message(f"{settings.provider.name}: {faults_count} fault(s); nothing is bought until they are gone")
    return code


def _print_policy(settings: Settings) -> int:
    match settings.provider.name:
        case "aws":
            print(needed_policy(settings.aws))
        case "azure":
            print(needed_role(settings.azure))
        case "gcp":
            print(role_text())
        case "karpenter":
            print(_cluster_role(settings.karpenter), end="")
        case other:
            raise ConfigError(
                "doctor", [f"provider.name: {other} has no permissions to list; set it to aws, azure, gcp or karpenter"]
            )
    return Exit.OK


def _cluster_role(options: KarpenterOptions) -> str:
    """The role of whoever buys through Karpenter, beside what the services need anyway."""
    validate_options(options)
    node_class = node_class_of(options)
    of_class = {
        "apiGroups": [node_class.group],
        "resources": ["*"],
        "resourceNames": [node_class.name],
        "verbs": ["get"],
    }
    has_limits = options.mode == "limits"
    rules = [rule for service in RIGHTS_WITH_KARPENTER for rule in rules_with_karpenter(service, has_limits=has_limits)]
    if has_limits:
        rules.append({"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]})  # which the scaler may anyway
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "gpu-autoscaler-karpenter"},
        "rules": [*rules, of_class],
    }
    return yaml.safe_dump(role, sort_keys=False)
