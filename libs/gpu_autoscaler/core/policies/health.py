"""The policy's part about sick GPUs: which evidence counts, and for how long it must stand."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import Seconds

# NVIDIA, "Xid catalog" (deploy/xid-errors) and "Health Validation, Xid checks" (read 2026-11-21): the GPU is to be
# reset or serviced. 46 it stopped, 48 double-bit error, 62 its controller halted, 64 rows could not be remapped,
# 74 NVLink, 79 it fell off the bus, 95 memory error that was not contained, 119 and 120 its system processor, 140
# memory error that was not recovered.
_FATAL = (46, 48, 62, 64, 74, 79, 95, 119, 120, 140)
# There as well: a row waits to be remapped (63), a memory error was contained and ended one application (94). The GPU
# works on, and is to be reset when it is convenient.
_WORN = (63, 94)

Xid = Annotated[int, Meta(ge=1)]


class GpuHealthPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What telemetry has to say of a GPU, and for how long, before its node is sick.

    Errors of applications (13, 31, 43, 45 and others) are not in either list: they say nothing about the GPU. Nor does
    a GPU that does nothing although a job holds it.
    """

    evidence_seconds: Annotated[
        Seconds, Meta(description="So long evidence stands, unbroken, before it counts. Source: Decisions, GPU health.")
    ] = 600.0
    celsius_max: Annotated[
        float, Meta(ge=60, le=120, description="A GPU that is always hotter is sick. Source: S103, S126.")
    ] = 85.0
    xids_fatal: Annotated[
        tuple[Xid, ...], Meta(description="Its node is emptied, with force at last. Source: NVIDIA, Xid catalog.")
    ] = _FATAL
    xids_degraded: Annotated[
        tuple[Xid, ...], Meta(description="Its node goes when its work may be moved. Source: NVIDIA, Xid catalog.")
    ] = _WORN
