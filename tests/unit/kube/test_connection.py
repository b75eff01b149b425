"""Discovery of the cluster, and errors of an unusable kubeconfig. No server is called."""

from pathlib import Path

import pytest

from gpu_autoscaler.kube.api_errors import grant
from gpu_autoscaler.kube.connection import from_environment, from_kubeconfig, from_service_account
from gpu_autoscaler.model.errors import ConfigError, TransientError

PLAIN = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1/"}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: here, context: {cluster: c, user: u}}, {name: away, context: {cluster: far, user: u}}]
"""


def kubeconfig(folder: Path, text: str, name: str = "config") -> str:
    """Write a kubeconfig; return its path."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


async def test_the_current_context_is_taken(tmp_path: Path) -> None:
    """Address without its slash, and the user's token."""
    connection = from_kubeconfig(kubeconfig(tmp_path, PLAIN))

    assert connection.base_url == "http://127.0.0.1:1"
    assert await connection.credentials.header() == "Bearer secret"
    assert connection.source.startswith("user 'u' of ")


async def test_several_files_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$KUBECONFIG may list files: the first that has a name has the last word, and one that is missing is left out."""
    other = PLAIN.replace("secret", "other").replace("name: c,", "name: far,").replace(":1/", ":2")
    listed = [kubeconfig(tmp_path, PLAIN, "a"), str(tmp_path / "missing"), kubeconfig(tmp_path, other, "b")]
    monkeypatch.setenv("KUBECONFIG", ":".join(listed))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    connection = from_environment(context="away")
    assert connection.base_url == "http://127.0.0.1:2"
    assert await connection.credentials.header() == "Bearer secret"


async def test_a_pod_without_a_token_is_reported_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not mounted is a setting of the pod; and outside of a pod nothing is read at all."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(ConfigError, match=r"token is missing; set automountServiceAccountToken: true"):
        from_service_account(tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ConfigError, match=r"not running in a pod; set kube\.kubeconfig_path or kube\.url"):
        from_service_account(tmp_path)


async def test_a_token_file_that_is_away_is_an_outage(tmp_path: Path) -> None:
    """Files are exchanged under way: a call is tried again later, not set aside as a bug of ours."""
    text = PLAIN.replace("token: secret", "tokenFile: token")
    connection = from_kubeconfig(kubeconfig(tmp_path, text))
    with pytest.raises(TransientError, match=r"token cannot be read: No such file"):
        await connection.credentials.header()
    (tmp_path / "token").write_text("")
    with pytest.raises(TransientError, match="is empty"):
        await connection.credentials.header()
    (tmp_path / "token").write_text("fresh\n")
    assert await connection.credentials.header() == "Bearer fresh"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("current-context: here", ""), r"no current-context; set kube\.context to one of 'here', 'away'"),
        (("here\nclusters", "there\nclusters"), r"contexts has no 'there'; defined: 'here', 'away'"),
        (("current-context: here", "current-context: away"), r"clusters has no 'far'; defined: 'c'"),
        (("clusters: [", "clusters: ["[:-1] + "7 #"), r"is not a valid kubeconfig: .*kubectl config view"),
        (("users: [", "users: ["[:-1] + "{ ["), r"is not a valid kubeconfig"),
        (("http://127.0.0.1:1/", ""), r"cluster 'c': server '' is not an https:// address"),
        (("http://127.0.0.1:1/", "http://api.example"), r"unencrypted; use its https:// address"),
        (("token: secret", "as: root"), r"impersonation \(as: root\) is not supported"),
        (("token: secret", "username: me, password: x"), r"Kubernetes has no passwords since 1\.19"),
        (("token: secret", "auth-provider: {name: gcp}"), r"auth-provider gcp is not supported; use an exec plugin"),
        (
            ("token: secret", "exec: {apiVersion: v1, command: nowhere-to-be-found, installHint: 'get it at x'}"),
            r"credential plugin nowhere-to-be-found not found; get it at x",
        ),
        (
            ("token: secret", "exec: {apiVersion: v1, command: sh, interactiveMode: Always}"),
            r"plugin sh needs interactive input",
        ),
        (
            ("http://127.0.0.1:1/", 'https://x", certificate-authority: "/nowhere'),
            r"/nowhere contains no readable certificates",
        ),
        (
            ("http://127.0.0.1:1/", 'https://x", certificate-authority-data: "bm8='),
            r"certificate-authority-data contains no readable certificates",
        ),
        (("http://127.0.0.1:1/", 'https://x", proxy-url: "http://p'), r"proxy-url is not supported"),
    ],
)
async def test_an_unusable_kubeconfig_is_reported_with_the_next_step(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    """The file is named, and what to change in it."""
    text = PLAIN.replace(*change)
    assert text != PLAIN
    with pytest.raises(ConfigError, match=said):
        from_kubeconfig(kubeconfig(tmp_path, text))


async def test_a_missing_cluster_is_reported_with_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was looked for is named, and the settings that help."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(
        ConfigError, match=r"no kubeconfig at .*nowhere\.yaml; set kube\.kubeconfig_path .*or kube\.url"
    ):
        from_environment(str(tmp_path / "nowhere.yaml"))


async def test_a_right_in_a_group_and_below_a_resource_is_named_as_kubectl_takes_it() -> None:
    """`poddisruptionbudgets.policy`, `pods/eviction`; and what is no missing right has no command."""
    user = "system:serviceaccount:gpu:scaler"
    said = f'x is forbidden: User "{user}" cannot {{}} at the cluster scope'

    assert "--verb=watch --resource=poddisruptionbudgets.policy " in str(
        grant(said.format('watch resource "poddisruptionbudgets" in API group "policy"'))
    )
    evict = grant(
        said.format('create resource "pods/eviction" in API group ""').replace(
            "at the cluster scope", 'in the namespace "a"'
        )
    )
    assert evict is not None
    assert "--resource=pods/eviction " in evict
    assert evict.endswith("--serviceaccount=gpu:scaler")
    assert grant('pods "x" is forbidden: no PriorityClass with name y was found') is None
