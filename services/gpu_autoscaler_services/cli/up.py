"""`gpu-autoscaler up`: run the whole system on this machine until Ctrl-C."""

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpu_autoscaler.runtime.signals import stop_event
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import print_message


def up(
    *,
    policy: Annotated[Path | None, Parameter(help="Policy file (TOML). Default: the built-in policy.")] = None,
    shadow: Annotated[Path | None, Parameter(help="Shadow policy file (TOML); only compared.")] = None,
    offers: Annotated[Path | None, Parameter(help="Offers of the simulated cloud (JSON file).")] = None,
    kubeconfig: Annotated[
        Path | None,
        Parameter(help="Kubeconfig of a real cluster to use instead of the simulated one; the cloud stays simulated."),
    ] = None,
    clock_factor: Annotated[float, Parameter(help="Speed-up of cluster time, 1 to 20.")] = 1.0,
    gateway_port: Annotated[int, Parameter(help="Port of dashboard and API; 0 picks a free one.")] = 8000,
    nats_port: Annotated[int, Parameter(help="Port of the NATS server; 0 picks a free one.")] = 4222,
    folder: Annotated[Path, Parameter(help="Folder of streams, store and logs.")] = Path("out/up"),
) -> int:
    """Run NATS, a simulated cluster and every service as a process until Ctrl-C."""
    from gpu_autoscaler_services.local.system import ExternalSystems, LocalSystem, load_clock  # noqa: PLC0415 - imports the whole system

    clock = load_clock(folder, clock_factor)
    if kubeconfig is not None:
        print_message(f"cluster: {_check_cluster(kubeconfig, clock_factor)}")
        print_message(
            "the cloud is simulated: bought nodes do not join this cluster, and its existing nodes are not changed"
        )
    system = LocalSystem(
        folder,
        clock=clock,
        policy=policy,
        gateway_port=gateway_port,
        nats_port=nats_port,
        offers=offers,
        shadow=shadow,
        external=ExternalSystems(kubeconfig=kubeconfig),
    )

    async def run() -> None:
        ended = stop_event()
        await system.start(print_message)
        try:
            print_message(f"dashboard and API: {system.gateway_url}")
            print_message(
                f"NATS: {system.nats_url}; try: gpu-autoscaler events --follow --gateway {system.gateway_url}"
            )
            print_message(
                f"simulated cluster: {system.simcluster_url}; logs: {folder / 'logs'}; Ctrl-C stops everything"
            )
            await ended.wait()
        finally:
            print_message("stopping every process")
            await system.stop()

    asyncio.run(run())
    return Exit.OK


def _check_cluster(kubeconfig: Path, clock_factor: float) -> str:
    """Return the cluster's address after checking that it grants the services' rights. Raises as `check_access`."""
    from gpu_autoscaler.model.errors import ConfigError  # noqa: PLC0415 - only with --kubeconfig
    from gpu_autoscaler.runtime.config import KubeSettings  # noqa: PLC0415
    from gpu_autoscaler_services.local.cluster_access import check_access  # noqa: PLC0415
    from gpu_autoscaler_services.registry import specs  # noqa: PLC0415

    if clock_factor != 1.0:
        raise ConfigError("clock", ["--clock-factor: a real cluster runs in wall time; set it to 1"])
    # A gateway on loopback does not authenticate callers, so it needs no rights.
    rights = (right for spec in specs() if spec.name != "gateway" for right in spec.rights)
    return asyncio.run(check_access(kubeconfig, rights, KubeSettings().namespace))
