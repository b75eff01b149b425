"""`gpu-autoscaler doctor --live`: buys one instance of the real cloud, walks the driver's contract with it, ends it."""

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Sequence

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import PREFIX
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.findings import Finding
from gpu_autoscaler.providers.gcp.translate import parse_provider_id, token_prefix
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.providers.registry import ProviderOptions, open_provider
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.tools.live import LiveCheck, LiveLimits, LiveReport
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import print_message

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOUDS = ("aws", "azure", "gcp", "sim")
# Should the instance get as far as joining the cluster, no pod is to land on it.
TAINT = Taint(f"{PREFIX}/doctor", "NoSchedule", "live")


class LiveAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for beside `--live`."""

    pool: str
    offer_key: str | None  # None: the cheapest
    is_agreed: bool  # --yes: without it nothing is bought


def see_live(name: str, installation: str) -> None:
    """Raise ConfigError for a cloud that cannot be tried so, or without an installation to mark the instance with."""
    if name not in CLOUDS:
        said = (
            f"provider.name: {name} has no instances of a driver of ours to try; set it to one of {', '.join(CLOUDS)}"
        )
        raise ConfigError("doctor --live", [said])
    if installation in ("", "*"):
        said = "--installation: is needed, as what is bought is marked with it; it is the UID of kube-system:"
        command = "kubectl get namespace kube-system -o jsonpath={.metadata.uid}"
        raise ConfigError("doctor --live", [f"{said} {command}"])


async def walk_live(name: str, options: ProviderOptions, asked: LiveAsked) -> tuple[Sequence[Finding], Exit]:
    """Say what is bought and at what price; buy it if that was agreed to, and return what each step found."""
    provider = open_provider(name, options)
    try:
        offer = chosen(list(await provider.offers()), asked.offer_key)
    finally:
        await provider.close()
    price = (offer.price_micro_usd_per_hour or 0) / MICRO_USD_PER_USD
    told = f"one instance of {offer.key} for pool {asked.pool}, at ${price:,.4f} an hour by the {offer.price_source}"
    if not asked.is_agreed:
        print_message(f"doctor --live would buy {told}, and end it within minutes; nothing was bought: add --yes to buy it")
        return (), Exit.OK
    order = Order(
        action_id=ActionId(uuid.uuid4().hex),
        installation=options.installation,
        pool=asked.pool,
        offer=offer,
        labels=(),
        taints=(TAINT,),
    )
    print_message(f"buying {told}, as action {order.action_id} of installation {order.installation}; Ctrl-C ends it early")
    check = LiveCheck(lambda: open_provider(name, options), order, Clock.from_environment(), _say, LiveLimits())
    try:
        report = await _until_interrupted(check)
    finally:  # also when it is broken off: then the report never came
        for left in check.not_ended:
            print_message(f"NOT ENDED, it may still run and cost. By hand: {by_hand(name, options, order, left)}")
    return report.steps, _exit_of(report)


def chosen(offers: list[Offer], key: str | None) -> Offer:
    """Return the offer of that key, or the cheapest that can be had. Raises Stop; what has no price is not bought."""
    buyable = {
        offer.key: offer
        for offer in offers
        if offer.price_micro_usd_per_hour is not None and offer.barred_because is None
    }
    if key is None:
        if not buyable:
            raise Stop("nothing that is offered has a price and is not barred; `gpu-autoscaler doctor` says why")
        return min(buyable.values(), key=lambda offer: (offer.price_micro_usd_per_hour, offer.key))
    if key in buyable:
        return buyable[key]
    known = next((offer for offer in offers if offer.key == key), None)
    if known is None:
        raise Stop(f"--offer: {key} is not offered; offered are {', '.join(sorted(buyable)[:8])} ...", Exit.USAGE)
    why = known.barred_because or "its price is not known, so it is not bought; see prices_path of the cloud's settings"
    raise Stop(f"--offer: {key} cannot be had: {why}")


def by_hand(name: str, options: ProviderOptions, order: Order, left: ProviderId | None) -> str:
    """Return how to find it and end it without us."""
    match name:
        case "aws":
            in_region = f"--region {options.aws.region}"
            if left is None:
                tagged = f"Name=tag:{PREFIX}/action-id,Values={order.action_id}"
                return f"aws ec2 describe-instances {in_region} --filters {tagged}"
            one = left.rpartition("/")[2]
            return (
                f"{left}: aws ec2 terminate-instances {in_region} --instance-ids {one} (in a group: aws autoscaling"
                f" terminate-instance-in-auto-scaling-group --instance-id {one} --should-decrement-desired-capacity)"
            )
        case "gcp":
            in_project = f"--project {options.gcp.project}"
            if left is None:
                prefix = token_prefix(order.installation, order.action_id)
                return f"gcloud compute instances list {in_project} --filter='name~^{prefix}'"
            zone, one = parse_provider_id(left, str(options.gcp.project))
            managed = "gcloud compute instance-groups managed delete-instances"
            return f"{left}: {managed} <its group> {in_project} --zone {zone} --instances {one}"
        case "azure":
            if left is None:
                return f"az resource list --tag {PREFIX}_action-id={order.action_id}"
            return f"{left}: az resource delete --ids {left.removeprefix('azure://')}"
        case _:
            one = "" if left is None else f"/{left.rpartition('/')[2]}"
            end = "" if left is None else "-X DELETE "
            return f"curl {end}'{options.url}/cloud/instances{one}?installation={order.installation}'"


async def _until_interrupted(check: LiveCheck) -> LiveReport:
    """Run it; the first signal ends it in order, the second one breaks it off."""
    loop = asyncio.get_running_loop()
    walk = asyncio.ensure_future(check.run())
    heard = 0

    def interrupt() -> None:
        nonlocal heard
        heard += 1
        if heard > 1:
            walk.cancel()
            return
        print_message("interrupted: what was bought is being ended, which may take minutes; once more leaves it behind")
        check.interrupt()

    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: who started it hears the signals
        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupt)
    try:
        return await walk
    except asyncio.CancelledError:
        if heard == 0:
            raise
        raise Stop("broken off before its end", Exit.INTERRUPTED) from None
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


def _exit_of(report: LiveReport) -> Exit:
    if report.left:
        return Exit.FAILURE
    if report.is_interrupted:
        return Exit.INTERRUPTED
    return Exit.FAILURE if any(step.level == "error" for step in report.steps) else Exit.OK


def _say(found: Finding) -> None:
    step = f"; {found.next_step}" if found.next_step else ""
    print_message(f"{found.level:6}  {found.subject}: {found.said}{step}")
