"""The executor with a cloud that lists instances late, or replaces interrupted ones."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.services.scaler.test_executor import RECLAIM, Bench, drain, owned, ready, release
from tests.support.cluster import running_cluster
from tests.support.stories import MINUTE, bought, provider_id, purchase

from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeTerminated, ScalingPodEvicted
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scaler import purchases


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench with node gpu-a."""
    async with running_cluster() as here:
        here.add_node("gpu-a")
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Bench(here, store)
        await store.close()


async def test_unlisted_new_instance_is_terminated_again(bench: Bench) -> None:
    """The cloud does not know a new instance yet: termination is retried, since it costs money."""
    now = bench.here.clock.now()
    for action, minutes in (("late", 1), ("lost", 6)):
        bench.record_story(bought(purchase(action, at=now - minutes * MINUTE), at=now - minutes * MINUTE))
    with pytest.raises(TransientError, match="retried"):
        await bench.begin(release("late"))
    (ended,) = await bench.begin(release("lost"))
    assert isinstance(ended, ScalingNodeTerminated)


async def test_interrupted_instance_is_detached_from_its_group(bench: Bench) -> None:
    """Once, and only if the cloud takes it; a failure is retried and does not delay the drain."""
    left: list[ProviderId] = []
    fails = [True]

    async def detach(provider_id: ProviderId) -> None:
        left.append(provider_id)
        if fails.pop() if fails else False:
            raise TransientError("throttled")

    bench.cloud.detach = detach  # type: ignore[attr-defined]
    await ready(bench.here, owned("p", grace=60))
    decision = msgspec.structs.replace(drain(bench.here, RECLAIM, seconds=600), provider_id=provider_id("n"))
    started = next(fact for fact in await bench.begin(decision) if isinstance(fact, ScalingDrainStarted))
    bench.record_fact(started)
    for _ in range(3):
        await bench.step(started)
    assert left == [provider_id("n")] * 2


async def test_a_cloud_that_hangs_does_not_keep_a_drain(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detach without an answer is given up for this pass, whose evictions are published."""

    async def detach(_: ProviderId) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(purchases, "DETACH_WALL_SECONDS_MAX", 0.1)
    bench.cloud.detach = detach  # type: ignore[attr-defined]
    await ready(bench.here, owned("p", grace=60))
    decision = msgspec.structs.replace(drain(bench.here, RECLAIM, seconds=600), provider_id=provider_id("n"))
    started = next(fact for fact in await bench.begin(decision) if isinstance(fact, ScalingDrainStarted))
    bench.record_fact(started)
    async with asyncio.timeout(10):
        outcome = await bench.step(started)
    assert any(isinstance(fact, ScalingPodEvicted) for fact in outcome.facts)
