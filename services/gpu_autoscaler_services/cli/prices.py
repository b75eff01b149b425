"""`gpu-autoscaler prices`: save the cloud's current prices or catalog to files that the services can read."""

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.catalog import rows_of
from gpu_autoscaler.providers.registry import ProviderOptions, open_provider
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.options import CommandGroup
from gpu_autoscaler_services.cli.output import print_message
from gpu_autoscaler_services.wiring import connection_of

_GROUP = CommandGroup("prices", "prices snapshot prices.json", "prices catalog offers.json --config aws.toml")
prices = _GROUP.app
Config = Annotated[
    Path | None, Parameter(env_var="GPU_AUTOSCALER_CONFIG", help="Settings file (TOML); the environment overrides it.")
]


@_GROUP.command
def snapshot(file: Path, /, *, config: Config = None) -> int:
    """Save the price of every offer that the settings allow: US dollars per hour by TYPE/ZONE/CAPACITY-TYPE.

    The setting prices_path of a cloud reads this file. Offers without a known price are omitted.
    """
    settings = load_settings(config, os.environ)
    offers = asyncio.run(_offers(settings))
    usd_per_hour = {
        offer.key: offer.price_micro_usd_per_hour / MICRO_USD_PER_USD
        for offer in sorted(offers, key=lambda offer: offer.key)
        if offer.price_micro_usd_per_hour is not None
    }
    if not usd_per_hour:
        raise Stop(f"{settings.provider.name}: none of {len(offers)} offers has a price; run: gpu-autoscaler doctor")
    file.write_text(json.dumps(usd_per_hour, indent=2) + "\n", encoding="utf-8")
    unpriced = f"; {count} offers without a price" if (count := len(offers) - len(usd_per_hour)) else ""
    at = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    print_message(f"{file}: {len(usd_per_hour)} prices of {settings.provider.name}, {at}{unpriced}")
    return Exit.OK


@_GROUP.command
def catalog(file: Path, /, *, config: Config = None) -> int:
    """Save every offer that the settings allow, with sizes and prices, for the setting karpenter.offers_path.

    Use the settings of the cloud that Karpenter buys from. Services reload the file when it changes.
    """
    settings = load_settings(config, os.environ)
    rows = rows_of(asyncio.run(_offers(settings)))
    if not rows:
        raise Stop(f"{settings.provider.name}: these settings allow no offer; run: gpu-autoscaler doctor")
    part = file.with_name(f"{file.name}.part")  # readers see the old file or the new one
    part.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    part.replace(file)
    types = len({row.instance_type for row in rows})
    print_message(f"{file}: {types} instance types of {settings.provider.name}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    return Exit.OK


def provider_options(settings: Settings, installation: str) -> ProviderOptions:
    """Return the options of the provider in these settings, for instances tagged with this installation."""
    return ProviderOptions(
        installation=installation,
        url=settings.provider.url,
        call_seconds_max=settings.provider.call_seconds_max,
        aws=settings.aws,
        karpenter=settings.karpenter,
        kube=lambda: connection_of(settings.kube),
        azure=settings.azure,
        gcp=settings.gcp,
    )


async def _offers(settings: Settings) -> list[Offer]:
    provider = open_provider(settings.provider.name, provider_options(settings, "*"))
    try:
        return list(await provider.offers())
    finally:
        await provider.close()
