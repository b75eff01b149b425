"""`gpu-autoscaler policy check`: validate a policy file before it is used."""

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import print_message

HERE = Gateway()
policy = App(
    name="policy",
    help_format="plaintext",
    help_epilogue="""Examples:
  gpu-autoscaler policy check policy.toml
  gpu-autoscaler policy check policy.toml --check-offers""",
)


@policy.command
def check(
    file: Path,
    /,
    *,
    check_offers: Annotated[
        bool,
        Parameter(negative="", help="Also ask the gateway for current offers, and report pools that no offer matches."),
    ] = False,
    gateway: Gateway = HERE,
) -> int:
    """Validate a policy file and report all errors at once, each with its next step.

    Services run the same validation at start. Offers change, so only this command compares the policy with them.

    Exit codes: 0 valid, 2 invalid.
    """
    offers = _offers(gateway) if check_offers else None
    loaded = load_policy(file, offers)
    pools = ", ".join(pool.name for pool in loaded.pools)
    matched = "" if offers is None else f"; each pool matches at least one of {len(offers)} offers"
    print(f"{file}: valid ({len(loaded.pools)} pools: {pools}){matched}")
    if offers is None:
        print_message("not checked: whether each pool matches an offer; use --check-offers")
    return Exit.OK


def _offers(gateway: Gateway) -> tuple[Offer, ...]:
    latest = gateway.read("facts", subject=SpotOffersSampled.subject_root(), limit=1)["items"]
    if not latest:
        raise Stop("the gateway has no recent offers; check that the spot watcher runs, or omit --check-offers")
    return msgspec.convert(latest[0]["event"]["data"], SpotOffersSampled).offers
