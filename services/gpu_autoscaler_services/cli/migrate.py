"""`gpu-autoscaler migrate`: bring streams, consumers and store to this release, or streams back to an earlier one."""

import asyncio
from typing import Annotated

import msgspec
from cyclopts import Parameter

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import Output, print_message, show
from gpu_autoscaler_services.cli.record import HERE, Broker
from gpu_autoscaler_services.cli.running import silence_logs
from gpu_autoscaler_services.migration import Part
from gpu_autoscaler_services.migration import migrate as migrate_release


def migrate(
    broker: Broker = HERE,
    *,
    apply: Annotated[bool, Parameter(help="Apply the changes; without it they are only listed.")] = False,
    only: Annotated[
        Part, Parameter(help="store: the schema of the store; required: also what services refuse to start with.")
    ] = "all",
    to: Annotated[
        str | None, Parameter(help="Earlier release to prepare the broker for, before a rollback to it: 0.2.")
    ] = None,
    discard_history: Annotated[
        bool, Parameter(help="Allow limits below what a stream stores, which discards its oldest messages.")
    ] = False,
    output: Output = "table",
) -> int:
    """Bring streams, consumers and store to this release."""
    silence_logs()
    changes = asyncio.run(
        migrate_release(broker.settings(), only, to=to, is_applied=apply, is_history_discarded=discard_history)
    )
    rows = [msgspec.to_builtins(change) for change in changes]
    keys = ("thing", "property", "actual", "declared", "outcome", "next_step")
    columns = [(key.upper().replace("_", " "), lambda row, key=key: row[key]) for key in keys]
    show(rows, rows, columns, lambda row: f"{row['thing']}: {row['property']}", output)
    left_count = sum(change.outcome in ("pending", "refused") for change in changes)
    if not changes:
        print_message("broker and store are as declared")
    elif left_count:
        print_message(f"{left_count} change(s) left" + ("" if apply else "; apply them with --apply"))
    return Exit.FAILURE if left_count else Exit.OK
