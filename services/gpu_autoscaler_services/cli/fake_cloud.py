"""`gpu-autoscaler fake-cloud`: a fake cloud API to test a driver against, without an account."""

import asyncio
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import PREFIX
from gpu_autoscaler.runtime.signals import stop_event
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import print_message

if TYPE_CHECKING:
    from gpu_autoscaler.simcloud.azure.fake import AzureFake
    from gpu_autoscaler.simcloud.gcp.fake import GcpFake

FILES = Path("out/fake-cloud/azure")  # prefix of files that the printed settings refer to


def fake_cloud(
    cloud: Annotated[Literal["aws", "azure", "gcp"], Parameter(help="Cloud to imitate.")],
    *,
    port: Annotated[int, Parameter(help="Port on loopback; 0 picks a free one.")] = 4566,
    region: Annotated[str, Parameter(help="Region to imitate (aws).")] = "eu-west-1",
    boot_seconds: Annotated[float, Parameter(help="Seconds from launch to running.")] = 30.0,
) -> int:
    """Serve a fake cloud API until Ctrl-C and print the settings that connect the services to it."""
    try:
        match cloud:
            case "aws":
                _serve_aws(port, region, boot_seconds)
            case "azure":
                asyncio.run(_serve(cloud, *_azure_fake(), port, boot_seconds))
            case "gcp":
                asyncio.run(_serve(cloud, *_gcp_fake(), port, boot_seconds))
    except ImportError as exc:
        raise ConfigError(
            f"fake-cloud {cloud}", [f"Python package {exc.name} is missing; install gpu-autoscaler[fakes]"]
        ) from exc
    return Exit.OK


def _serve_aws(port: int, region: str, boot_seconds: float) -> None:
    from gpu_autoscaler.simcloud.aws.fake import AwsFake  # noqa: PLC0415 - an extra, and slow to load
    from gpu_autoscaler.simcloud.aws.server import serving  # noqa: PLC0415 - an extra, and slow to load

    fake = AwsFake(region)
    fake.machines.boot_seconds = boot_seconds
    subnets = fake.offer_template("gpu")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with serving(fake, port=port) as url:
        settings = {"AWS_REGION": region, "AWS_LAUNCH_TEMPLATE": "gpu", "AWS_SUBNETS": ",".join(subnets)}
        _print_settings("aws", url, settings)
        ended.wait()


async def _serve(
    cloud: str, fake: "AzureFake | GcpFake", settings: Mapping[str, str], port: int, boot_seconds: float
) -> None:
    from gpu_autoscaler.simcloud.rest import serving_rest  # noqa: PLC0415 - an extra, and slow to load

    fake.machines.boot_seconds = boot_seconds
    ended = stop_event()
    async with serving_rest(fake, port=port) as url:
        _print_settings(cloud, url, settings)
        await ended.wait()


def _azure_fake() -> "tuple[AzureFake, dict[str, str]]":
    from gpu_autoscaler.simcloud.azure.fake import AzureFake  # noqa: PLC0415 - an extra, and slow to load
    from gpu_autoscaler.simcloud.azure.fleet_emulator import settings_of  # noqa: PLC0415 - an extra, and slow to load

    fake = AzureFake()
    FILES.parent.mkdir(parents=True, exist_ok=True)
    settings = settings_of(fake, FILES)
    names = ("subscription", "resource_group", "region", "scale_set", "machine_path")
    return fake, {f"AZURE_{name.upper()}": str(getattr(settings, name)) for name in names}


def _gcp_fake() -> "tuple[GcpFake, dict[str, str]]":
    from gpu_autoscaler.simcloud.gcp.fake import PROJECT, GcpFake  # noqa: PLC0415 - an extra, and slow to load

    fake = GcpFake()
    return fake, {"GCP_PROJECT": PROJECT, "GCP_GROUPS": ",".join(fake.offer_everything())}


def _print_settings(cloud: str, url: str, settings: Mapping[str, str]) -> None:
    print_message(
        f"fake {cloud} listens at {url}; inject faults: POST {url}/admin/faults; recorded calls: {url}/admin/asked"
    )
    print_message("settings that connect the services to it:")
    for name, value in {"PROVIDER_NAME": cloud, "PROVIDER_URL": url, **settings}.items():
        print(f"export {PREFIX}{name}='{value}'", flush=True)
