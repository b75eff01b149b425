"""Commands that show what may still be spent, and what can be bought."""

from collections.abc import Mapping
from typing import Any

from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.output import Output, show, usd, print_message
from gpu_autoscaler_services.cli.views import HERE


def budget(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """What is spent, promised and left of each limit of money."""
    document = gateway.read("budget")
    if output == "table" and not document["items"]:
        print_message("the policy limits no money by day or month; `limits.spend` and `pools.spend` would")
        return
    columns = (
        ("WHOSE", lambda row: row["owner"]),
        ("PERIOD", lambda row: row["period"]),
        ("LIMIT", lambda row: f"{usd(row['limit_micro_usd'])} {'hard' if row['is_hard'] else 'soft'}"),
        ("SPENT", lambda row: usd(row["spent_micro_usd"])),
        ("RESERVED", lambda row: usd(row["reserved_micro_usd"])),
        ("LEFT", lambda row: usd(row["left_micro_usd"])),
        ("UNTIL", lambda row: row["until"]),
        ("DOUBT", lambda row: row["doubt"]),
    )
    show(document, document["items"], columns, lambda row: f"{row['owner']}/{row['period']}", output)


def _priced(row: Mapping[str, Any]) -> str:
    """When the price was heard of, and from whom; a stale one says so."""
    told = " ".join(str(part) for part in (row["priced_at"], row["price_source"]) if part)
    return f"{told} STALE".strip() if row["is_price_stale"] else told


def offers(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """All that is for sale, and what the cloud would not sell lately: until when, and why."""
    document = gateway.read("offers")
    columns = (
        ("OFFER", lambda row: row["name"]),
        ("GPUS", lambda row: f"{row['gpu_count']} {row['gpu_model'] or ''}".strip()),
        ("PRICE/H", lambda row: usd(row["price_micro_usd_per_hour"])),
        ("PRICED", _priced),
        ("REFUSED UNTIL", lambda row: row["refused_until"]),
        ("WHY", lambda row: row["refused_because"]),
    )
    show(document, document["items"], columns, lambda row: str(row["name"]), output)
