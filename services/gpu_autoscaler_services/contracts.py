"""Write `schemas/` from the code, or check it with --check. Used by `make schemas` and `make check`."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from gpu_autoscaler.bus.streams import consumers_for, streams_document
from gpu_autoscaler.contracts.schemas import asyncapi, fact_files, to_json, to_yaml
from gpu_autoscaler.runtime.service import lanes_of
from gpu_autoscaler_services.gateway import openapi
from gpu_autoscaler_services.registry import services

README = "README.md"  # the only file in schemas/ that is not generated


def contract_files() -> dict[str, str]:
    """Return all files of `schemas/`: path -> text."""
    operations = {service.name: ((*service.consumes, *service.folds), service.publishes) for service in services()}
    consumers = [
        spec
        for service in sorted(services(), key=lambda service: service.name)
        for spec in consumers_for(service.name, service.consumes, lanes_of(service))
    ]
    return {
        **fact_files(),
        "asyncapi.yaml": to_yaml(asyncapi(version("gpu-autoscaler"), operations)),
        "openapi.yaml": to_yaml(openapi.document()),
        "streams.json": to_json(streams_document(consumers)),
    }


def differences(folder: Path, files: dict[str, str]) -> list[str]:
    """Return a sentence for each file that is missing, stale, or obsolete."""
    problems = []
    for name, text in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.read_text(encoding="utf-8") != text:
            problems.append(f"{path} is stale")
    generated = {folder / name for name in files} | {folder / README}
    problems += [
        f"{path} is obsolete" for path in sorted(folder.rglob("*")) if path.is_file() and path not in generated
    ]
    return problems


def main() -> int:
    """Write or check the files. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("schemas"))
    parser.add_argument("--check", action="store_true", help="do not write; exit with 1 if a file differs")
    options = parser.parse_args()
    files = contract_files()
    if options.check:
        problems = differences(options.folder, files)
        for problem in problems:
            sys.stderr.write(f"{problem}; run `make schemas`\n")
        return 1 if problems else 0
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
