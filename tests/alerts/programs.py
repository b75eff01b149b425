"""Tools of the alerts' tests: promtool, and Prometheus itself.

Built as the control plane is (`tests/controlplane/recipes.py`), in five minutes of one core: `make chart` does it.
"""

import sys
from pathlib import Path

from tests.controlplane.recipes import Recipe

_COMMANDS = "github.com/prometheus/prometheus/cmd"

ALERT_TOOLS = Recipe(
    name="alerts",
    words="promtool",
    module=Path(__file__).parent / "module",
    programs={name: f"{_COMMANDS}/{name}" for name in ("promtool", "prometheus")},
    tags="remove_all_sd",  # service discovery in clouds: most of the code, and not needed for static targets
)


if __name__ == "__main__":
    reason = ALERT_TOOLS.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{ALERT_TOOLS.build()}\n")
