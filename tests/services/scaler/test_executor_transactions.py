"""Purchases of one transaction: one call, all of them or none, whatever happens between the call and its facts."""

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
    """A plan's gang of three that are alike, decided and on order."""
    now = bench.here.clock.now()
    decisions = [
        purchase(name, at=now, gang="job/j", transaction="a", boot_seconds_max=boot_seconds_max) for name in NAMES
    ]
    story = planned(*decisions, at=now)
    bench.knows(story)
    facts = list((await bench.step(story[0].fact)).facts)
    assert kinds(facts) == [ScalingNodeOrdered] * 3
    for fact in facts:
        bench.told(fact)
    return facts


def of(facts: tuple[Fact, ...]) -> list[str]:
    """Whose launches these are."""
    assert all(isinstance(fact, ScalingNodeLaunched) for fact in facts)
    return [fact.action_id for fact in facts if isinstance(fact, ScalingNodeLaunched)]


async def test_a_gang_is_one_call(bench: Bench) -> None:
    """The first order's step launches all; the others' find nothing left to do."""
    first, *others = await ordered(bench)
    launched = (await bench.step(first)).facts
    assert of(launched) == ["a", "b", "c"]
    assert (bench.cloud.launches_count, bench.cloud.group_launch_count) == (3, 1)
    for fact in launched:
        bench.told(fact)
    for other in (first, *others):
        assert (await bench.step(other)).facts == ()
    assert bench.cloud.launches_count == 3


async def test_the_others_wait_for_the_first(bench: Bench) -> None:
    """Whoever's step comes before the first one's asks for nothing."""
    _, *others = await ordered(bench)
    for other in others:
        assert (await bench.step(other)).facts == ()
    assert bench.cloud.launches_count == 0


async def test_a_refusal_is_of_all_of_them(bench: Bench) -> None:
    """Room for two is room for none; each order has its own fact, with the same reason."""
    first, *_ = await ordered(bench)
    bench.cloud.refuse("*", passed_count=2)
    refused = (await bench.step(first)).facts
    assert kinds(refused) == [ScalingLaunchRefused] * 3
    told = [fact for fact in refused if isinstance(fact, ScalingLaunchRefused)]
    assert [fact.action_id for fact in told] == ["a", "b", "c"]
    assert len({(fact.code, fact.message, fact.scope, fact.retry_at) for fact in told}) == 1
    assert bench.cloud.launches_count == 0


async def test_a_refusal_that_was_published_in_part_is_said_of_the_rest(bench: Bench) -> None:
    """Killed between two facts: the rest is refused too, though the cloud would sell by now."""
    first, *_ = await ordered(bench)
    bench.cloud.refuse("*")
    bench.told((await bench.step(first)).facts[1])  # whichever came through
    bench.cloud.refuse_nothing()
    rest = (await bench.step(first)).facts
    assert [fact.action_id for fact in rest if isinstance(fact, ScalingLaunchRefused)] == ["a", "c"]
    assert bench.cloud.launches_count == 0


async def test_a_lost_answer_is_no_second_gang(bench: Bench) -> None:
    """Made and not told: the second try tells it."""
    first, *_ = await ordered(bench)
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(first)
    assert of((await bench.step(first)).facts) == ["a", "b", "c"]
    assert bench.cloud.launches_count == 3


@pytest.mark.parametrize("published", [("a",), ("b",), ("a", "c")])
async def test_launches_that_were_published_in_part_are_told_whole(bench: Bench, published: tuple[str, ...]) -> None:
    """Killed between two facts: the first order's step says the rest, of the same instances."""
    first, *_ = await ordered(bench)
    launched = {
        str(fact.action_id): fact for fact in (await bench.step(first)).facts if isinstance(fact, ScalingNodeLaunched)
    }
    for name in published:
        bench.told(launched[name])
    rest = (await bench.step(first)).facts
    assert of(rest) == [name for name in NAMES if name not in published]
    assert all(fact == launched[fact.action_id] for fact in rest if isinstance(fact, ScalingNodeLaunched))
    assert bench.cloud.launches_count == 3


async def test_what_is_given_back_is_not_made(bench: Bench) -> None:
    """Also where it is the first: the next one's step makes the others, as one call."""
    first, second, third = await ordered(bench)
    (ended,) = await bench.begin(release("a"))
    bench.told(ended)
    assert of((await bench.step(second)).facts) == ["b", "c"]
    assert of((await bench.step(first)).facts) == ["b", "c"]
    assert of((await bench.step(third)).facts) == ["b", "c"]
    assert (bench.cloud.launches_count, bench.cloud.group_launch_count) == (2, 1)


async def test_what_is_given_back_while_it_is_made_ends(bench: Bench) -> None:
    """Made and not told, then given back: the others are told, it is ended by whoever gives it back."""
    first, *_ = await ordered(bench)
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.step(first)
    (ended,) = await bench.begin(release("b"))
    bench.told(ended)
    assert of((await bench.step(first)).facts) == ["a", "c"]
    living = [one.action_id for one in await bench.cloud.instances("uid") if one.state == "running"]
    assert living == ["a", "c"]


async def test_nothing_is_made_past_the_deadline(bench: Bench) -> None:
    """As for one alone."""
    for order in await ordered(bench, boot_seconds_max=0.0):
        assert (await bench.step(order)).facts == ()
    assert bench.cloud.launches_count == 0


async def test_a_cloud_that_cannot_launches_one_by_one(bench: Bench) -> None:
    """Each order for itself, as ever; a refusal is of one."""
    bench.cloud.can_launch_groups = False
    first, second, third = await ordered(bench)
    bench.cloud.refuse("*", passed_count=2)
    assert of((await bench.step(third)).facts) == ["c"]
    assert of((await bench.step(first)).facts) == ["a"]
    assert kinds((await bench.step(second)).facts) == [ScalingLaunchRefused]
    assert (bench.cloud.launches_count, bench.cloud.group_launch_count) == (2, 0)
