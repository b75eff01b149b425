"""Writes `schemas/` from the code, or with --check says what differs. Called by `make schemas` and `make check`."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from gpu_autoscaler.bus.streams import streams_document
from gpu_autoscaler.contracts.schemas import asyncapi, fact_files, to_json, to_yaml
from gpu_autoscaler_services.gateway import openapi
from gpu_autoscaler_services.registry import services

README = "README.md"  # the only file below schemas/ that is written by hand


def contract_files() -> dict[str, str]:
    """Everything below `schemas/`: path -> text."""
    operations = {service.name: ((*service.consumes, *service.folds), service.publishes) for service in services()}
    consumed = {service.name: service.consumes for service in services()}
    return {
        **fact_files(),
        "asyncapi.yaml": to_yaml(asyncapi(version("gpu-autoscaler"), operations)),
        "openapi.yaml": to_yaml(openapi.document()),
        "streams.json": to_json(streams_document(consumed)),
    }


def differences(folder: Path, files: dict[str, str]) -> list[str]:
    """Return a sentence for each file that is missing, stale, or no longer made."""
    found = []
    for name, text in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{path} is stale")
    made = {folder / name for name in files} | {folder / README}
    found += [f"{path} is no longer made" for path in sorted(folder.rglob("*")) if path.is_file() and path not in made]
    return found


def main() -> int:
    """Write the files, or check them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("schemas"))
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something differs")
    options = parser.parse_args()
    files = contract_files()
    found = differences(options.folder, files)
    if options.check:
        for line in found:
            sys.stderr.write(f"{line}; run `make schemas`\n")
        return 1 if found else 0
    for path in sorted(options.folder.rglob("*")):
        if path.is_file() and path.name != README and path.relative_to(options.folder).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        path = options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
