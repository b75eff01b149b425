"""`gpu-autoscaler fake-cloud`: a cloud to try a driver against, without an account."""

import asyncio
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import PREFIX
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import words

FILES = Path("out/fake-cloud/azure")  # how names of files that the settings lead to begin


def fake_cloud(
    cloud: Annotated[Literal["aws", "azure", "gcp"], Parameter(help="Which cloud.")],
    *,
    port: Annotated[int, Parameter(help="Port on loopback; 0 takes a free one.")] = 4566,
    region: Annotated[str, Parameter(help="The region that it stands for (aws).")] = "eu-west-1",
    boot_seconds: Annotated[float, Parameter(help="From a launch until an instance runs.")] = 30.0,
) -> int:
    """Serve the calls that the driver makes until Ctrl-C, and say the settings that lead the services there."""
    try:
        match cloud:
            case "aws":
                _serve_aws(port, region, boot_seconds)
            case "azure":
                asyncio.run(_serve_azure(port, boot_seconds))
            case "gcp":
                asyncio.run(_serve_gcp(port, boot_seconds))
    except ImportError as exc:
        raise ConfigError(f"fake-cloud {cloud}", [f"{exc.name}: is missing; install gpu-autoscaler[fakes]"]) from exc
    return Exit.OK


def _serve_aws(port: int, region: str, boot_seconds: float) -> None:
    from gpu_autoscaler.simcloud.aws.fake import AwsFake  # noqa: PLC0415 - an extra, and slow to load
    from gpu_autoscaler.simcloud.aws.server import serving  # noqa: PLC0415 - as the fake

    fake = AwsFake(region)
    fake.machines.boot_seconds = boot_seconds
    subnets = fake.offer_template("gpu")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with serving(fake, port=port) as url:
        told = {"AWS_REGION": region, "AWS_LAUNCH_TEMPLATE": "gpu", "AWS_SUBNETS": ",".join(subnets)}
        _say("aws", url, told)
        ended.wait()


async def _serve_azure(port: int, boot_seconds: float) -> None:
    from gpu_autoscaler.simcloud.azure.fake import AzureFake  # noqa: PLC0415 - as that of AWS
    from gpu_autoscaler.simcloud.azure.standing import settings_of  # noqa: PLC0415 - as the fake
    from gpu_autoscaler.simcloud.rest import serving_rest  # noqa: PLC0415 - as the fake

    fake = AzureFake()
    fake.machines.boot_seconds = boot_seconds
    FILES.parent.mkdir(parents=True, exist_ok=True)
    settings = settings_of(fake, FILES)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving_rest(fake, port=port) as url:
        told = {
            "AZURE_SUBSCRIPTION": str(settings.subscription),
            "AZURE_RESOURCE_GROUP": str(settings.resource_group),
            "AZURE_REGION": str(settings.region),
            "AZURE_SCALE_SET": str(settings.scale_set),
            "AZURE_MACHINE_PATH": str(settings.machine_path),
        }
        _say("azure", url, told)
        await ended.wait()


async def _serve_gcp(port: int, boot_seconds: float) -> None:
    from gpu_autoscaler.simcloud.gcp.fake import PROJECT, GcpFake  # noqa: PLC0415 - as that of AWS
    from gpu_autoscaler.simcloud.rest import serving_rest  # noqa: PLC0415 - as the fake

    fake = GcpFake()
    fake.machines.boot_seconds = boot_seconds
    groups = fake.offer_everything()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving_rest(fake, port=port) as url:
        _say("gcp", url, {"GCP_PROJECT": PROJECT, "GCP_GROUPS": ",".join(groups)})
        await ended.wait()


def _say(cloud: str, url: str, told: Mapping[str, str]) -> None:
    words(f"{cloud} answers at {url}; faults: POST {url}/admin/faults, calls: {url}/admin/asked")
    words("the services buy there with")
    for name, value in {"PROVIDER_NAME": cloud, "PROVIDER_URL": url, **told}.items():
        print(f"export {PREFIX}{name}='{value}'", flush=True)
