"""What containers are checked with: BuildKit's own reader of Dockerfiles, and the schema of the Compose Specification.

No engine is needed for either. Built as the control plane is (`tests/controlplane/recipes.py`), within seconds.
"""

import sys
from pathlib import Path

from tests.controlplane.recipes import Recipe

CONTAINER_TOOLS = Recipe(
    name="containers",
    words="BuildKit's reader of Dockerfiles",
    module=Path(__file__).parent / "module",
    programs={"dockerfile": "./dockerfile"},
    files={"compose-spec.json": ("github.com/compose-spec/compose-go/v2", "schema/compose-spec.json")},
)


if __name__ == "__main__":
    reason = CONTAINER_TOOLS.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{CONTAINER_TOOLS.build()}\n")
