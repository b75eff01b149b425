"""Events of claims, volumes, classes and groups: each looks only at pods that it may change, and misses none."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.support.kube_objects import pod
from tests.support.watch_items import (
    PODS_PER_GROUP,
    T0,
    changed,
    claiming_pods,
    decoded,
    device_spec,
    listed,
    new_watcher,
    related_lists,
    thing,
    volume_spec,
)

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.pod import PodGone, PodListed, PodObserved
from gpu_autoscaler.kube.protocol import (
    CLAIMS,
    CLASSES,
    DEVICE_CLAIMS,
    DEVICE_CLASSES,
    DEVICE_TEMPLATES,
    GROUPS,
    PODS,
    VOLCANO_GROUPS,
    VOLUMES,
    Deleted,
    Kind,
    WatchItem,
)
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler_services.pod_watcher.related_objects import RELATED_KINDS, RelatedObjectsCache
from gpu_autoscaler_services.pod_watcher.service import OBJECTS_PER_TURN


def volume(zone: str, name: str) -> Object:
    """Return a later version of a volume."""
    return thing(VOLUMES, name, 201, spec=volume_spec(zone))


EVENTS: dict[str, tuple[Callable[[], WatchItem], int]] = {  # and the number of pods that it may change
    "volume": (lambda: changed(VOLUMES, volume("b", "v7")), 1),
    "volume that nothing changed": (lambda: changed(VOLUMES, volume("a", "v7")), 0),
    "volume of nobody": (lambda: changed(VOLUMES, volume("a", "other")), 0),
    "deleted volume": (lambda: Deleted(kind=VOLUMES, object=volume("a", "v7"), seen_at=T0), 1),
    "claim": (lambda: changed(CLAIMS, thing(CLAIMS, "c7", 201, status={"phase": "Lost"})), 1),
    "class of nobody": (lambda: changed(CLASSES, thing(CLASSES, "fast", 201, provisioner="x")), 0),
    "group": (lambda: changed(GROUPS, thing(GROUPS, "g3", 201, spec={"minMember": 4})), PODS_PER_GROUP),
    "group that nothing changed": (
        lambda: changed(GROUPS, thing(GROUPS, "g3", 201, spec={"minMember": PODS_PER_GROUP})),
        0,
    ),
    "group of Volcano": (
        lambda: changed(VOLCANO_GROUPS, thing(VOLCANO_GROUPS, "g3", 201, spec={"minMember": 4})),
        PODS_PER_GROUP,
    ),
    "device claim": (
        lambda: changed(DEVICE_CLAIMS, thing(DEVICE_CLAIMS, "d7", 201, spec=device_spec("gpu.nvidia.com", 2))),
        1,
    ),
    "template of nobody": (
        lambda: changed(DEVICE_TEMPLATES, thing(DEVICE_TEMPLATES, "t", 201, spec={"spec": device_spec("x", 1)})),
        0,
    ),
    "device class of nobody": (lambda: changed(DEVICE_CLASSES, thing(DEVICE_CLASSES, "other.example", 201)), 0),
    "list in which one volume differs": (
        lambda: listed(VOLUMES, *(volume("b" if number == 7 else "a", f"v{number}") for number in range(100))),
        1,
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_looks_only_at_pods_that_it_may_change(name: str) -> None:
    """Of a hundred pods with claims and groups; an event of a changed status looks at none."""
    cache = RelatedObjectsCache()
    for item in related_lists(100):
        cache.take(item)
    for each in claiming_pods(100):
        assert cache.of(each) is not None  # type: ignore[arg-type]  # it is a pod
    make, expected = EVENTS[name]
    assert len(cache.take(make())[0]) == expected


async def calls_for_list(count: int) -> int:
    """Return how many functions the watcher calls for a list of pods whose claims are known."""
    watcher, calls = new_watcher(), 0

    def count_call(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for item in related_lists(count):
        await watcher.on_item(item)
    item = listed(PODS, *claiming_pods(count), version=200)
    sys.setprofile(count_call)
    try:
        facts = await watcher.on_item(item)
    finally:
        sys.setprofile(None)
    assert len(facts) == count + 1
    return calls


async def test_the_work_for_a_list_is_linear() -> None:
    """Ten times the pods, with a device claim each, are about ten times the calls."""
    assert await calls_for_list(500) < 11 * await calls_for_list(50)


async def test_a_pod_event_looks_at_sharers_only_if_the_first_user_changed() -> None:
    """A hundred pods wait for one device claim: all wait for the first, and only its end concerns the others."""
    cache = RelatedObjectsCache()
    for item in related_lists(10):
        cache.take(item)
    shared = [{"name": "gpu", "resourceClaimName": "d0"}]
    pods = [decoded(PODS, pod(f"p{number:02}", resourceClaims=shared), number + 1) for number in range(100)]
    for each in pods:
        cache.meet(each)  # type: ignore[arg-type]  # it is a pod
    for each in pods:
        cache.of(each)  # type: ignore[arg-type]  # it is a pod
    assert cache.sharing(pods[50]) == []  # type: ignore[arg-type]  # it is a pod
    cache.gone("p00")
    assert [user.metadata.name for user in cache.sharing(pods[0])] == [f"p{number:02}" for number in range(1, 100)]  # type: ignore[arg-type]  # it is a pod
    assert cache.sharing(pods[1]) == []  # type: ignore[arg-type]  # it is a pod


async def test_other_tasks_run_during_a_list() -> None:
    """At least once per `OBJECTS_PER_TURN` objects."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    try:
        await new_watcher().on_item(listed(PODS, *claiming_pods(10 * OBJECTS_PER_TURN)))
    finally:
        counting.cancel()
    assert turns >= 10


@pytest.mark.parametrize("turns_count", [1, 3, 9])
async def test_an_interrupted_list_loses_no_fact(turns_count: int) -> None:
    """A list that takes longer than a handler may is repeated by the runner, and gives all its facts."""
    item, watcher, other = listed(PODS, *claiming_pods(8 * OBJECTS_PER_TURN)), new_watcher(), new_watcher()
    for related in related_lists(8 * OBJECTS_PER_TURN):
        for each in (watcher, other):
            await each.on_item(related)
    reading = asyncio.create_task(watcher.on_item(item))
    for _ in range(turns_count):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await watcher.on_item(item) == await other.on_item(item)
    assert isinstance((await watcher.on_item(item))[-1], PodListed)


# ---- any order of events


class World:
    """Random objects, as the API server has them; each step changes one, or lists a kind again."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a test
        self.objects: dict[str, dict[str, Object]] = {kind.path(): {} for kind in (PODS, *RELATED_KINDS)}
        self.version = 10

    def step(self) -> WatchItem:
        """Change something and return the item of the watch."""
        kind = self.random.choice((PODS, PODS, *RELATED_KINDS))
        objects = self.objects[kind.path()]
        self.version += 1
        if self.random.random() < 0.15:  # the watch was interrupted
            for _ in range(self.random.randrange(3)):
                self._change(kind)
            return self.list_of(kind)
        if objects and self.random.random() < 0.25:
            gone = objects.pop(self.random.choice(sorted(objects)))
            metadata = msgspec.structs.replace(gone.metadata, resource_version=str(self.version))
            return Deleted(kind=kind, object=msgspec.structs.replace(gone, metadata=metadata), seen_at=T0)
        return changed(kind, self._change(kind))

    def list_of(self, kind: Kind[Any]) -> WatchItem:
        """Return all objects of the kind."""
        return listed(kind, *self.objects[kind.path()].values(), version=self.version)

    def _change(self, kind: Kind[Any]) -> Object:
        name, fields = self._any_of(kind)
        old = self.objects[kind.path()].get(name)
        if kind is PODS and old is not None:  # what a pod claims never changes
            fields["spec"] = fields["spec"] | {"volumes": self._volumes(name), "resourceClaims": self._devices(name)}
        obj = self.objects[kind.path()][name] = thing(kind, name, self.version, **fields)
        return obj

    def _volumes(self, name: str) -> list[dict[str, Any]]:
        claims = [(), ("c0",), ("c1",), ("c0", "c2"), ("c3",)][int(name[1:]) % 5]
        return [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]

    def _devices(self, name: str) -> list[dict[str, str]]:
        by_name = {"name": "gpu", "resourceClaimName": "d0"}
        return [[], [by_name], [{"name": "gpu", "resourceClaimTemplateName": "t0"}]][int(name[1:]) % 3]

    def _any_of(self, kind: Kind[Any]) -> tuple[str, dict[str, Any]]:
        draw = self.random
        number = draw.randrange(4)
        if kind is PODS:
            name = f"p{draw.randrange(15)}"
            labels = {"scheduling.x-k8s.io/pod-group": f"g{int(name[1:]) % 3}"} if int(name[1:]) % 2 else {}
            made = pod(name, labels=labels, volumes=self._volumes(name), resourceClaims=self._devices(name))
            spec = made["spec"] | ({"nodeName": "n1"} if draw.random() < 0.3 else {})
            phase = draw.choice(("Pending", "Pending", "Running", "Succeeded"))
            return name, {"spec": spec, "status": {"phase": phase}, "metadata": {"labels": labels}}
        if kind is CLAIMS:
            spec = draw.choice(({"volumeName": f"v{draw.randrange(3)}"}, {}, {"storageClassName": "local"}))
            return f"c{number}", {"spec": spec, "status": {"phase": draw.choice(("Pending", "Bound", "Lost"))}}
        if kind is VOLUMES:
            spec = volume_spec(draw.choice("ab")) | {"storageClassName": "local"}
            return f"v{number}", {"spec": spec, "status": {"phase": draw.choice(("Available", "Bound"))}}
        if kind is CLASSES:
            provisioner = draw.choice(("kubernetes.io/no-provisioner", "ebs.csi.aws.com"))
            annotations = draw.choice(({}, {"storageclass.kubernetes.io/is-default-class": "true"}))
            mode = {"volumeBindingMode": "WaitForFirstConsumer"}
            name = draw.choice(("local", "fast"))
            return name, {"provisioner": provisioner, "metadata": {"annotations": annotations}, **mode}
        if kind is DEVICE_CLAIMS:
            made_for = f"p{draw.choice((2, 5))}"  # a claim created from a template
            owners = [{"kind": "Pod", "name": made_for, "uid": made_for}]
            annotations = {"resource.kubernetes.io/pod-claim-name": "gpu"}
            from_template = {"metadata": {"annotations": annotations, "ownerReferences": owners}}
            name, more = draw.choice((("d0", {}), (f"{made_for}-gpu", from_template)))
            return name, {"spec": device_spec(draw.choice(("gpu.nvidia.com", "big")), 1 + number), **more}
        if kind is DEVICE_TEMPLATES:
            return "t0", {"spec": {"spec": device_spec(draw.choice(("gpu.nvidia.com", "big")), 1 + number)}}
        if kind is DEVICE_CLASSES:
            product = (
                f"device.attributes['gpu.nvidia.com'].productName == '{draw.choice(('NVIDIA A100', 'NVIDIA H100'))}'"
            )
            gpu = "device.driver == 'gpu.nvidia.com'"
            selectors = [{"cel": {"expression": draw.choice((gpu, f"{gpu} && {product}"))}}]
            return draw.choice(("gpu.nvidia.com", "big")), {"spec": {"selectors": selectors}}
        return f"g{number % 3}", {"spec": {"minMember": number}}


def contents(facts: list[Fact]) -> dict[str, PodObserved]:
    """Return what the state would know of each pod that is there, without its version: a fact that is not later than
    the last one of its pod changes nothing. Pods made again have the same uid here: an end is forgotten.
    """
    known: dict[str, PodObserved] = {}
    for fact in facts:
        match fact:
            case PodObserved() if fact.version > _version(known.get(fact.pod_uid)):
                known[fact.pod_uid] = fact
            case PodGone() if fact.version >= _version(known.get(fact.pod_uid)):
                known.pop(fact.pod_uid, None)
            case PodListed():
                present = frozenset(fact.pod_uids)
                known = {uid: pod for uid, pod in known.items() if uid in present or pod.version > fact.version}
    return {uid: msgspec.structs.replace(pod, version=0) for uid, pod in known.items()}


def _version(pod: PodObserved | None) -> int:
    return -1 if pod is None else pod.version


@pytest.mark.parametrize("seed", range(12))
async def test_facts_are_those_of_a_watcher_that_starts_now(seed: int) -> None:
    """After each event, in any order: no pod keeps a fact that its related objects made untrue."""
    world, watcher, seen = World(f"related-{seed}"), new_watcher(), Counter[str]()
    facts: list[Fact] = []
    for kind in RELATED_KINDS:
        facts += await watcher.on_item(world.list_of(kind))
    for _ in range(120):
        facts += await watcher.on_item(world.step())
        fresh, expected = new_watcher(), list[Fact]()
        for kind in (*RELATED_KINDS, PODS):
            expected += await fresh.on_item(world.list_of(kind))
        assert contents(facts) == contents(expected)
        seen.update(fact.volume_trouble or "reached" for fact in contents(facts).values())
        seen.update(fact.device_trouble or "supported" for fact in contents(facts).values())
    assert len(seen) > 8, "the worlds must differ"


@pytest.mark.parametrize("seed", range(12))
async def test_watches_that_are_not_in_step_lose_nothing(seed: int) -> None:
    """Each kind in its own order, the kinds in any: what one shows late is a later version nevertheless."""
    world, watcher = World(f"delayed-{seed}"), new_watcher()
    delays = random.Random(f"delays-{seed}")  # noqa: S311 - a test
    facts: list[Fact] = []
    for kind in RELATED_KINDS:
        facts += await watcher.on_item(world.list_of(kind))
    for _ in range(40):
        waiting: dict[str, list[WatchItem]] = {}
        for _ in range(delays.randrange(1, 8)):
            item = world.step()
            waiting.setdefault(item.kind.path(), []).append(item)
        while waiting:
            path = delays.choice(sorted(waiting))
            facts += await watcher.on_item(waiting[path].pop(0))
            if not waiting[path]:
                del waiting[path]
        fresh, expected = new_watcher(), list[Fact]()
        for kind in (*RELATED_KINDS, PODS):
            expected += await fresh.on_item(world.list_of(kind))
        assert contents(facts) == contents(expected)
