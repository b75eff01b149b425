"""`gpu-autoscaler doctor`: check cloud access and configuration; with `--live` by buying one instance."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import yaml
from cyclopts import Parameter

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.preflight import needed_policy
from gpu_autoscaler.providers.azure.preflight import needed_role
from gpu_autoscaler.providers.gcp.permissions import role_text
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, node_class_of, validate_options
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.registry import run_preflight
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.directives import describe, until
from gpu_autoscaler_services.cli.doctor_live import LiveOptions, check_live, run_live
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import Output, print_message, show
from gpu_autoscaler_services.cli.prices import Config, provider_options
from gpu_autoscaler_services.registry import specs
from gpu_manager_sdk.errors import GPUManagerError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LivePurchase:
    """The options of `--live`."""

    live: Annotated[
        bool, Parameter(help="Also buy ONE instance, test the driver with it and terminate it; requires --yes.")
    ] = False
    offer: Annotated[
        str | None, Parameter(help="With --live: offer as TYPE/ZONE/CAPACITY-TYPE. Default: the cheapest.")
    ] = None
    pool: Annotated[str, Parameter(help="With --live: pool to buy for, if settings map pools to groups.")] = "default"
    yes: Annotated[bool, Parameter(help="With --live: confirm the purchase. It costs money.")] = False


NO_PURCHASE = LivePurchase()


def doctor(
    *,
    config: Config = None,
    installation: Annotated[
        str, Parameter(help="UID of the namespace kube-system; selects the instances that belong to this cluster.")
    ] = "*",
    policy: Annotated[
        bool, Parameter(help="Print the permissions that these settings need, without calling the cloud.")
    ] = False,
    purchase: LivePurchase = NO_PURCHASE,
    gateway: Annotated[
        str | None,
        Parameter(env_var="GPU_AUTOSCALER_GATEWAY", help="Also report what is held: the brake, freezes, pauses."),
    ] = None,
    output: Output = "table",
) -> int:
    """Check cloud access and configuration."""
    settings = load_settings(config, os.environ)
    if policy:
        return _print_policy(settings)
    if purchase.live:
        check_live(settings.provider.name, installation)
    options = provider_options(settings, installation)
    findings = list(asyncio.run(run_preflight(settings.provider.name, options)))
    findings += [] if gateway is None else _held(Gateway(address=gateway, token=os.environ.get("GPU_AUTOSCALER_TOKEN")))
    code = Exit.FAILURE if any(finding.level == "error" for finding in findings) else Exit.OK
    if purchase.live and code is Exit.OK:
        chosen = LiveOptions(pool=purchase.pool, offer_key=purchase.offer, is_confirmed=purchase.yes)
        steps, code = asyncio.run(run_live(settings.provider.name, options, chosen))
        findings += steps
    rows = [msgspec.to_builtins(finding) for finding in findings]
    keys = ("level", "subject", "message", "next_step")
    columns = [(key.upper().replace("_", " "), lambda row, key=key: row[key]) for key in keys]
    show(rows, rows, columns, lambda row: str(row["subject"]), output)
    if errors_count := sum(finding.level == "error" for finding in findings):
        print_message(f"{settings.provider.name}: {errors_count} error(s); correct them, then run doctor again")
    return code


def _held(gateway: Gateway) -> Iterator[Finding]:
    """Yield what the running system does not do until a person or a time allows it."""
    try:
        rows = gateway.read("directives")["items"]
    except (Stop, GPUManagerError) as stop:
        yield Finding(level="error", subject="gateway", message=str(stop), next_step="check --gateway and the token")
        return
    for row in rows:
        resume = f"run: gpu-autoscaler resume {row['key']}"
        message = f"{describe(row['directive'])}, by {row['given_by']} until {until(row)}: {row['reason']}"
        yield Finding(level="warning", subject=row["key"], message=message, next_step=resume)


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
                "doctor", [f"provider.name: {other} needs no cloud permissions; set it to aws, azure, gcp or karpenter"]
            )
    return Exit.OK


def _cluster_role(options: KarpenterOptions) -> str:
    """Return the ClusterRole for buying through Karpenter, in addition to the services' own rights."""
    validate_options(options)
    node_class = node_class_of(options)
    of_class = {
        "apiGroups": [node_class.group],
        "resources": ["*"],
        "resourceNames": [node_class.name],
        "verbs": ["get"],
    }
    has_limits = options.mode == "limits"
    rules = [rule for spec in reversed(specs()) for rule in spec.karpenter_rules(has_limits=has_limits)]
    if has_limits:
        rules.append({"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]})  # the scaler always has this right
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "gpu-autoscaler-karpenter"},
        "rules": [*rules, of_class],
    }
    return yaml.safe_dump(role, sort_keys=False)
