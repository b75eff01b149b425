"""Python client of gpu-autoscaler: submit GPU jobs, follow them, and ask why they wait.

from gpu_manager_sdk import GPUJobClient

job = GPUJobClient().submit({"job_name": "train", "project_id": "research", "gpu_requirements": {"gpu_count": 8},
                             "container": {"image": "registry.example/train:1"}})

`GPUJobClient` blocks, `AsyncGPUJobClient` has the same methods as coroutines. The types are those of the gateway's
OpenAPI document (`models`). Errors are a tree below `GPUManagerError` (`errors`).
"""

import importlib
from typing import TYPE_CHECKING

from gpu_manager_sdk import errors, models
from gpu_manager_sdk.client import GPUJobClient
from gpu_manager_sdk.connection import Retries
from gpu_manager_sdk.errors import GPUManagerError
from gpu_manager_sdk.events import Event

if TYPE_CHECKING:
    from gpu_manager_sdk.async_client import AsyncGPUJobClient
    from gpu_manager_sdk.checkpoints import CheckpointManager
    from gpu_manager_sdk.save_requests import SaveRequests

__all__ = [
    "AsyncGPUJobClient",
    "CheckpointManager",
    "Event",
    "GPUJobClient",
    "GPUManagerError",
    "Retries",
    "SaveRequests",
    "errors",
    "models",
]
_LATE = {
    "AsyncGPUJobClient": "gpu_manager_sdk.async_client",
    "CheckpointManager": "gpu_manager_sdk.checkpoints",
    "SaveRequests": "gpu_manager_sdk.save_requests",
}


def __getattr__(name: str) -> object:
    """Import what needs more modules, such as aiohttp, when it is first asked for (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
