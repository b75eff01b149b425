"""The monitor's rule on work that waits: which jobs could have been served."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.support.stories import T0, job, offer, policy

from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.scheduling import NodeDemands
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants.liveness import servable
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.store.protocol import JobRow


@pytest.mark.parametrize(
    ("selector", "is_servable"),
    [
        ({}, True),
        ({labels.ZONE: "zone-a"}, True),
        ({labels.ZONE: "zone-b"}, False),
        ({labels.ZONE: "zone-a", "team": "research"}, False),
    ],
)
def test_a_job_is_served_where_its_template_lets_it_run(selector: dict[str, str], *, is_servable: bool) -> None:
    """Zone b has a limit of its own, and whether other labels are on a new node is not predicted."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    cluster = Kubernetes(loop.now)
    (queued,) = (told.fact for told in job("train") if isinstance(told.fact, JobQueued))
    spec = replace(queued.spec, demands=NodeDemands(node_selector=tuple(selector.items())))
    rules = policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-b", gpu_count_max=1),)))
    run = SimpleNamespace(
        cluster=cluster,
        cloud=SimpleNamespace(
            machines=(),
            offers=(offer(zone="zone-a"), offer(zone="zone-b")),
            allows_gpus=lambda _: True,
            is_out_of=lambda _: False,
        ),
        policies=Policies(rules, when_changed=lambda: None),
        tables=SimpleNamespace(jobs={JobId("train"): JobRow(spec=spec, request_digest="", accepted_at=T0)}),
        workloads=Workloads(cluster, loop, random.Random(1)),  # noqa: S311 - not for secrets
    )

    assert servable(run) == ([JobId("train")] if is_servable else [])
