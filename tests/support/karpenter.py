"""Real Karpenter with its KWOK provider under test: what it sells, and the file that our driver reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.bench.peers.real import KARPENTER, NODE_CLASS

from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.karpenter.catalog import offers_in
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions

TYPES: list[dict[str, Any]] = [
    {
        "instance_type": "gpu-1x",
        "zones": ["zone-a", "zone-b"],
        "resources": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"},
        "usd_per_hour": {"on-demand": 1.0, "spot": 0.4},
        "gpu_model": "A10G",
        "boot_seconds": 5.0,
    },
    {
        "instance_type": "gpu-4x",
        "zones": ["zone-a"],
        "resources": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "4"},
        "usd_per_hour": {"on-demand": 4.0},
        "gpu_model": "A10G",
        "boot_seconds": 5.0,
    },
]


def needed_karpenter() -> None:
    """Skip the test with a reason if Karpenter is not built."""
    if not KARPENTER.folder().is_dir():
        pytest.skip(f"NOT RUN: no Karpenter: {KARPENTER.missing() or 'it is not built yet'}; `make controlplane`")


def options_in(folder: Path, types: Sequence[Mapping[str, Any]] = TYPES) -> KarpenterOptions:
    """The driver's settings, with a file of what is sold."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "offers.json"
    path.write_text(json.dumps(types), encoding="utf-8")
    # Longer than anybody would wait: the machine of the tests is shared.
    return KarpenterOptions(node_class=NODE_CLASS, offers_path=str(path), launch_seconds_max=90.0)


def sold(options: KarpenterOptions) -> list[Offer]:
    """What Karpenter's cloud is to sell: the same."""
    return list(offers_in(str(options.offers_path)))
