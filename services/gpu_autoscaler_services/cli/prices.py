"""`gpu-autoscaler prices`: what the cloud asks for now, as files that can be read in its place."""

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.shelf import rows_of
from gpu_autoscaler.providers.registry import ProviderOptions, open_provider
from gpu_autoscaler.runtime.config import Settings, load_settings
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import print_message
from gpu_autoscaler_services.wiring import connection_of

prices = App(name="prices", help="What the cloud asks for.", help_format="plaintext")


@prices.command
def snapshot(
    file: Path,
    /,
    *,
    config: Annotated[Path | None, Parameter(help="TOML file of settings; the environment wins.")] = None,
) -> int:
    """Write the prices of everything that the settings let us buy, in US dollars an hour by `type/zone/capacity type`.

    The file is what `aws.prices_path` and its like read. An offer without a price is left out: that is not free.
    """
    given = os.environ.get("GPU_AUTOSCALER_CONFIG")
    settings = load_settings(config or (Path(given) if given else None), os.environ)
    offers = asyncio.run(_offers(settings))
    told = {
        offer.key: offer.price_micro_usd_per_hour / MICRO_USD_PER_USD
        for offer in sorted(offers, key=lambda offer: offer.key)
        if offer.price_micro_usd_per_hour is not None
    }
    if not told:
        raise Stop(f"{settings.provider.name} tells no price of {len(offers)} offers; `gpu-autoscaler doctor` says why")
    file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    unpriced = "" if len(told) == len(offers) else f"; {len(offers) - len(told)} offers have none"
    print_message(f"{file}: {len(told)} prices of {settings.provider.name}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC{unpriced}")
    return Exit.OK


@prices.command
def shelf(
    file: Path,
    /,
    *,
    config: Annotated[Path | None, Parameter(help="TOML file of settings; the environment wins.")] = None,
) -> int:
    """Write everything that the settings let us buy, with sizes and prices: what `karpenter.offers_path` reads.

    With the settings of the cloud that Karpenter buys from. Services read the file again when it changes.
    """
    given = os.environ.get("GPU_AUTOSCALER_CONFIG")
    settings = load_settings(config or (Path(given) if given else None), os.environ)
    rows = rows_of(asyncio.run(_offers(settings)))
    if not rows:
        raise Stop(f"{settings.provider.name} sells nothing by these settings; `gpu-autoscaler doctor` says why")
    part = file.with_name(f"{file.name}.part")  # whoever reads it meanwhile sees one or the other
    part.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    part.replace(file)
    types = len({row.instance_type for row in rows})
    print_message(f"{file}: {types} types of {settings.provider.name}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    return Exit.OK


async def _offers(settings: Settings) -> list[Offer]:
    provider = open_provider(
        settings.provider.name,
        ProviderOptions(
            installation="*",
            url=settings.provider.url,
            call_seconds_max=settings.provider.call_seconds_max,
            aws=settings.aws,
            karpenter=settings.karpenter,
            kube=lambda: connection_of(settings.kube),
            azure=settings.azure,
            gcp=settings.gcp,
        ),
    )
    try:
        return list(await provider.offers())
    finally:
        await provider.close()
