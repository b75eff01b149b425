"""Commands that show spend budgets and available offers."""

from collections.abc import Mapping
from typing import Any

from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.output import Output, print_message, show, usd
from gpu_autoscaler_services.cli.views import HERE


def budget(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Show each spend budget."""
    document = gateway.read("budget")
    if output == "table" and not document["items"]:
        print_message("the policy has no spend budget; set limits.spend, or spend of a pool, in the policy file")
        return
    columns = (
        ("OWNER", lambda row: row["owner"]),
        ("PERIOD", lambda row: row["period"]),
        ("LIMIT", lambda row: f"{usd(row['limit_micro_usd'])} {'hard' if row['is_hard'] else 'soft'}"),
        ("SPENT", lambda row: usd(row["spent_micro_usd"])),
        ("RESERVED", lambda row: usd(row["reserved_micro_usd"])),
        ("LEFT", lambda row: usd(row["left_micro_usd"])),
        ("PERIOD ENDS", lambda row: row["until"]),
        ("UNKNOWN BECAUSE", lambda row: row["unknown_reason"]),
    )
    show(document, document["items"], columns, lambda row: f"{row['owner']}/{row['period']}", output)


def _priced(row: Mapping[str, Any]) -> str:
    """Return time and source of the price; a stale price is marked."""
    text = " ".join(str(part) for part in (row["priced_at"], row["price_source"]) if part)
    return f"{text} STALE".strip() if row["is_price_stale"] else text


def offers(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """List available and unavailable offers."""
    document = gateway.read("offers")
    columns = (
        ("OFFER", lambda row: row["name"]),
        ("GPUS", lambda row: f"{row['gpu_count']} {row['gpu_model'] or ''}".strip()),
        ("PRICE/H", lambda row: usd(row["price_micro_usd_per_hour"])),
        ("PRICED", _priced),
        ("UNAVAILABLE UNTIL", lambda row: row["unavailable_until"]),
        ("REASON", lambda row: row["unavailable_reason"]),
    )
    show(document, document["items"], columns, lambda row: str(row["name"]), output)
