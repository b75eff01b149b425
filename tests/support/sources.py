"""Configuration examples of the documents that the product implements, read from their text.

The documents lie beside the repository. Tests of the examples skip with the reason where they are missing.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(os.environ.get("GPU_AUTOSCALER_SOURCES", _ROOT.parent / "shared" / "sources"))
AUTOSCALING_GUIDE = "003_*.txt"


def yaml_blocks(document: str) -> Iterator[Any]:
    """Yield the YAML examples of the document, in their order."""
    paths = sorted(SOURCES.glob(document))
    if not paths:
        pytest.skip(f"no document {SOURCES / document}; set GPU_AUTOSCALER_SOURCES to the folder with the documents")
    for block in re.findall(r"^```yaml\n(.*?)^```", paths[0].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield yaml.safe_load(block)


def autoscaling_policy() -> dict[str, Any]:
    """Return the AutoscalingPolicy of the guide, unchanged."""
    (found,) = (block for block in yaml_blocks(AUTOSCALING_GUIDE) if block.get("kind") == "AutoscalingPolicy")
    return dict(found)


def helm_values() -> list[dict[str, Any]]:
    """Return the Helm values of the guide, unchanged: of the quick start, its pools, and the hints."""
    return [block for block in yaml_blocks(AUTOSCALING_GUIDE) if "autoscaling" in block]
