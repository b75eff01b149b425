"""`gpu-autoscaler convert karpenter FILE`: Karpenter's old kinds as those of today."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import App, Parameter

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.karpenter.old_kinds import converted
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.output import print_message

convert = App(name="convert", help="Other people's old configuration as today's.", help_format="plaintext")


@convert.command
def karpenter(
    file: Path,
    /,
    *,
    role: Annotated[str | None, Parameter(help="IAM role of nodes, where a template has no instance profile.")] = None,
) -> int:
    """Print each Provisioner as a NodePool and each AWSNodeTemplate as an EC2NodeClass, as YAML.

    What was left out, renamed or added is said on stderr, field by field. Nothing is written to a cluster: read it,
    then `kubectl apply` it.

    Exits 0 converted, 2 mistakes: then nothing is printed.
    """
    found = converted(_documents(file), role=role, source=str(file))
    for what, told in found.notes:
        print_message(f"{what}: {told}")
    print(yaml.safe_dump_all(found.objects, sort_keys=False), end="")
    return Exit.OK


def _documents(file: Path) -> list[Any]:
    """The objects of the file, those of a List each for itself. Raises ConfigError."""
    try:
        documents = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one is not None]
    except OSError as exc:
        raise ConfigError(str(file), [f"cannot be read: {exc.strerror}"]) from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(str(file), [f"is no YAML: {exc}"]) from exc
    lists = [one.get("items") or [] if _is_list(one) else [one] for one in documents]
    return [item for items in lists for item in items]


def _is_list(document: object) -> bool:
    return isinstance(document, dict) and document.get("kind") == "List"
