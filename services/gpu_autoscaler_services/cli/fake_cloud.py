"""`gpu-autoscaler fake-cloud`: a cloud to try a driver against, without an account."""

import signal
import threading
from typing import Annotated, Literal

from cyclopts import Parameter

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import PREFIX
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import words


def fake_cloud(
    cloud: Annotated[Literal["aws"], Parameter(help="Which cloud.")],
    *,
    port: Annotated[int, Parameter(help="Port on loopback; 0 takes a free one.")] = 4566,
    region: Annotated[str, Parameter(help="The region that it stands for.")] = "eu-west-1",
    boot_seconds: Annotated[float, Parameter(help="From a launch until an instance runs.")] = 30.0,
) -> int:
    """Serve the calls that the driver makes until Ctrl-C, and say the settings that lead the services there."""
    try:
        from gpu_autoscaler.simcloud.aws.fake import AwsFake  # noqa: PLC0415 - an extra, and slow to load
        from gpu_autoscaler.simcloud.aws.server import serving  # noqa: PLC0415 - as the fake

        fake = AwsFake(region)
    except ImportError as exc:
        raise ConfigError(f"fake-cloud {cloud}", [f"{exc.name}: is missing; install gpu-autoscaler[fakes]"]) from exc
    fake.machines.boot_seconds = boot_seconds
    subnets = fake.offer_template("gpu")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with serving(fake, port=port) as url:
        words(f"{cloud}, region {region}, answers at {url}; faults: POST {url}/admin/faults, calls: {url}/admin/asked")
        words("the services buy there with")
        for name, value in {
            "PROVIDER_NAME": cloud,
            "PROVIDER_URL": url,
            "AWS_REGION": region,
            "AWS_LAUNCH_TEMPLATE": "gpu",
            "AWS_SUBNETS": ",".join(subnets),
        }.items():
            print(f"export {PREFIX}{name}={value}", flush=True)
        ended.wait()
    return Exit.OK
