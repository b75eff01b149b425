"""`make soak`: real processes at full size, killed at random; `out/soak.json` and the exit code tell the result."""

import argparse
import asyncio
import secrets
import signal
import sys
from pathlib import Path

import msgspec
from tests.soak.run import Options, Result, Soak

from gpu_autoscaler.model.errors import AutoscalerError

OUT = Path("out/soak.json")
EXIT_INTERRUPTED = 130  # as shells have it for Ctrl-C
OVERTIME_SECONDS = 600.0  # after this much more than asked for, the soak ends as failed


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; return 0 if nothing differs and no promise is broken, else 1."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the whole run (default: 10)")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="of the disturbances (default: a fresh one)")
    parser.add_argument("--nodes", type=int, default=Options().nodes)
    parser.add_argument("--pods", type=int, default=Options().pods)
    parser.add_argument("--planted", default="", help="run with this known bug, which must be found")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    options = Options(
        minutes=given.minutes,
        seed=given.seed,
        nodes=given.nodes,
        pods=given.pods,
        folder=given.out.with_suffix(""),
        planted=given.planted,
    )
    _print_line(f"soak of {given.minutes:g} min, repeat with SEED={given.seed}")
    try:
        result = asyncio.run(_limited(options))
    except asyncio.CancelledError:
        _print_line("interrupted, every process is stopped")
        return EXIT_INTERRUPTED
    except (AutoscalerError, TimeoutError) as exc:
        _print_line(f"FAILED to run: {exc!r}; logs are in {options.folder / 'logs'}")
        return 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    for line in (*result.differences, *result.broken):
        _print_line(line)
    verdict = "equal" if result.equal and not result.broken else "FAILED"
    _print_line(f"{verdict}: {result.nodes} nodes, {result.pods} pods, {result.kills} kills; see {given.out}")
    return 0 if verdict == "equal" else 1


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _limited(options: Options) -> Result:
    """Run within the limit; Ctrl-C and SIGTERM stop every process first."""
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with asyncio.timeout(options.minutes * 60 + OVERTIME_SECONDS):
        return await Soak(options, _print_line).run()


if __name__ == "__main__":
    sys.exit(main())
