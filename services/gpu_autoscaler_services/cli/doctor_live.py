"""`gpu-autoscaler doctor --live`: buy one instance, test the driver with it, terminate it."""

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
from gpu_autoscaler.providers.gcp.translate import parse_provider_id, token_prefix
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.providers.registry import ProviderOptions, open_provider
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.live_check import LiveCheck, LiveLimits, LiveReport
from gpu_autoscaler_services.cli.output import print_message

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOUDS = ("aws", "azure", "gcp", "sim")
# If the instance joins the cluster, no pod may be scheduled on it.
TAINT = Taint(f"{PREFIX}/doctor", "NoSchedule", "live")


class LiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that go with `--live`."""

    pool: str
    offer_key: str | None  # None: the cheapest
    is_confirmed: bool  # --yes: without it nothing is bought


def check_live(name: str, installation: str) -> None:
    """Raise ConfigError for a provider without instances of our own, or without an installation id for tags."""
    if name not in CLOUDS:
        error = f"provider.name: {name} does not launch instances itself; set it to one of {', '.join(CLOUDS)}"
        raise ConfigError("doctor --live", [error])
    if installation in ("", "*"):
        error = "--installation: required, because instances are tagged with it; it is the UID of kube-system:"
        command = "kubectl get namespace kube-system -o jsonpath={.metadata.uid}"
        raise ConfigError("doctor --live", [f"{error} {command}"])


async def run_live(name: str, options: ProviderOptions, live: LiveOptions) -> tuple[Sequence[Finding], Exit]:
    """Print offer and price; if confirmed, buy it and return the finding of each step."""
    provider = open_provider(name, options)
    try:
        offer = choose_offer(list(await provider.offers()), live.offer_key)
    finally:
        await provider.close()
    price = (offer.price_micro_usd_per_hour or 0) / MICRO_USD_PER_USD
    purchase = f"1 instance of {offer.key} for pool {live.pool} at ${price:,.4f} per hour ({offer.price_source})"
    if not live.is_confirmed:
        print_message(f"doctor --live would buy {purchase} and terminate it within minutes; to buy it, add --yes")
        return (), Exit.OK
    order = Order(
        action_id=ActionId(uuid.uuid4().hex),
        installation=options.installation,
        pool=live.pool,
        offer=offer,
        labels=(),
        taints=(TAINT,),
    )
    print_message(f"buying {purchase}: action {order.action_id}, installation {order.installation}; Ctrl-C ends early")
    check = LiveCheck(lambda: open_provider(name, options), order, Clock.from_environment(), _print_step, LiveLimits())
    try:
        report = await _until_interrupted(check)
    finally:  # also on cancellation, when there is no report
        for provider_id in check.not_ended:
            command = manual_command(name, options, order, provider_id)
            print_message(f"NOT TERMINATED, an instance may still run and cost. Terminate it manually: {command}")
    return report.steps, _exit_code(report)


def choose_offer(offers: list[Offer], key: str | None) -> Offer:
    """Return the offer of that key, or the cheapest available one with a known price. Raises Stop if there is none."""
    buyable = {
        offer.key: offer
        for offer in offers
        if offer.price_micro_usd_per_hour is not None and offer.unavailable_because is None
    }
    if key is None:
        if not buyable:
            raise Stop("no available offer has a known price; run: gpu-autoscaler doctor")
        return min(buyable.values(), key=lambda offer: (offer.price_micro_usd_per_hour, offer.key))
    if key in buyable:
        return buyable[key]
    known = next((offer for offer in offers if offer.key == key), None)
    if known is None:
        raise Stop(f"--offer: {key} is not offered; available: {', '.join(sorted(buyable)[:8])} ...", Exit.USAGE)
    why = known.unavailable_because or "its price is unknown; set prices_path in the cloud's settings"
    raise Stop(f"--offer: {key} cannot be bought: {why}")


def manual_command(name: str, options: ProviderOptions, order: Order, provider_id: ProviderId | None) -> str:
    """Return the shell command that terminates the instance, or finds it if its id is unknown."""
    match name:
        case "aws":
            in_region = f"--region {options.aws.region}"
            if provider_id is None:
                tagged = f"Name=tag:{PREFIX}/action-id,Values={order.action_id}"
                return f"aws ec2 describe-instances {in_region} --filters {tagged}"
            instance = provider_id.rpartition("/")[2]
            return (
                f"{provider_id}: aws ec2 terminate-instances {in_region} --instance-ids {instance}"
                " (in a group: aws autoscaling terminate-instance-in-auto-scaling-group"
                f" --instance-id {instance} --should-decrement-desired-capacity)"
            )
        case "gcp":
            in_project = f"--project {options.gcp.project}"
            if provider_id is None:
                prefix = token_prefix(order.installation, order.action_id)
                return f"gcloud compute instances list {in_project} --filter='name~^{prefix}'"
            zone, instance = parse_provider_id(provider_id, str(options.gcp.project))
            managed = "gcloud compute instance-groups managed delete-instances"
            return f"{provider_id}: {managed} <its group> {in_project} --zone {zone} --instances {instance}"
        case "azure":
            if provider_id is None:
                return f"az resource list --tag {PREFIX}_action-id={order.action_id}"
            return f"{provider_id}: az resource delete --ids {provider_id.removeprefix('azure://')}"
        case _:
            path = "" if provider_id is None else f"/{provider_id.rpartition('/')[2]}"
            method = "" if provider_id is None else "-X DELETE "
            return f"curl {method}'{options.url}/cloud/instances{path}?installation={order.installation}'"


async def _until_interrupted(check: LiveCheck) -> LiveReport:
    """Run the check. The first signal ends it in order, the second one cancels it."""
    loop = asyncio.get_running_loop()
    run = asyncio.ensure_future(check.run())
    signals_count = 0

    def interrupt() -> None:
        nonlocal signals_count
        signals_count += 1
        if signals_count > 1:
            run.cancel()
            return
        print_message("interrupted: terminating the instance, takes minutes; interrupt again to leave it running")
        check.interrupt()

    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller handles signals
        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupt)
    try:
        return await run
    except asyncio.CancelledError:
        if signals_count == 0:
            raise
        raise Stop("doctor --live was canceled before it finished", Exit.INTERRUPTED) from None
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


def _exit_code(report: LiveReport) -> Exit:
    if report.left:
        return Exit.FAILURE
    if report.is_interrupted:
        return Exit.INTERRUPTED
    return Exit.FAILURE if any(step.level == "error" for step in report.steps) else Exit.OK


def _print_step(finding: Finding) -> None:
    step = f"; {finding.next_step}" if finding.next_step else ""
    print_message(f"{finding.level:7}  {finding.subject}: {finding.message}{step}")
