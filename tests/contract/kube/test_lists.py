"""Lists over HTTP: selectors, pages that show one moment, versions asked for."""

from urllib.parse import quote

from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod

HELD = [{"name": "example.invalid/hold"}]  # keeps schedulers away, so that nothing changes by itself


async def fill(kube: KubeHttp, namespace: str, count: int) -> str:
    """Make pods p0, p1 ... in the namespace; return the path of its pods."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    for index in range(count):
        labels = {"parity": "odd" if index % 2 else "even", "app": "a"}
        await kube.made(path, pod(f"p{index}", labels=labels, schedulingGates=HELD))
    return path


def names(items: list[dict[str, dict[str, str]]]) -> list[str]:
    """The names, in the order of the list."""
    return [item["metadata"]["name"] for item in items]


async def test_a_list_carries_its_resource_version(kube: KubeHttp, namespace: str) -> None:
    """The list's version is at least that of each of its items; items come in name order."""
    path = await fill(kube, namespace, 3)
    answer = await kube.read(path)

    assert answer["kind"] == "PodList"
    assert names(answer["items"]) == ["p0", "p1", "p2"]
    newest = max(int(item["metadata"]["resourceVersion"]) for item in answer["items"])
    assert int(answer["metadata"]["resourceVersion"]) >= newest


async def test_a_list_of_all_namespaces_holds_each(kube: KubeHttp, namespace: str) -> None:
    """The cluster-wide list shows the namespace's pods, and the namespaced list only its own."""
    await fill(kube, namespace, 2)
    everything = await kube.read("/api/v1/pods?labelSelector=app%3Da")

    assert [item for item in everything["items"] if item["metadata"]["namespace"] == namespace]


async def test_label_selectors_select(kube: KubeHttp, namespace: str) -> None:
    """Equality, inequality, sets and existence, alone and together."""
    path = await fill(kube, namespace, 4)
    for selector, wanted in {
        "parity=odd": ["p1", "p3"],
        "parity!=odd": ["p0", "p2"],
        "parity in (odd,even),app=a": ["p0", "p1", "p2", "p3"],
        "parity notin (even)": ["p1", "p3"],
        "parity": ["p0", "p1", "p2", "p3"],
        "!parity": [],
        "absent=x": [],
    }.items():
        answer = await kube.read(f"{path}?labelSelector={quote(selector)}")
        assert names(answer["items"]) == wanted, selector


async def test_field_selectors_select(kube: KubeHttp, namespace: str) -> None:
    """By name, by phase, and by having no node yet."""
    path = await fill(kube, namespace, 3)
    for selector, wanted in {
        "metadata.name%3Dp1": ["p1"],
        "metadata.name%21%3Dp1": ["p0", "p2"],
        "spec.nodeName%3D,status.phase%3DPending": ["p0", "p1", "p2"],
        "status.phase%3DRunning": [],
    }.items():
        answer = await kube.read(f"{path}?fieldSelector={selector}")
        assert names(answer["items"]) == wanted, selector


async def test_pages_show_one_moment(kube: KubeHttp, namespace: str) -> None:
    """What is made, changed or deleted between two pages does not show in the second."""
    path = await fill(kube, namespace, 5)
    first = await kube.read(f"{path}?limit=2")
    await kube.made(path, pod("p9", schedulingGates=HELD))
    await kube.patched(f"{path}/p3", {"metadata": {"labels": {"changed": "yes"}}})
    await kube.send("DELETE", f"{path}/p4")
    second = await kube.read(f"{path}?limit=10&continue={first['metadata']['continue']}")

    assert names(first["items"]) == ["p0", "p1"]
    assert first["metadata"]["remainingItemCount"] == 3
    assert names(second["items"]) == ["p2", "p3", "p4"]
    assert "changed" not in second["items"][1]["metadata"]["labels"]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in second["metadata"]


async def test_a_page_of_a_selection_goes_on_where_it_ended(kube: KubeHttp, namespace: str) -> None:
    """Pages and selectors together: nothing is left out, nothing comes twice."""
    path = await fill(kube, namespace, 6)
    first = await kube.read(f"{path}?limit=2&labelSelector=parity%3Dodd")
    second = await kube.read(f"{path}?limit=2&labelSelector=parity%3Dodd&continue={first['metadata']['continue']}")

    assert names(first["items"]) + names(second["items"]) == ["p1", "p3", "p5"]


async def test_a_broken_continue_token_is_refused(kube: KubeHttp, namespace: str) -> None:
    """400, before anything is listed."""
    answer = await kube.send("GET", f"/api/v1/namespaces/{namespace}/pods?limit=2&continue=nonsense")

    assert (answer.status, answer.body["reason"]) == (400, "BadRequest")


async def test_an_exact_version_shows_the_past(kube: KubeHttp, namespace: str) -> None:
    """A list at a version that history still holds shows that version."""
    path = await fill(kube, namespace, 2)
    version = (await kube.read(path))["metadata"]["resourceVersion"]
    await kube.send("DELETE", f"{path}/p0")
    past = await kube.read(f"{path}?resourceVersion={version}&resourceVersionMatch=Exact")

    assert names(past["items"]) == ["p0", "p1"]
    assert past["metadata"]["resourceVersion"] == version


async def test_a_version_of_the_future_is_a_timeout(kube: KubeHttp, namespace: str) -> None:
    """A list not older than a future version is a retryable 504."""
    path = f"/api/v1/namespaces/{namespace}/pods?resourceVersion=999999999&resourceVersionMatch=NotOlderThan"
    answer = await kube.send("GET", path)

    assert (answer.status, answer.body["reason"]) == (504, "Timeout")
