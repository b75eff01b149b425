"""`gpu-autoscaler demo`: run a complete scenario on a simulated cluster and narrate it."""

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import print_message
from gpu_autoscaler_services.local.system import CloudName


def demo(
    *,
    trace: Annotated[str | None, Parameter(help="Replay recorded pods instead of the scenario: openb:FOLDER.")] = None,
    pods: Annotated[int, Parameter(help="Number of pods, from the end of the trace.")] = 100,
    speed: Annotated[float, Parameter(help="Speed-up of the trace's arrivals and run times.")] = 600.0,
    clock_factor: Annotated[float, Parameter(help="Speed-up of cluster time, 1 to 20.")] = 15.0,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 picks a free one.")] = 8000,
    folder: Annotated[Path, Parameter(help="Folder of logs, stores and report; emptied first.")] = Path("out/demo"),
    cloud: Annotated[CloudName, Parameter(help="Cloud API to buy nodes from; all except sim are fakes.")] = "sim",
    keep: Annotated[bool, Parameter(help="Keep running after the report, until Ctrl-C.")] = False,
) -> int:
    """Run the demo."""
    from gpu_autoscaler_services.demo.run import DemoOptions, run_demo  # noqa: PLC0415 - imports the whole system
    from gpu_autoscaler_services.demo.terminal import Teller, show_report  # noqa: PLC0415 - imports the whole system

    options = DemoOptions(
        folder=folder,
        gateway_port=gateway_port,
        clock_factor=clock_factor,
        trace=trace,
        pods=pods,
        speed=speed,
        is_kept_up=keep,
        cloud=cloud,
    )
    teller = Teller()
    report = asyncio.run(run_demo(options, teller.say, on_report=lambda made: show_report(made, folder)))
    if report.broken_promises:
        print_message(f"{len(report.broken_promises)} promise(s) broken; logs are in {folder / 'logs'}")
        return Exit.FAILURE
    return Exit.OK
