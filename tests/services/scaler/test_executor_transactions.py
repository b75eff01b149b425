"""Purchases of one transaction: one call, all or none, whatever fails between the call and its facts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.services.scaler.test_executor import Bench, kinds, release
from tests.support.cluster import running_cluster
from tests.support.stories import planned, purchase

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched, ScalingNodeOrdered
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.store.sqlite import SqliteStore

NAMES = ("a", "b", "c")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench whose cloud launches together."""
    async with running_cluster() as here:
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Bench(here, store)
        await store.close()


async def ordered(bench: Bench, *, boot_seconds_max: float = 3600.0) -> list[Fact]:
    """Return the orders of a gang of three nodes with the same shape."""
    now = bench.here.clock.now()
    decisions = [
        purchase(name, at=now, gang="job/j", transaction="a", boot_seconds_max=boot_seconds_max) for name in NAMES
    ]
    story = planned(*decisions, at=now)
    bench.record_story(story)
    facts = list((await bench.step(story[0].fact)).facts)
    assert kinds(facts) == [ScalingNodeOrdered] * 3
    for fact in facts:
        bench.record_fact(fact)
    return facts


def of(facts: tuple[Fact, ...]) -> list[str]:
    """Return the action ids of launches."""
    assert all(isinstance(fact, ScalingNodeLaunched) for fact in facts)
    return [fact.action_id for fact in facts if isinstance(fact, ScalingNodeLaunched)]


async def test_transaction_is_one_call(bench: Bench) -> None:
    """The first order's step launches all; the others find nothing left to do."""
    first, *others = await ordered(bench)
    launched = (await bench.step(first)).facts
    assert of(launched) == ["a", "b", "c"]
    assert (bench.cloud.launches_count, bench.cloud.group_launch_count) == (3, 1)
    for fact in launched:
        bench.record_fact(fact)
    for other in (first, *others):
        assert (await bench.step(other)).facts == ()
    assert bench.cloud.launches_count == 3


async def test_other_orders_wait_for_the_first(bench: Bench) -> None:
    """Steps before the first order's make no call."""
    _, *others = await ordered(bench)
    for other in others:
        assert (await bench.step(other)).facts == ()
    assert bench.cloud.launches_count == 0


async def test_refusal_holds_for_all_orders(bench: Bench) -> None:
    """Capacity for two is none for three; each order has its own fact with the same reason."""
    first, *_ = await ordered(bench)
    bench.cloud.refuse("*", passed_count=2)
    refused = (await bench.step(first)).facts
    assert kinds(refused) == [ScalingLaunchRefused] * 3
    facts = [fact for fact in refused if isinstance(fact, ScalingLaunchRefused)]
    assert [fact.action_id for fact in facts] == ["a", "b", "c"]
    assert len({(fact.code, fact.message, fact.scope, fact.retry_at) for fact in facts}) == 1
    assert bench.cloud.launches_count == 0


async def test_partly_published_refusal_is_completed(bench: Bench) -> None:
    """Killed between two facts: the others are refused too, even if the cloud has capacity by now."""
    first, *_ = await ordered(bench)
    bench.cloud.refuse("*")
    bench.record_fact((await bench.step(first)).facts[1])  # whichever came through
    bench.cloud.refuse_nothing()
    rest = (await bench.step(first)).facts
    assert [fact.action_id for fact in rest if isinstance(fact, ScalingLaunchRefused)] == ["a", "c"]
    assert bench.cloud.launches_count == 0


async def test_lost_answer_does_not_launch_twice(bench: Bench) -> None:
    """Launched and not published: the retry returns the same instances."""
    first, *_ = await ordered(bench)
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(first)
    assert of((await bench.step(first)).facts) == ["a", "b", "c"]
    assert bench.cloud.launches_count == 3


@pytest.mark.parametrize("published", [("a",), ("b",), ("a", "c")])
async def test_partly_published_launch_is_completed(bench: Bench, published: tuple[str, ...]) -> None:
    """Killed between two facts: the first order's step publishes the others, of the same instances."""
    first, *_ = await ordered(bench)
    launched = {
        str(fact.action_id): fact for fact in (await bench.step(first)).facts if isinstance(fact, ScalingNodeLaunched)
    }
    for name in published:
        bench.record_fact(launched[name])
    rest = (await bench.step(first)).facts
    assert of(rest) == [name for name in NAMES if name not in published]
    assert all(fact == launched[fact.action_id] for fact in rest if isinstance(fact, ScalingNodeLaunched))
    assert bench.cloud.launches_count == 3


async def test_released_order_is_not_launched(bench: Bench) -> None:
    """Also if it is the first: the next one's step launches the others in one call."""
    first, second, third = await ordered(bench)
    (ended,) = await bench.begin(release("a"))
    bench.record_fact(ended)
    assert of((await bench.step(second)).facts) == ["b", "c"]
    assert of((await bench.step(first)).facts) == ["b", "c"]
    assert of((await bench.step(third)).facts) == ["b", "c"]
    assert (bench.cloud.launches_count, bench.cloud.group_launch_count) == (2, 1)


async def test_order_released_during_launch_is_terminated(bench: Bench) -> None:
    """The others are published; the release terminates its instance."""
    first, *_ = await ordered(bench)
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(first)
    (ended,) = await bench.begin(release("b"))
    bench.record_fact(ended)
    assert of((await bench.step(first)).facts) == ["a", "c"]
    living = [instance.action_id for instance in await bench.cloud.instances("uid") if instance.state == "running"]
    assert living == ["a", "c"]


async def test_late_transaction_is_not_launched(bench: Bench) -> None:
    """As for a single order."""
    for order in await ordered(bench, boot_seconds_max=0.0):
        assert (await bench.step(order)).facts == ()
    assert bench.cloud.launches_count == 0


async def test_cloud_without_group_launch_launches_singly(bench: Bench) -> None:
    """Each order by itself; a refusal is of one order."""
    bench.cloud.can_launch_groups = False
    first, second, third = await ordered(bench)
    bench.cloud.refuse("*", passed_count=2)
    assert of((await bench.step(third)).facts) == ["c"]
    assert of((await bench.step(first)).facts) == ["a"]
    assert kinds((await bench.step(second)).facts) == [ScalingLaunchRefused]
    assert (bench.cloud.launches_count, bench.cloud.group_launch_count) == (2, 0)
