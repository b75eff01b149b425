"""Logs of pods: what the API server answers by itself, without a kubelet. KWOK's nodes serve no logs."""

from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod


async def test_a_pod_without_a_node_has_an_empty_log(kube: KubeHttp, namespace: str) -> None:
    """204: there is no kubelet to ask."""
    await kube.made(f"/api/v1/namespaces/{namespace}/pods", pod("waiting", schedulerName="nobody"))

    answer = await kube.send("GET", f"/api/v1/namespaces/{namespace}/pods/waiting/log")
    assert (answer.status, answer.body) == (204, "")


async def test_a_container_is_named_where_there_are_several(kube: KubeHttp, namespace: str) -> None:
    """400 for an unknown container and for a choice that is not made; 404 for an unknown pod."""
    several = pod("several", schedulerName="nobody")
    several["spec"]["containers"].append({"name": "side", "image": "example.invalid/side:1"})
    path = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(path, several)

    for query, message in (
        ("", "a container name must be specified for pod several, choose one of: [main side]"),
        ("?container=nope", "container nope is not valid for pod several"),
    ):
        answer = await kube.send("GET", f"{path}/several/log{query}")
        assert (answer.status, answer.body["reason"], answer.body["message"]) == (400, "BadRequest", message)
    answer = await kube.send("GET", f"{path}/nobody/log")
    assert (answer.status, answer.body["message"]) == (404, 'pods "nobody" not found')
