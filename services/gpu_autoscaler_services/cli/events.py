"""`gpu-autoscaler events`: recorded facts, the newest ones or as they arrive."""

import json
from typing import Annotated, Any

from cyclopts import Parameter

from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.output import Output, show

HERE = Gateway()


def events(
    *,
    subject: Annotated[
        list[str] | None, Parameter(help="Subject filter with NATS wildcards, e.g. scaling.>; repeatable.")
    ] = None,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Print facts as they arrive, until Ctrl-C.")
    ] = False,
    limit: Annotated[int, Parameter(help="Number of newest facts, without --follow.")] = 50,
    env: Annotated[
        bool, Parameter(help="Show the values of environment variables, without --follow; needs a right.")
    ] = False,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Show recorded facts."""
    subjects = subject or [">"]
    if follow:
        for recorded in gateway.client.events(*subjects):
            event = recorded.document
            print(json.dumps(event, ensure_ascii=False) if output == "json" else _line(event, output), flush=True)
        return
    items = gateway.read("facts", subject=subjects, limit=limit, env="true" if env else None)["items"]
    ordered: list[dict[str, Any]] = [item["event"] for item in reversed(items)]
    columns = (
        ("TIME", lambda row: row["time"]),
        ("TYPE", lambda row: row["type"]),
        ("ID", lambda row: row["id"]),
        ("SOURCE", lambda row: row["source"]),
    )
    show(ordered, ordered, columns, lambda row: str(row["id"]), output)


def _line(event: dict[str, Any], output: str) -> str:
    if output == "name":
        return str(event["id"])
    return f"{event['time']}  {event['type']:<28} {json.dumps(event['data'], ensure_ascii=False)[:200]}"
