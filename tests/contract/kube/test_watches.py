"""Watches over HTTP: replay, live changes, selections, bookmarks, ends."""

import asyncio

import pytest
from tests.support.kube_http import STRATEGIC, Json, KubeHttp
from tests.support.kube_objects import node, pod

HELD = [{"name": "example.invalid/hold"}]


def story(lines: list[Json]) -> list[tuple[str, str]]:
    """What happened to whom."""
    return [(line["type"], line["object"]["metadata"]["name"]) for line in lines]


async def start(kube: KubeHttp, namespace: str) -> tuple[str, str]:
    """Return the path of the namespace's pods and the current version."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    return path, (await kube.read(path))["metadata"]["resourceVersion"]


async def test_a_watch_replays_what_came_after_its_version(kube: KubeHttp, namespace: str) -> None:
    """Creation, change and deletion after the version, in order, each under its own version."""
    path, version = await start(kube, namespace)
    await kube.made(path, pod("a", schedulingGates=HELD))
    await kube.patched(f"{path}/a", {"metadata": {"labels": {"x": "1"}}})
    await kube.send("DELETE", f"{path}/a")
    lines = await kube.watch(f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=30", lines=4)

    assert story(lines) == [("ADDED", "a"), ("MODIFIED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    marks = [line["object"]["metadata"].get("deletionGracePeriodSeconds") for line in lines]
    assert marks == [None, None, 0, 0], "a pod is marked as going before it is gone, also where nobody has to stop it"
    versions = [int(line["object"]["metadata"]["resourceVersion"]) for line in lines]
    assert versions == sorted(set(versions))
    assert lines[0]["object"]["kind"] == "Pod"


async def test_a_watch_without_a_version_begins_with_what_is_there(kube: KubeHttp, namespace: str) -> None:
    """Every object is first ADDED as it is now."""
    path, _ = await start(kube, namespace)
    await kube.made(path, pod("a", schedulingGates=HELD))
    await kube.made(path, pod("b", schedulingGates=HELD))
    lines = await kube.watch(f"{path}?watch=1&timeoutSeconds=30", lines=2)

    assert sorted(story(lines)) == [("ADDED", "a"), ("ADDED", "b")]


async def test_a_watch_hears_what_happens_meanwhile(kube: KubeHttp, namespace: str) -> None:
    """A change made while the watch is open arrives before its time is up."""
    path, version = await start(kube, namespace)
    watching = asyncio.create_task(kube.watch(f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=10", lines=1))
    await asyncio.sleep(0.2)
    await kube.made(path, pod("a", schedulingGates=HELD))

    assert story(await asyncio.wait_for(watching, 60)) == [("ADDED", "a")]


async def test_a_watch_from_a_version_of_the_future_is_silent(kube: KubeHttp, namespace: str) -> None:
    """It is accepted, shows no change and gets no bookmark: after a restore of etcd a client would wait for ever."""
    path, version = await start(kube, namespace)
    query = f"watch=1&resourceVersion={int(version) + 100_000}&allowWatchBookmarks=true&timeoutSeconds=3"
    watching = asyncio.create_task(kube.watch(f"{path}?{query}"))
    await asyncio.sleep(0.2)
    await kube.made(path, pod("a", schedulingGates=HELD))

    assert await asyncio.wait_for(watching, 60) == []


async def test_objects_enter_and_leave_a_selection(kube: KubeHttp, namespace: str) -> None:
    """In a watch with a selector, an object that starts to match is ADDED, one that stops matching is DELETED."""
    path, version = await start(kube, namespace)
    await kube.made(path, pod("a", schedulingGates=HELD))
    await kube.patched(f"{path}/a", {"metadata": {"labels": {"app": "x"}}})
    await kube.patched(f"{path}/a", {"metadata": {"labels": {"more": "y"}}})
    await kube.patched(f"{path}/a", {"metadata": {"labels": {"app": None}}})
    query = f"watch=1&resourceVersion={version}&labelSelector=app%3Dx&timeoutSeconds=30"

    assert story(await kube.watch(f"{path}?{query}", lines=3)) == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


async def test_a_watch_of_one_object_hears_only_it(kube: KubeHttp, namespace: str) -> None:
    """fieldSelector=metadata.name narrows the watch to one name."""
    path, version = await start(kube, namespace)
    for name in ("a", "b"):
        await kube.made(path, pod(name, schedulingGates=HELD))
    query = f"watch=1&resourceVersion={version}&fieldSelector=metadata.name%3Db&timeoutSeconds=30"

    assert story(await kube.watch(f"{path}?{query}", lines=1)) == [("ADDED", "b")]


async def test_initial_events_end_with_a_bookmark(kube: KubeHttp, namespace: str) -> None:
    """A streamed list marks its end and its version."""
    path, _ = await start(kube, namespace)
    await kube.made(path, pod("a", schedulingGates=HELD))
    query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=2"
    lines = await kube.watch(f"{path}?{query}", lines=2)

    assert story(lines[:1]) == [("ADDED", "a")]
    assert lines[1]["type"] == "BOOKMARK"
    metadata = lines[1]["object"]["metadata"]
    assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert int(metadata["resourceVersion"]) >= int(lines[0]["object"]["metadata"]["resourceVersion"])


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/api/v1/pods", {"spec": {"containers": None}, "status": {}}),
        ("/apis/batch/v1/jobs", {"spec": {"template": {"metadata": {}, "spec": {"containers": None}}}, "status": {}}),
        (
            "/apis/policy/v1/poddisruptionbudgets",
            {
                "spec": {},
                "status": {"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0},
            },
        ),
    ],
)
async def test_a_bookmark_is_an_object_with_nothing_in_it(kube: KubeHttp, path: str, parts: Json) -> None:
    """Not even a list where a list must be: who reads it as an object of its kind reads null."""
    query = (
        "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=30"
    )
    bookmark = (await kube.watch(f"{path}?{query}&labelSelector=nobody-has-this", lines=1))[0]

    assert bookmark["type"] == "BOOKMARK"
    assert {part: bookmark["object"][part] for part in ("spec", "status")} == parts


async def test_initial_events_need_a_match_rule(kube: KubeHttp, namespace: str) -> None:
    """SendInitialEvents without resourceVersionMatch is 422."""
    answer = await kube.send("GET", f"/api/v1/namespaces/{namespace}/pods?watch=1&sendInitialEvents=true")

    assert (answer.status, answer.body["reason"]) == (422, "Invalid")


async def test_a_watch_from_the_future_is_silent(kube: KubeHttp, namespace: str) -> None:
    """It waits, sends nothing, and ends without an error."""
    path = f"/api/v1/namespaces/{namespace}/pods?watch=1&resourceVersion=999999999&timeoutSeconds=1"

    assert await kube.watch(path) == []


async def test_a_watch_ends_with_its_time(kube: KubeHttp, namespace: str) -> None:
    """TimeoutSeconds closes a quiet watch cleanly."""
    path, version = await start(kube, namespace)
    loop = asyncio.get_running_loop()
    began = loop.time()
    lines = await kube.watch(f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=1")

    assert lines == []
    assert 0.8 <= loop.time() - began < 30


async def test_two_watches_see_the_same_story(kube: KubeHttp, namespace: str) -> None:
    """Cluster-wide objects are watched without a namespace; every watcher receives every change."""
    version = (await kube.read("/api/v1/nodes"))["metadata"]["resourceVersion"]
    name = f"seen-{namespace}"
    await kube.made("/api/v1/nodes", node(name))
    await kube.patched(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}}, STRATEGIC)
    await kube.send("DELETE", f"/api/v1/nodes/{name}")
    query = f"watch=1&resourceVersion={version}&fieldSelector=metadata.name%3D{name}&timeoutSeconds=3"
    first, second = await asyncio.gather(*(kube.watch(f"/api/v1/nodes?{query}") for _ in range(2)))

    assert first == second
    assert story(first)[0] == ("ADDED", name)
    assert story(first)[-1] == ("DELETED", name)
