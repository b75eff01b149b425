"""The `gpu-autoscaler` command. Each command's module is imported only when it runs, so that `--help` is quick.

A new command is one line here.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from gpu_autoscaler.model.errors import AutoscalerError, ConfigError, TransientError
from gpu_autoscaler_services.cli.exits import Exit, Stop

_HERE = "gpu_autoscaler_services.cli"


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - reads files; only --version needs it

    return version("gpu-autoscaler")


app = App(
    name="gpu-autoscaler",
    help="Event-driven GPU cluster scaling: what runs, what waits, what was decided and why.",
    version=_version,
    help_format="plaintext",
)
app.command(f"{_HERE}.views:status", help="The cluster in numbers.")
app.command(f"{_HERE}.views:nodes", help="Every node from its order to its end.")
app.command(f"{_HERE}.jobs:jobs", name="jobs", help="Submit, list, show, cancel and wait for jobs.")
app.command(f"{_HERE}.demand:demand", name="demand", help="Ask for room to be free for work to come.")
app.command(f"{_HERE}.directives:freeze", help="Buy nothing and remove nothing by choice, for a while.")
app.command(f"{_HERE}.directives:pause", help="Leave one pool as it is, for a while.")
app.command(f"{_HERE}.directives:override", help="Want at least or at most so many nodes or GPUs, for a while.")
app.command(f"{_HERE}.directives:resume", help="Take a freeze, a pause or an override back.")
app.command(f"{_HERE}.directives:directives", help="What overrules the policy now, who said so, and until when.")
app.command(f"{_HERE}.views:plans", help="The last plans: what was decided, what was held back, and why.")
app.command(f"{_HERE}.views:shadow", help="Where a policy in shadow would decide otherwise, with both reasons.")
app.command(f"{_HERE}.views:cost", help="Money by time and by project.")
app.command(f"{_HERE}.market:budget", help="What is spent, promised and left of each limit of money.")
app.command(f"{_HERE}.market:offers", help="What is for sale, and what the cloud would not sell: until when, and why.")
app.command(f"{_HERE}.events:events", help="Recorded facts, the newest or as they arrive.")
app.command(f"{_HERE}.views:why", help="The story of a node, pod or job back to its first cause.")
app.command(f"{_HERE}.record:recompute", help="Make a recorded plan again from its facts and compare it byte for byte.")
app.command(
    f"{_HERE}.replay:replay", help="Ask today's code about a recorded history, and list what it decides otherwise."
)
app.command(f"{_HERE}.policy:policy", name="policy", help="Check a policy file, with every mistake at once.")
app.command(f"{_HERE}.record:dead_letters", name="dead-letters", help="Messages that were set aside, and why.")
app.command(f"{_HERE}.up:up", help="Run the whole system here, every service a process.")
app.command(f"{_HERE}.doctor:doctor", help="Whether the cloud can be bought from as the settings say.")
app.command(f"{_HERE}.prices:prices", name="prices", help="Write down what the cloud asks for.")
app.command(f"{_HERE}.convert:convert", name="convert", help="Other people's old configuration as today's.")
app.command(f"{_HERE}.fake_cloud:fake_cloud", name="fake-cloud", help="Serve a cloud to try a driver against.")
app.command(f"{_HERE}.observe:observe", help="Look on beside another autoscaler: what ours would do, and save or cost.")
app.command(f"{_HERE}.demo:demo", help="Show the whole story on a simulated cluster.")


def run(tokens: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return Exit.USAGE  # cyclopts has said what is wrong
    except Stop as stop:
        return _say(stop, stop.code)
    except ConfigError as error:
        return _say(error, Exit.USAGE)
    except TransientError as error:
        return _say(error, Exit.TIME_OUT)
    except AutoscalerError as error:
        return _say(error, Exit.FAILURE)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`). Python would complain once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    return code if isinstance(code, int) else Exit.OK


def _say(error: Exception, code: Exit) -> Exit:
    print(f"gpu-autoscaler: {error}", file=sys.stderr)
    return code


def main() -> None:
    """Entry of the installed command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
