"""The exporter for nodes without DCGM: on GPU nodes, where the ingest scrapes, with as few rights as it needs."""

import pytest
from tests.chart.charting import Json, of_kind, rendered, template

NAME = "gpu-autoscaler-nvml-exporter"
ON = "sensing.nvmlExporter.enabled=true"


def pod(*sets: str) -> Json:
    """The pod of the exporter's DaemonSet."""
    found: Json = of_kind(rendered("cluster", ON, *sets), "DaemonSet")[NAME]["spec"]["template"]["spec"]
    return found


def test_it_is_off_by_default() -> None:
    """It needs a RuntimeClass, and must not run beside DCGM."""
    assert NAME not in of_kind(rendered("cluster"), "DaemonSet")


def test_it_serves_where_the_ingest_scrapes() -> None:
    """At the port of the URL, on the address of the node, with the driver and its devices."""
    found = pod("sensing.dcgmUrl=http://{internal_ip}:9555/metrics")
    (container,) = found["containers"]
    names = {variable["name"]: variable for variable in container["env"]}

    assert (found["hostNetwork"], found["runtimeClassName"]) == (True, "nvidia")
    assert container["command"][2:] == [
        "gpu_autoscaler_services.nvml_exporter", "--host", "$(HOST_IP)", "--port", "9555", "--hostname", "$(NODE_NAME)",
    ]  # fmt: skip
    assert container["ports"] == [{"name": "http", "containerPort": 9555}]
    assert names["HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    assert (names["NVIDIA_VISIBLE_DEVICES"]["value"], names["NVIDIA_DRIVER_CAPABILITIES"]["value"]) == (
        "all",
        "utility",
    )


def test_only_the_socket_of_the_kubelet_needs_root() -> None:
    """No capability, no account, no writable file system, and no limit of GPUs: it holds none."""
    root, plain = pod(), pod("sensing.nvmlExporter.podResources=")

    assert root["securityContext"]["runAsUser"] == 0
    assert root["containers"][0]["args"] == ["--pod-resources", "/var/lib/kubelet/pod-resources/kubelet.sock"]
    assert {"name": "pod-resources", "mountPath": "/var/lib/kubelet/pod-resources", "readOnly": True} in (
        root["containers"][0]["volumeMounts"]
    )
    assert plain["securityContext"]["runAsNonRoot"] is True
    assert "args" not in plain["containers"][0]
    assert [volume["name"] for volume in plain["volumes"]] == ["scratch"]
    for found in (root, plain):
        (container,) = found["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert found["automountServiceAccountToken"] is False
        assert "nvidia.com/gpu" not in str(container["resources"])


def test_it_runs_on_launched_nodes_or_those_that_are_selected() -> None:
    """Whatever their taints."""
    launched = pod()["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    selected = pod(
        "services.nvml-exporter.nodeSelector.gpu=yes", "sensing.nvmlExporter.runtimeClassName=",
        "services.nvml-exporter.resources.requests.cpu=50m",
    )  # fmt: skip

    assert launched["nodeSelectorTerms"][0]["matchExpressions"][0]["key"] == "gpu-autoscaler.io/action-id"
    assert selected["nodeSelector"] == {"gpu": "yes"}
    assert {"affinity", "runtimeClassName"}.isdisjoint(selected)
    assert selected["tolerations"] == [{"operator": "Exists"}]
    assert selected["containers"][0]["resources"]["requests"] == {"cpu": "50m", "memory": "128Mi"}


@pytest.mark.parametrize(
    ("values", "setting", "phrase"),
    [
        (
            "cluster",
            "sensing.dcgmUrl=http://{node_name}:9400/metrics",
            "it serves at http://{internal_ip}:<port>/metrics",
        ),
        ("cluster", "sensing.dcgmUrl=https://{internal_ip}:9400/metrics", "set that form"),
        ("simulated", "sensing.scrapeSeconds=10", "the simulated cluster has no GPUs to read"),
    ],
)
def test_an_address_that_it_cannot_serve_is_refused(values: str, setting: str, phrase: str) -> None:
    """Instead of an exporter that nobody scrapes."""
    told = template(values, ON, setting)
    assert told.returncode != 0
    assert phrase in told.stderr
