"""Runs one service as a process: `python -m gpu_autoscaler_services.serve scaler`. Used by containers and launcher."""

import argparse
import os
import sys
from pathlib import Path

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import load_settings
from gpu_autoscaler.runtime.process import EXIT_MISCONFIGURED, run_process
from gpu_autoscaler_services.registry import NAMES, spec_of


def main(arguments: list[str] | None = None) -> int:
    """Run the service until SIGTERM; return the exit code of `run_process`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service", choices=sorted(NAMES))
    parser.add_argument(
        "--config", type=Path, default=os.environ.get("GPU_AUTOSCALER_CONFIG"), help="settings file (TOML)"
    )
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(None if options.config is None else Path(options.config), os.environ)
    except ConfigError as exc:
        sys.stderr.write(f"{options.service} was not started: {exc}\n")
        return EXIT_MISCONFIGURED
    return run_process(options.service, settings, spec_of(options.service).compose)


if __name__ == "__main__":
    sys.exit(main())
