"""`policy check`: whether a policy file can be followed, before anything is started with it."""

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
policy = App(name="policy", help="Check a policy file.", help_format="plaintext")


@policy.command
def check(
    file: Path,
    /,
    *,
    on_sale: Annotated[
        bool,
        Parameter(negative="", help="Ask the gateway what is for sale, and find pools that nothing of it can reach."),
    ] = False,
    gateway: Gateway = HERE,
) -> int:
    """Say whether the policy can be followed, with every mistake at once and its next step.

    Services refuse the same mistakes when they start; what is for sale changes, so only this command looks at that.

    Exits 0 right, 2 mistakes.
    """
    offers = _offers(gateway) if on_sale else None
    found = load_policy(file, offers)
    pools = ", ".join(pool.name for pool in found.pools)
    looked = "" if offers is None else f"; each pool finds something among {len(offers)} offers"
    print(f"{file}: can be followed ({len(found.pools)} pools: {pools}){looked}")
    if offers is None:
        print_message("not looked at: whether each pool finds something for sale; --on-sale asks the gateway")
    return Exit.OK


def _offers(gateway: Gateway) -> tuple[Offer, ...]:
    newest = gateway.read("facts", subject=SpotOffersSampled.subject_root(), limit=1)["items"]
    if not newest:
        raise Stop("the gateway has heard of no offers lately; is the spot watcher running? Check without --on-sale")
    return msgspec.convert(newest[0]["event"]["data"], SpotOffersSampled).offers
