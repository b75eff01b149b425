"""`gpu-autoscaler up`: the whole system on this machine, until Ctrl-C."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import print_message


def up(
    *,
    policy: Annotated[Path | None, Parameter(help="TOML file of the scaling policy; else the defaults.")] = None,
    shadow: Annotated[Path | None, Parameter(help="TOML file of a second policy; it runs and acts on nothing.")] = None,
    offers: Annotated[Path | None, Parameter(help="JSON file of what the simulated cloud sells.")] = None,
    kubeconfig: Annotated[
        Path | None,
        Parameter(help="Of a real cluster, which takes the simulated one's place; its cloud stays simulated."),
    ] = None,
    clock_factor: Annotated[float, Parameter(help="How much faster cluster time passes, 1 to 20.")] = 1.0,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 takes a free one.")] = 8000,
    nats_port: Annotated[int, Parameter(help="Port of the NATS server; 0 takes a free one.")] = 4222,
    folder: Annotated[Path, Parameter(help="Where streams, store and logs are kept.")] = Path("out/up"),
) -> int:
    """Start a NATS server, a simulated cluster and every service as a process; end them with Ctrl-C."""
    from gpu_autoscaler_services.local.system import Elsewhere, LocalSystem, kept_clock  # noqa: PLC0415 - all of it

    clock = kept_clock(folder, clock_factor)
    if kubeconfig is not None:
        print_message(f"the cluster: {_seen(kubeconfig, clock_factor)}")
        print_message("the cloud is simulated: what is bought there joins no cluster, and nodes that are there are not touched")
    system = LocalSystem(
        folder,
        clock=clock,
        policy=policy,
        gateway_port=gateway_port,
        nats_port=nats_port,
        offers=offers,
        shadow=shadow,
        elsewhere=Elsewhere(kubeconfig=kubeconfig),
    )

    async def run() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await system.start(print_message)
        try:
            print_message(f"dashboard and API: {system.gateway_url}")
            print_message(f"NATS: {system.nats_url}; try: gpu-autoscaler events --follow --gateway {system.gateway_url}")
            print_message(f"the simulated cluster: {system.simcluster_url}; logs: {folder / 'logs'}; Ctrl-C ends all of it")
            await ended.wait()
        finally:
            print_message("ending every process")
            await system.stop()

    asyncio.run(run())
    return Exit.OK


def _seen(kubeconfig: Path, clock_factor: float) -> str:
    """The cluster's address, once it is known that all services can do their work there. Raises as `see_cluster`."""
    from gpu_autoscaler.model.errors import ConfigError  # noqa: PLC0415 - as above
    from gpu_autoscaler.runtime.config import KubeSettings  # noqa: PLC0415
    from gpu_autoscaler_services.local.cluster import see_cluster  # noqa: PLC0415
    from gpu_autoscaler_services.rights import RIGHTS  # noqa: PLC0415

    if clock_factor != 1.0:
        raise ConfigError("clock", ["a real cluster tells the time as it is; leave --clock-factor at 1"])
    # Nobody is asked who they are at a gateway of this machine.
    rights = (right for service, each in RIGHTS.items() if service != "gateway" for right in each)
    return asyncio.run(see_cluster(kubeconfig, rights, KubeSettings().namespace))
