"""What the executor does with a cloud that shows its instances late, or replaces those that it takes."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.services.scaler.test_executor import RECLAIM, Bench, drain, owned, ready, release
from tests.support.cluster import running_cluster
from tests.support.stories import MINUTE, bought, provider_id, purchase

from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeTerminated
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.store.sqlite import SqliteStore


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench with node gpu-a."""
    async with running_cluster() as here:
        here.add_node("gpu-a")
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Bench(here, store)
        await store.close()


async def test_an_instance_that_is_not_shown_yet_is_not_said_never_to_have_been(bench: Bench) -> None:
    """The cloud knows nothing of it moments after it was made: its end is asked for again, as it costs money."""
    now = bench.here.clock.now()
    for action, minutes in (("late", 1), ("lost", 6)):
        bench.knows(bought(purchase(action, at=now - minutes * MINUTE), at=now - minutes * MINUTE))
    with pytest.raises(TransientError, match="asked again"):
        await bench.begin(release("late"))
    (ended,) = await bench.begin(release("lost"))
    assert isinstance(ended, ScalingNodeTerminated)


async def test_an_instance_leaves_its_group_when_it_is_taken(bench: Bench) -> None:
    """Once, and not where we take the node ourselves; a failure is tried again, and holds up no drain."""
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
    bench.told(started)
    for _ in range(3):
        await bench.step(started)
    assert left == [provider_id("n")] * 2
