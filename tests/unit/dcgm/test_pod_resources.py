"""The kubelet's answer names the container that holds a device; a device of several containers has no holder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from gpu_autoscaler.dcgm.pod_resources import METHOD, Holder, parse_holders, read_holders

# Written by k8s.io/kubelet v0.36.0 (`podresources/v1`): train-0 in ml with GPU-1, GPU-2 and an RDMA device, topology,
# CPUs and memory; slice in ml with MIG-7; shared-a and shared-b in web with a replica each of GPU-3, and both replicas
# of GPU-4 for shared-b; a pod without devices.
ANSWER = bytes.fromhex(
    "0a770a07747261696e2d3012026d6c1a0e0a07736964656361721a0301ac021a580a06776f726b657212240a0e6e76696469612e"
    "636f6d2f67707512054750552d3112054750552d321a040a02080112180a0872646d612f68636112066d6c78355f301a040a0208"
    "01220e0a066d656d6f72791080808080400a3a0a05736c69636512026d6c1a2d0a046d61696e12250a166e76696469612e636f6d"
    "2f6d69672d31672e3130676212054d49472d371a040a0208010a390a087368617265642d6112037765621a280a046d61696e1220"
    "0a0e6e76696469612e636f6d2f67707512084750552d333a3a301a040a0208010a4d0a087368617265642d6212037765621a3c0a"
    "046d61696e12340a0e6e76696469612e636f6d2f67707512084750552d333a3a3112084750552d343a3a3012084750552d343a3a"
    "311a040a0208010a0d0a066e6f2d6770751203776562"
)
HOLDERS = {
    "GPU-1": Holder("worker", "ml", "train-0"),
    "GPU-2": Holder("worker", "ml", "train-0"),
    "mlx5_0": Holder("worker", "ml", "train-0"),
    "MIG-7": Holder("main", "ml", "slice"),
    "GPU-4": Holder("main", "web", "shared-b"),
}


def test_holders_are_those_that_the_kubelet_lists() -> None:
    """A GPU that two pods share has none."""
    assert parse_holders(ANSWER) == HOLDERS
    assert parse_holders(b"") == {}


@pytest.mark.parametrize("length", range(1, len(ANSWER)))
def test_a_truncated_answer_is_refused_or_shorter(length: int) -> None:
    """It names no holder that the whole answer does not name."""
    try:
        holders = parse_holders(ANSWER[:length])
    except ValueError:
        return
    assert holders.items() <= HOLDERS.items() | {("GPU-3", Holder("main", "web", "shared-a"))}


@pytest.mark.parametrize("answer", [b"\x0b", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0a\x02\x0a\xff"])
def test_an_answer_in_another_format_is_an_error(answer: bytes) -> None:
    """Never holders by accident."""
    with pytest.raises(ValueError, match=r"wire type|varint|truncated"):
        parse_holders(answer)


class Kubelet(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers a method with bytes."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_unary_rpc_method_handler(lambda _request, _: ANSWER) if call.method == METHOD else None


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """A socket that a gRPC server listens on."""
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Kubelet()])
    server.add_insecure_port(f"unix://{tmp_path}/kubelet.sock")
    server.start()
    yield tmp_path / "kubelet.sock"
    server.stop(0).wait()


def test_the_kubelet_is_asked_through_its_socket(socket: Path) -> None:
    """Over gRPC, without generated code."""
    assert read_holders(str(socket)) == HOLDERS


def test_a_missing_socket_is_an_error(tmp_path: Path) -> None:
    """The exporter then leaves the labels out."""
    with pytest.raises(ConnectionError, match="UNAVAILABLE: "):
        read_holders(str(tmp_path / "none.sock"))
