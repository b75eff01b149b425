"""`gpu-autoscaler demo`: the whole story on a simulated cluster, told as it happens."""

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import words
from gpu_autoscaler_services.local.system import CloudName


def demo(
    *,
    trace: Annotated[str | None, Parameter(help="Real pods instead of the story: openb:FOLDER.")] = None,
    pods: Annotated[int, Parameter(help="How many of the trace's last pods.")] = 100,
    speed: Annotated[float, Parameter(help="How much faster the trace's arrivals and run times pass.")] = 600.0,
    clock_factor: Annotated[float, Parameter(help="How much faster cluster time passes, 1 to 20.")] = 15.0,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 takes a free one.")] = 8000,
    folder: Annotated[Path, Parameter(help="Where logs, stores and the report go; emptied first.")] = Path("out/demo"),
    cloud: Annotated[CloudName, Parameter(help="Whose API nodes are bought by; all but sim are fakes.")] = "sim",
    keep: Annotated[bool, Parameter(help="Stay up after the report, until Ctrl-C.")] = False,
) -> int:
    """Start everything here, play a story, report. Exits 1 when a promise was broken."""
    from gpu_autoscaler_services.demo.run import DemoOptions, run_demo  # noqa: PLC0415 - imports the whole system
    from gpu_autoscaler_services.demo.telling import Teller, show_report  # noqa: PLC0415 - as above

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
        words(f"{len(report.broken_promises)} promise(s) broken; logs are in {folder / 'logs'}")
        return Exit.FAILURE
    return Exit.OK
