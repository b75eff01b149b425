"""Which container holds which GPU, from the kubelet's pod-resources API.

Source: Kubernetes, "Device Plugins: Monitoring device plugin resources", and `podresources/v1/api.proto` (numbers of
fields), read 2026-11-27. The few fields are decoded here: generated code would be larger than this file.
"""

from collections.abc import Iterator
from typing import NamedTuple

import grpc

METHOD = "/v1.PodResourcesLister/List"
CALL_SECONDS_MAX = 0.5
ANSWER_BYTES_MAX = 16 * 2**20  # the kubelet's own limit

# Numbers of fields: ListPodResourcesResponse, PodResources, ContainerResources, ContainerDevices.
_PODS = 1
_POD_NAME, _POD_NAMESPACE, _POD_CONTAINERS = 1, 2, 3
_CONTAINER_NAME, _CONTAINER_DEVICES = 1, 2
_DEVICE_IDS = 2


class Holder(NamedTuple):
    """The container that holds a device. Fields are named as labels of the exporter."""

    container: str
    namespace: str
    pod: str


def read_holders(socket: str) -> dict[str, Holder]:
    """Return the holders that the kubelet lists, by device id. Raises ConnectionError or ValueError.

    The connection is not kept: gRPC would take more processor time between two pages than a new one does.
    """
    options = [("grpc.max_receive_message_length", ANSWER_BYTES_MAX)]
    with grpc.insecure_channel(f"unix://{socket}", options=options) as channel:
        try:
            answer = channel.unary_unary(METHOD)(b"", timeout=CALL_SECONDS_MAX)  # messages are bytes
        except grpc.RpcError as exc:
            raise ConnectionError(f"{exc.code().name}: {exc.details()}") from exc
    return parse_holders(answer)


def parse_holders(answer: bytes) -> dict[str, Holder]:
    """Return the holders by device id; a device of several containers has none. Raises ValueError.

    A replica of a shared GPU (`GPU-1::0`) is the GPU.
    """
    holders: dict[str, set[Holder]] = {}
    for number, pod in _fields(answer):
        if number != _PODS:
            continue
        fields = list(_fields(pod))
        names = {number: text.decode() for number, text in fields if number in (_POD_NAME, _POD_NAMESPACE)}
        for container in (content for number, content in fields if number == _POD_CONTAINERS):
            name, ids = _devices(container)
            holder = Holder(name, names.get(_POD_NAMESPACE, ""), names.get(_POD_NAME, ""))
            for device_id in ids:
                holders.setdefault(device_id.partition("::")[0], set()).add(holder)
    return {device_id: found.pop() for device_id, found in holders.items() if len(found) == 1}


def _devices(container: bytes) -> tuple[str, list[str]]:
    """Return the container's name and the ids of its devices."""
    name, ids = "", list[str]()
    for number, content in _fields(container):
        if number == _CONTAINER_NAME:
            name = content.decode()
        elif number == _CONTAINER_DEVICES:
            ids += [device_id.decode() for number, device_id in _fields(content) if number == _DEVICE_IDS]
    return name, ids


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the fields with a length; others are skipped. Raises ValueError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(message, at)
                if at + length > len(message):
                    raise ValueError("truncated message")
                yield tag >> 3, message[at : at + length]
                at += length
            case kind:
                raise ValueError(f"unknown wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
    raise ValueError("invalid varint")
