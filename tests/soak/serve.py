"""Runs one service as `gpu_autoscaler_services.serve`, with the retention of the soak (`retention.py`)."""

import functools
import os
import sys
from datetime import timedelta
from unittest import mock

from tests.soak import retention

from gpu_autoscaler.bus import streams
from gpu_autoscaler.runtime import process, runner
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler_services import serve
from gpu_autoscaler_services.scaler import inventory

MINUTES_ENVIRONMENT = "SOAK_MINUTES"
# A bug to run with, by its name in `planted.py`; empty: none.
PLANTED_ENVIRONMENT = "SOAK_PLANTED"


def main() -> int:
    """Run the service of the command line; return its exit code."""
    limits = Limits(resync_seconds=retention.RESYNC_SECONDS)
    for module, name, value in (
        (streams, "STREAMS", retention.shortened(float(os.environ[MINUTES_ENVIRONMENT]))),
        (inventory, "FULL_LIST_PERIOD", timedelta(seconds=retention.FULL_LIST_SECONDS)),
        (process, "Runner", functools.partial(runner.Runner, limits=limits)),
    ):
        mock.patch.object(module, name, value).start()
    if planted_name := os.environ.get(PLANTED_ENVIRONMENT):
        from tests.soak.planted import PLANTED  # noqa: PLC0415 - only in runs that must fail

        PLANTED[planted_name]()
    return serve.main()


if __name__ == "__main__":
    sys.exit(main())
