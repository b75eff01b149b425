"""Commands that show what the gateway knows: status, nodes, plans, cost, why."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpu_autoscaler_services.cli.client import Gateway, part
from gpu_autoscaler_services.cli.directives import told
from gpu_autoscaler_services.cli.output import Output, Row, age, show, usd, words

HERE = Gateway()


def status(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """The cluster in numbers."""
    document = gateway.read("status")
    rows = [{"name": name, "value": value} for name, value in _figures(document)]
    columns = (("", lambda row: row["name"]), ("", lambda row: row["value"]))
    show(document, rows, columns, lambda row: row["name"], output)


def _figures(document: dict[str, Any]) -> list[tuple[str, str]]:
    unknown = document["price_unknown_count"]
    return [
        ("nodes", _counts(document["nodes_by_phase"])),
        ("capacity", _counts(document["nodes_by_capacity_type"])),
        (
            "GPUs",
            f"{document['gpu_busy_count']} busy of {document['gpu_count']}, {document['gpu_booting_count']} booting",
        ),
        ("jobs", _counts(document["jobs_by_status"])),
        ("pods without room", str(document["pods_unschedulable_count"])),
        ("spot notices", str(document["notices_count"])),
        ("price an hour", usd(document["price_micro_usd_per_hour"]) + (f" and {unknown} unknown" if unknown else "")),
        (
            "last plan",
            f"{age(document['last_plan_at'], document['as_of'])} ago" if document["last_plan_at"] else "none yet",
        ),
        ("active scaler", document["active_scaler"] or "unknown"),
        *(("overruled", _overruled(one)) for one in document["directives"]),
        ("broker", "connected" if document["is_broker_connected"] else "away"),
    ]


def _overruled(one: dict[str, Any]) -> str:
    return f"{told(one['directive'])}, by {one['given_by']} until {one['until'][:19]}Z: {one['reason']}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


def nodes(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Every node from its order to its end."""
    document = gateway.read("nodes")
    columns = (
        ("NAME", lambda row: row["name"]),
        ("PHASE", lambda row: row["phase"]),
        ("TYPE", lambda row: row["instance_type"]),
        ("ZONE", lambda row: row["zone"]),
        ("CAPACITY", lambda row: row["capacity_type"]),
        ("GPUS", lambda row: f"{row['gpu_busy_count']}/{row['gpu_count']} {row['gpu_model'] or ''}".strip()),
        ("PRICE/H", lambda row: usd(row["price_micro_usd_per_hour"])),
        ("AGE", lambda row: age(row["since"], document["as_of"])),
        ("NOTICE", lambda row: row["notice"] and (row["notice"]["reclaim_at"] or row["notice"]["kind"])),
    )
    show(document, document["items"], columns, lambda row: str(row["name"]), output)


def plans(
    *,
    limit: Annotated[int, Parameter(help="How many, newest first.")] = 10,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """The last plans: what was decided, what was held back, and why."""
    document = gateway.read("plans", limit=limit)
    rows = [row for plan in document["items"] for row in _plan_rows(plan)]
    known = gateway.read("nodes")["items"] if output == "table" else []
    names = {f"node/{node['node_uid']}": f"node/{node['name']}" for node in known}
    columns = (
        ("PLAN", lambda row: row["plan_id"]),
        ("AT", lambda row: row["as_of"][:19] + "Z"),
        ("WHAT", lambda row: row["what"].replace("_", " ")),
        ("ABOUT", lambda row: names.get(row["subject"], row["subject"])),
        ("WHY", lambda row: row["sentence"]),
    )
    named = document["items"] if output == "name" else rows
    show(document, named, columns, lambda row: str(row["plan_id"]), output)


def _plan_rows(plan: dict[str, Any]) -> list[Row]:
    head = {"plan_id": plan["plan_id"], "as_of": plan["as_of"]}
    decided = [{**head, **one, "what": one["decision"]} for one in plan["decisions"]]
    held = [{**head, **one, "what": "held back"} for one in plan["held_back"]]
    return [*decided, *held] or [{**head, "what": "nothing", "subject": "", "sentence": ""}]


def shadow(
    *,
    limit: Annotated[int, Parameter(help="How many of the differences that are over.")] = 10,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Where a policy in shadow would decide otherwise than the one in force, with both reasons.

    Both are asked about the real state. The shadow acts on nothing: what it would do stays until the real one does it.
    """
    document = gateway.read("shadow", limit=limit)
    if output == "table":
        words(_shadow_words(document))
    rows = [*document["now"], *document["earlier"]]
    columns = (
        ("SINCE", lambda row: row["since_at"][:19] + "Z"),
        ("UNTIL", lambda row: "now" if row["until_at"] is None else row["until_at"][:19] + "Z"),
        ("ABOUT", lambda row: row["name"]),
        ("REAL", lambda row: _said(row["real"])),
        ("SHADOW", lambda row: _said(row["shadow"])),
    )
    if rows or output != "table":
        show(document, rows, columns, lambda row: str(row["subject"]), output)


def _shadow_words(document: dict[str, Any]) -> str:
    if document["said_at"] is None:
        return "no policy runs in shadow; start one with `up --shadow FILE`, or the service with policy.shadow_path"
    count = len(document["now"])
    both = f"policy {document['policy_digest'][:8]} in shadow of {document['real_policy_digest'][:8]}"
    lines = [f"{both}: {f'{count} otherwise now' if count else 'decides the same now'}"]
    if document["is_compared_with_scaler"] is False:
        lines.append("the scaler runs with another policy than the one compared with; give both the same policy.path")
    return "\n".join(lines)


def _said(side: dict[str, Any]) -> str:
    return side["sentence"] or str(side["what"])


def cost(
    *,
    span_seconds: Annotated[int, Parameter(help="Width of a line in seconds of cluster time.")] = 3600,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Money by time and by project."""
    document = gateway.read("cost", span_seconds=span_seconds)
    spans = [{**span, "what": f"from {span['from_at']}"} for span in document["spans"]]
    projects = [{**one, "what": f"project {one['project_id'] or 'unknown'}"} for one in document["projects"]]
    columns = (
        ("WHAT", lambda row: row["what"]),
        ("ALLOCATED", lambda row: usd(row["allocated_micro_usd"])),
        ("IDLE", lambda row: usd(row.get("idle_micro_usd"))),
    )
    named = spans if output == "name" else [*spans, {**document, "what": "all of it"}, *projects]
    show(document, named, columns, lambda row: str(row["from_at"]), output)


def why(
    kind: Literal["node", "pod", "job"], name: str, /, *, gateway: Gateway = HERE, output: Output = "table"
) -> None:
    """What it waits for, or what keeps it; then its story back to its first cause.

    Parameters
    ----------
    kind: Literal["node", "pod", "job"]
        What it is.
    name: str
        Its name or id.
    """
    document = gateway.read(f"why/{kind}/{part(name)}")
    if output == "table":
        if document["now"]:
            print(document["now"], end="\n\n")
        print("\n".join(document["sentences"]))
    else:
        show(document, [document], (), lambda row: str(row["name"]), output)
