"""The `gpu-autoscaler` command. A command's module is imported only when the command runs, so `--help` is quick.

A new command is one entry here: its group, module, help and example.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group, Parameter

from gpu_autoscaler.model.errors import AutoscalerError, ConfigError, TransientError
from gpu_autoscaler_services.cli.exits import Exit, Stop, exit_of
from gpu_autoscaler_services.cli.options import epilogue
from gpu_manager_sdk.errors import GPUManagerError

_HERE = "gpu_autoscaler_services.cli"


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - reads files; only --version needs it

    return version("gpu-autoscaler")


def _shown_default(value: object) -> str | None:
    """Return the default for the help; a switch that is off needs no mention."""
    return None if value is None or value is False or value == "" else str(value)


class _Section:
    """Commands under one heading of the help."""

    def __init__(self, title: str) -> None:
        self._group = Group.create_ordered(title)

    def add_app(self, target: str, name: str, summary: str) -> None:
        """Add a module's App, which holds subcommands and its own examples."""
        app.command(f"{_HERE}.{target}", name=name, group=self._group, help=summary)

    def add(self, target: str, text: str, *examples: str) -> None:
        """Add a function. `text` is a summary line, then optionally a blank line and details."""
        paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        app.command(
            f"{_HERE}.{target}", group=self._group, help="\n\n".join(paragraphs), help_epilogue=epilogue(examples)
        )


_CLUSTER, _JOBS, _DECISIONS = map(_Section, ("See the cluster", "Run jobs", "Understand decisions"))
_OPERATE, _SPEND, _SETUP = map(_Section, ("Operate", "Spend and prices", "Set up and check"))
_DEVELOP = _Section("Develop and replay")

app = App(
    name="gpu-autoscaler",
    help="Scale GPU clusters: what runs, what waits, what the autoscaler decided and why.",
    version=_version,
    help_format="plaintext",
    help_epilogue="Help for one command: gpu-autoscaler COMMAND --help",
    default_parameter=Parameter(negative_bool=(), show_default=_shown_default),
)
app["--help"].group = app["--version"].group = Group.create_ordered("Help")


_CLUSTER.add(
    "views:status",
    "Show the cluster in numbers: nodes, GPUs, jobs, price per hour, last plan.",
    "status",
    "status -o json",
)
_CLUSTER.add(
    "views:nodes", "List nodes, from order to termination, with GPUs, price and interruption notices.", "nodes"
)
_CLUSTER.add(
    "events:events",
    """Show recorded facts: the newest ones, or new ones as they arrive.

Without --follow, facts are listed oldest first. With --follow, each fact is one line (JSON lines with -o json).""",
    "events --subject 'scaling.>' --limit 20",
    "events --follow --subject job.finished -o json",
)
_JOBS.add_app("jobs:jobs", "jobs", "Submit, list, show, describe, cancel and wait for jobs, and read their logs.")
_JOBS.add_app("demand:demand", "demand", "Report demand, so that capacity is free for work that is about to arrive.")
_DECISIONS.add(
    "views:why",
    "Explain a node, pod, job or ProvisioningRequest: what it waits for or why it exists, then its history.",
    "why job job-1a2b",
    "why node gpu-node-7",
    "why pod team-a/trainer-0",
)
_DECISIONS.add(
    "views:plans", "List the latest plans: decisions and deferred actions, each with its reason.", "plans --limit 3"
)
_DECISIONS.add(
    "views:shadow",
    """Show where the shadow policy would decide differently from the active one, with both reasons.

Both policies see the same cluster state. The shadow policy changes nothing, so a difference lasts until the active
policy acts or the state changes.""",
    "shadow",
)
_DECISIONS.add(
    "record:recompute",
    """Recompute a recorded plan from its facts and compare the two byte for byte.

If the first facts have expired, a snapshot in the store (store.url) replaces them.

Exit codes: 0 equal, 1 different, 3 plan not found, 5 facts expired, 6 made by another version of the core, 7 made with
another policy.""",
    "recompute plan-3f9c",
)
_OPERATE.add(
    "directives:freeze",
    """Suspend all purchases and all voluntary removals for a while.

Actions already started complete. Interruption notices are still handled: the node is cordoned, jobs save a checkpoint,
the node is drained before the deadline, and uncordoned if the notice is withdrawn. No replacement is bought. Jobs
still start on free capacity.""",
    "freeze --for 2h --reason 'network maintenance'",
)
_OPERATE.add(
    "directives:pause",
    "Suspend purchases and voluntary removals of one pool for a while.",
    "pause training --for 1h30m --reason 'image rollout'",
)
_OPERATE.add(
    "directives:override",
    """Temporarily set a minimum or maximum of nodes or GPUs.

Nodes with running work are not removed. The limits of the policy still apply. A new override replaces the previous one
of the same scope (cluster, pool, GPU model, or pool and GPU model).""",
    "override --at-least 4 --pool training --for 3d --reason release",
    "override --at-most 16 --unit gpus --for 12h --reason review",
)
_OPERATE.add(
    "directives:resume",
    "End a freeze, pause or override early. Without a key, ends the freeze.",
    "resume",
    "resume pause/training --reason 'rollout finished'",
)
_OPERATE.add(
    "directives:directives",
    "List active freezes, pauses and overrides: who set each, why, and until when.",
    "directives",
)
_OPERATE.add_app("record:dead_letters", "dead-letters", "List or resubmit messages that a service could not process.")
_OPERATE.add(
    "migrate:migrate",
    """Bring streams, durable consumers and the store to this release. Without --apply, only list the differences.

Running services keep working. A stream is never limited to less than it stores, unless --discard-history is given.
Safe to repeat after an interruption. Needs the broker's user migrator. `helm upgrade` runs it as a job.

Exit codes: 0 everything is as declared, 1 changes left, 2 invalid settings, 4 broker or store unreachable.""",
    "migrate",
    "migrate --apply",
    "migrate --to 0.2 --apply",
)
_OPERATE.add_app("audit:audit", "audit", "List, verify or export the audit trail: who did what, and when.")
_OPERATE.add(
    "views:settings",
    """Show the settings of the gateway that differ from their defaults, and as json the policy in force.""",
    "settings",
    "settings --all -o json",
)
_SPEND.add(
    "views:cost",
    """Show spend by time span and by project.""",
    "cost",
    "cost --span-seconds 86400",
    "cost --project research",
)
_SPEND.add("views:budget", "Show each spend budget: limit, spent, reserved and left.", "budget")
_SPEND.add(
    "views:offers",
    "List available offers with prices, and offers that the cloud refused lately: until when, and why.",
    "offers",
)
_SPEND.add_app("prices:prices", "prices", "Save the cloud's current prices or catalog to a file.")
_SETUP.add(
    "up:up",
    "Run the whole system on this machine until Ctrl-C: NATS, a simulated cluster, every service as a process.",
    "up",
    "up --policy policy.toml --clock-factor 10",
    "up --kubeconfig ~/.kube/config",
)
_SETUP.add(
    "doctor:doctor",
    """Check cloud access and configuration: credentials, region, subnets, groups, types, prices, quotas.

Buys nothing unless both --live and --yes are given.

Exit codes: 0 no errors, 1 errors found or an instance could not be terminated, 2 invalid settings, 130 interrupted.""",
    "doctor --config settings.toml",
    "doctor --policy",
    "doctor --live --installation UID --yes",
)
_SETUP.add_app("policy:policy", "policy", "Validate a policy file.")
_SETUP.add_app("convert:convert", "convert", "Convert legacy configuration.")
_SETUP.add(
    "observe:observe",
    """Run read-only beside another autoscaler: what ours would do, and what it would save or cost.

Needs get, list and watch on nodes and pods. Every write is refused on this machine, whatever the credentials allow.
NATS, watchers and dashboard run locally; nothing is decided or changed in the cluster.""",
    "observe --offers offers.json --for 1h",
)
_DEVELOP.add(
    "demo:demo",
    "Run a complete scenario on a simulated cluster and report it. Exits 1 if a promise is broken.",
    "demo",
    "demo --trace openb:traces/ --pods 200",
)
_DEVELOP.add(
    "replay:replay",
    """Plan a recorded history again with the current code, and list each decision that differs with both reasons.

The history is a file, or what the running system has recorded between --from and --to. Decisions that would come
sooner are found between the recorded plans.

With --policy, the recorded workload runs in the simulator twice: under the recorded policy, which shows the error of
the model, and under the other policy.

Exit codes: 0 equal (with --policy: compared), 1 different, 3 no plan in that time, 5 facts expired.""",
    "replay history.xz",
    "replay --from 2026-11-21T08:00:00Z --save history.xz",
    "replay history.xz --policy cheaper.toml --chart what-if.svg",
)
_DEVELOP.add(
    "fake_cloud:fake_cloud",
    "Serve a fake cloud API to test a driver against, until Ctrl-C. Prints the settings that connect the services.",
    "fake-cloud aws",
)


def run(tokens: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return Exit.USAGE  # cyclopts has printed the error
    except GPUManagerError as error:
        return _print_error(error, exit_of(error))
    except Stop as stop:
        return _print_error(stop, stop.code)
    except ConfigError as error:
        return _print_error(error, Exit.USAGE)
    except TransientError as error:
        return _print_error(error, Exit.TIME_OUT)
    except AutoscalerError as error:
        return _print_error(error, Exit.FAILURE)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Python would raise once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    return code if isinstance(code, int) else Exit.OK


def _print_error(error: Exception, code: Exit) -> Exit:
    print(f"gpu-autoscaler: {error}", file=sys.stderr)
    return code


def main() -> None:
    """Run the installed command."""
    sys.exit(run())


def odg() -> None:
    """Run `odg gpu`, which is `gpu-autoscaler jobs` under another name."""
    group, *tokens = sys.argv[1:] or [""]
    if group != "gpu":
        print("usage: odg gpu COMMAND; list the commands with: odg gpu --help", file=sys.stderr)
        sys.exit(Exit.OK if group in {"--help", "-h"} else Exit.USAGE)
    sys.exit(run(["jobs", *tokens]))


if __name__ == "__main__":
    main()
