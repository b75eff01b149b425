"""`gpu-autoscaler convert karpenter FILE`: convert v1alpha5 and v1beta1 objects of Karpenter to karpenter.sh/v1."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from gpu_autoscaler.providers.karpenter.v1beta_kinds import convert_documents
from gpu_autoscaler.runtime.documents import parse_yaml, read_text
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.options import CommandGroup
from gpu_autoscaler_services.cli.output import print_message

_GROUP = CommandGroup("convert", "convert karpenter provisioners.yaml > nodepools.yaml")
convert = _GROUP.app


@_GROUP.command
def karpenter(
    file: Path,
    /,
    *,
    role: Annotated[str | None, Parameter(help="IAM role of nodes, for templates without an instance profile.")] = None,
) -> int:
    """Convert each Provisioner to a NodePool and each AWSNodeTemplate to an EC2NodeClass, as YAML on stdout.

    Each field that was dropped, renamed or added is reported on stderr. Nothing is written to a cluster: review the
    output, then run `kubectl apply`.

    Exit codes: 0 converted, 2 invalid input (nothing is printed).
    """
    converted = convert_documents(_documents(file), role=role, source=str(file))
    for subject, note in converted.notes:
        print_message(f"{subject}: {note}")
    print(yaml.safe_dump_all(converted.objects, sort_keys=False), end="")
    return Exit.OK


def _documents(file: Path) -> list[Any]:
    """Return the objects of the file; a List is replaced by its items. Raises ConfigError."""
    objects: list[Any] = []
    for document in parse_yaml(read_text(file), str(file)):
        is_list = isinstance(document, dict) and document.get("kind") == "List"
        objects += document.get("items") or [] if is_list else [document]
    return objects
