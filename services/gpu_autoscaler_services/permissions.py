"""The users of the broker: one for each service, and those for people. Written to `deploy/nats/users.conf`.

`make schemas` writes the file, `make secrets` the passwords that it asks of the server's environment. The local system
(`local/system.py`) runs with the same users.
"""

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from gpu_autoscaler.bus.permissions import (
    OPERATOR,
    Permissions,
    of_door,
    of_reader,
    of_service,
    password_variable,
    server_text,
)
from gpu_autoscaler.bus.streams import LEASES, consumers_of_process
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler_services.gateway.service import Gateway
from gpu_autoscaler_services.registry import SERVICES
from gpu_autoscaler_services.scaler.service import Scaler

CLIENT = "client"  # whoever asks for jobs, their end, or room: people and programs
READER = "reader"  # whoever only looks: `events`, `replay`, dashboards
OPERATOR_USER = "operator"  # whoever sends dead letters again or repairs the broker: may do everything
COMMAND = "cli"  # the name of our own command line on the broker
_HEADER = (
    "# Who may do what on the broker. Made from the code by `make schemas`; passwords come from the environment.\n"
)


def users() -> Mapping[str, Permissions]:
    """Every user of the broker, services first."""
    durables = [spec for service in SERVICES for spec in consumers_of_process(service.name, service.consumes)]
    ours = {
        service.name: of_service(
            service.name,
            publishes=service.publishes,
            folds=service.folds,
            consumes=service.consumes,
            others=durables,
            # Streams of events are read by the gateway as they are, and it tells who is active.
            reads=[*{fact.stream() for fact in FACTS}, LEASES.stream] if service is Gateway else (),
            has_lease=service is Scaler,
        )
        for service in SERVICES
    }
    return {
        **ours,
        CLIENT: of_door((JobRequested, JobCancelRequested, DemandReported)),
        READER: of_reader(durables, command=COMMAND),
        OPERATOR_USER: OPERATOR,
    }


def users_file() -> str:
    """The text of `deploy/nats/users.conf`."""
    return _HEADER + server_text(users())


def fresh_passwords() -> dict[str, str]:
    """A new password for each user, by its environment variable."""
    # Begins with a letter: a value that looks like a number would be read as one by the server.
    return {password_variable(user): f"p{secrets.token_hex(16)}" for user in users()}


def main() -> int:
    """Write the server's configuration, or with `--secrets FILE` a file of new passwords, unless it is there."""
    if sys.argv[1:2] != ["--secrets"]:
        sys.stdout.write(users_file())
        return 0
    path = Path(sys.argv[2])
    values = {"GPU_AUTOSCALER_TOKEN": secrets.token_hex(16), **fresh_passwords()}
    try:
        path.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        sys.stderr.write(f"{path} is there and stays as it is; delete it to make new secrets\n")
        return 1
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
