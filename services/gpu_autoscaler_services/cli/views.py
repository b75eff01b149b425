"""Commands that show the gateway's view: status, nodes, plans, shadow, cost, budget, settings, offers, why."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpu_autoscaler.model.format import counted
from gpu_autoscaler_services.cli.client import Gateway, plain
from gpu_autoscaler_services.cli.directives import describe, until
from gpu_autoscaler_services.cli.output import Output, Row, age, is_table, print_message, show, usd

HERE = Gateway()


def status(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Show the cluster in numbers."""
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
        ("unschedulable pods", str(document["pods_unschedulable_count"])),
        ("interruption notices", str(document["notices_count"])),
        (
            "price per hour",
            usd(document["price_micro_usd_per_hour"])
            + (f" plus {unknown} instance(s) without a known price" if unknown else ""),
        ),
        ("cost of spreading spot", f"{usd(document['spread_micro_usd_per_month'])} per month"),
        (
            "last plan",
            f"{age(document['last_plan_at'], document['as_of'])} ago" if document["last_plan_at"] else "none yet",
        ),
        ("active scaler", document["active_scaler"] or "unknown"),
        *(("directive", _directive(directive)) for directive in document["directives"]),
        ("broker", "connected" if document["is_broker_connected"] else "disconnected"),
    ]


def _directive(row: dict[str, Any]) -> str:
    return f"{describe(row['directive'])}, by {row['given_by']} until {until(row)}: {row['reason']}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


def nodes(  # noqa: PLR0913 - one for each option
    *,
    phase: Annotated[list[str] | None, Parameter(help="Only nodes in this phase; repeatable.")] = None,
    pool: Annotated[str | None, Parameter(help="Only nodes of this pool.")] = None,
    zone: Annotated[str | None, Parameter(help="Only nodes in this zone.")] = None,
    instance_type: Annotated[str | None, Parameter(help="Only nodes of this instance type.")] = None,
    capacity_type: Annotated[str | None, Parameter(help="Only nodes of this capacity type.")] = None,
    gpu_model: Annotated[str | None, Parameter(help="Only nodes with this GPU model.")] = None,
    limit: Annotated[int | None, Parameter(help="Number of nodes, by name. Default: all.")] = None,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """List nodes, from order to termination."""
    document = gateway.read_all(
        "nodes", limit, phase=phase, pool=pool, zone=zone, instance_type=instance_type, capacity_type=capacity_type,
        gpu_model=gpu_model,
    )  # fmt: skip
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
    show(document, document["items"], columns, lambda row: str(row["name"]), output, wide=("ZONE",))


def plans(
    *,
    limit: Annotated[int, Parameter(help="Number of plans, newest first.")] = 10,
    after: Annotated[str | None, Parameter(help="Only plans made at this time or later, RFC 3339.")] = None,
    before: Annotated[str | None, Parameter(help="Only plans made before this time, RFC 3339.")] = None,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """List plans, newest first, old ones from the store."""
    document = gateway.read_all("plans", limit, after=after, before=before)
    rows = [row for plan in document["items"] for row in _plan_rows(plan)]
    node_items = gateway.read_all("nodes")["items"] if is_table(output) else []
    names = {f"node/{node['node_uid']}": f"node/{node['name']}" for node in node_items}
    columns = (
        ("PLAN", lambda row: row["plan_id"]),
        ("AT", lambda row: row["as_of"]),
        ("ACTION", lambda row: row["action"].replace("_", " ")),
        ("SUBJECT", lambda row: names.get(row["subject"], row["subject"])),
        ("REASON", lambda row: row["sentence"]),
    )
    named = document["items"] if output == "name" else rows
    show(document, named, columns, lambda row: str(row["plan_id"]), output)


def _plan_rows(plan: dict[str, Any]) -> list[Row]:
    head = {"plan_id": plan["plan_id"], "as_of": plan["as_of"]}
    decided = [{**head, **decision, "action": decision["decision"]} for decision in plan["decisions"]]
    groups = plan.get("deferred_groups") or [  # none: an older plan, which names each object
        {**action, "subjects": [action["subject"]], "objects_count": 1} for action in plan["deferred"]
    ]
    deferred = [{**head, **group, "action": "deferred", "subject": _objects(group)} for group in groups]
    unlisted = [
        {**head, "action": "deferred", "subject": counted(count, "more object"), "sentence": reason}
        for reason, count in plan.get("deferred_unlisted", {}).items()
    ]
    return [*decided, *deferred, *unlisted] or [{**head, "action": "none", "subject": "", "sentence": ""}]


def _objects(group: Row) -> str:
    """Return the only subject of a group, or its first one and the number of the others."""
    count, subjects = group["objects_count"], group["subjects"]
    return str(subjects[0]) if count == 1 else f"{subjects[0]} and {count - 1} more" if subjects else str(count)


def shadow(
    *,
    limit: Annotated[int, Parameter(help="Number of past differences.")] = 10,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Show where the shadow policy differs from the active one."""
    document = gateway.read("shadow", limit=limit)
    if is_table(output):
        print_message(_shadow_summary(document))
    rows = [*document["now"], *document["earlier"]]
    columns = (
        ("SINCE", lambda row: row["since_at"]),
        ("UNTIL", lambda row: "now" if row["until_at"] is None else row["until_at"]),
        ("SUBJECT", lambda row: row["name"]),
        ("ACTIVE POLICY", lambda row: _outcome(row["real"])),
        ("SHADOW POLICY", lambda row: _outcome(row["shadow"])),
    )
    if rows or not is_table(output):
        show(document, rows, columns, lambda row: str(row["subject"]), output)


def _shadow_summary(document: dict[str, Any]) -> str:
    if document["changed_at"] is None:
        return "no shadow policy is running; use `up --shadow FILE`, or set policy.shadow_path for the service shadow"
    count = len(document["now"])
    policies = f"shadow policy {document['policy_digest'][:8]}, active policy {document['real_policy_digest'][:8]}"
    lines = [f"{policies}: {f'{count} difference(s) now' if count else 'no differences now'}"]
    if document["is_compared_with_scaler"] is False:
        lines.append(
            "the scaler runs another policy than the one compared here; set the same policy.path for both services"
        )
    return "\n".join(lines)


def _outcome(side: dict[str, Any]) -> str:
    return side["sentence"] or str(side["outcome"])


def cost(
    *,
    span_seconds: Annotated[int, Parameter(help="Seconds of cluster time per row.")] = 3600,
    project: Annotated[str | None, Parameter(help="Only this project, by days of UTC.")] = None,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Show spend by time and by project."""
    document = gateway.read("cost", span_seconds=span_seconds, project_id=project)
    spans = [{**span, "scope": f"from {span['from_at']}"} for span in document["spans"]]
    projects = [
        {**project, "scope": f"project {project['project_id'] or 'unknown'}"} for project in document["projects"]
    ]
    columns = (
        ("SCOPE", lambda row: row["scope"]),
        ("ALLOCATED", lambda row: usd(row["allocated_micro_usd"])),
        ("IDLE", lambda row: usd(row.get("idle_micro_usd"))),
    )
    named = spans if output == "name" else [*spans, {**document, "scope": "total"}, *projects]
    show(document, named, columns, lambda row: str(row["from_at"]), output)


def budget(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Show each spend budget."""
    document = gateway.read_all("budget")
    none = "the policy has no spend budget; set limits.spend, or spend of a pool, in the policy file"
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
    show(document, document["items"], columns, lambda row: f"{row['owner']}/{row['period']}", output, none=none)


def settings(
    *,
    all_settings: Annotated[bool, Parameter(name="--all", help="Also those at their default.")] = False,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Show the gateway's settings and, as json, the policy in force."""
    document = gateway.read("settings")
    rows = [row for row in document["items"] if all_settings or not row["is_default"]]
    columns = (("KEY", lambda row: row["key"]), ("VALUE", lambda row: row["value"]))
    show(
        document,
        rows,
        columns,
        lambda row: str(row["key"]),
        output,
        none="every setting has its default; list them with --all",
    )


def offers(
    *,
    zone: Annotated[str | None, Parameter(help="Only offers in this zone.")] = None,
    instance_type: Annotated[str | None, Parameter(help="Only offers of this instance type.")] = None,
    capacity_type: Annotated[str | None, Parameter(help="Only offers of this capacity type.")] = None,
    gpu_model: Annotated[str | None, Parameter(help="Only offers with this GPU model.")] = None,
    available: Annotated[
        bool | None, Parameter(negative="--no-available", help="Only offers that are available now, or that are not.")
    ] = None,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """List available and unavailable offers."""
    document = gateway.read_all(
        "offers", zone=zone, instance_type=instance_type, capacity_type=capacity_type, gpu_model=gpu_model,
        is_available=available,
    )  # fmt: skip
    columns = (
        ("OFFER", lambda row: row["name"]),
        ("GPUS", lambda row: f"{row['gpu_count']} {row['gpu_model'] or ''}".strip()),
        ("PRICE/H", lambda row: usd(row["price_micro_usd_per_hour"]) + (" STALE" if row["is_price_stale"] else "")),
        ("PRICED", lambda row: row["priced_at"]),
        ("SOURCE", lambda row: row["price_source"]),
        ("UNAVAILABLE UNTIL", lambda row: row["unavailable_until"]),
        ("REASON", lambda row: row["unavailable_reason"]),
    )
    show(document, document["items"], columns, lambda row: str(row["name"]), output, wide=("PRICED", "SOURCE"))


def why(
    kind: Annotated[Literal["node", "pod", "job", "request"], Parameter(help="Kind of object.")],
    name: Annotated[str, Parameter(help="Name or id; namespace/name for a pod or a ProvisioningRequest.")],
    /,
    *,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Explain a node, pod, job or ProvisioningRequest."""
    document = plain(gateway.client.why(kind, name))
    if is_table(output):
        if document["now"]:
            print(document["now"], end="\n\n")
        print("\n".join(document["sentences"]))
    else:
        show(document, [document], (), lambda row: str(row["name"]), output)
