"""Amounts of the things that pods ask for and nodes have."""

import msgspec

GPU_RESOURCE = "nvidia.com/gpu"  # the extended resource of NVIDIA's device plugin; integers only


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of each resource; missing means none of it. Negative only as the result of a subtraction."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_count: int = 0
    ephemeral_storage_bytes: int = 0
    pod_count: int = 0

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(
            cpu_milli=self.cpu_milli + other.cpu_milli,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            gpu_count=self.gpu_count + other.gpu_count,
            ephemeral_storage_bytes=self.ephemeral_storage_bytes + other.ephemeral_storage_bytes,
            pod_count=self.pod_count + other.pod_count,
        )

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(
            cpu_milli=self.cpu_milli - other.cpu_milli,
            memory_bytes=self.memory_bytes - other.memory_bytes,
            gpu_count=self.gpu_count - other.gpu_count,
            ephemeral_storage_bytes=self.ephemeral_storage_bytes - other.ephemeral_storage_bytes,
            pod_count=self.pod_count - other.pod_count,
        )

    def fits_in(self, room: "Resources") -> bool:
        """True when every amount is at most the room's."""
        return (
            self.gpu_count <= room.gpu_count
            and self.cpu_milli <= room.cpu_milli
            and self.memory_bytes <= room.memory_bytes
            and self.ephemeral_storage_bytes <= room.ephemeral_storage_bytes
            and self.pod_count <= room.pod_count
        )


NO_RESOURCES = Resources()

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}


def parse_quantity_milli(text: str) -> int:
    """Return a Kubernetes quantity in thousandths, rounded up: `500m` is 500, `2` is 2000, `1Gi` is 2**30 * 1000.

    Raises ValueError naming the text. Grammar: Kubernetes API reference, "Quantity" (read 2026-11-21).
    """
    number, factor_milli = text, 1000
    if text.endswith("m"):
        number, factor_milli = text[:-1], 1
    elif text[-2:] in _BINARY:
        number, factor_milli = text[:-2], _BINARY[text[-2:]] * 1000
    elif text[-1:] in _DECIMAL:
        number, factor_milli = text[:-1], _DECIMAL[text[-1:]] * 1000
    sign = -1 if number.startswith("-") else 1
    whole, _, fraction = number.lstrip("+-").partition(".")
    mantissa, _, exponent = fraction.partition("e") if "e" in fraction else (fraction, "", "")
    if not exponent and "e" in whole:
        whole, _, exponent = whole.partition("e")
    if not (whole + mantissa).isdigit() or (exponent and not exponent.lstrip("+-").isdigit()):
        raise ValueError(f"not a Kubernetes quantity: {text!r} (examples: 500m, 2, 16Gi)")
    shift = (int(exponent) if exponent else 0) - len(mantissa)
    if abs(shift) > 30:
        raise ValueError(f"quantity out of range: {text!r}")
    numerator = int(whole + mantissa) * factor_milli * int(10 ** max(shift, 0))
    denominator = int(10 ** max(-shift, 0))
    return sign * -(-numerator // denominator)


def parse_quantity(text: str) -> int:
    """Return a Kubernetes quantity in whole units, rounded up: `16Gi` is 2**34, `500m` is 1. Raises ValueError."""
    return -(-parse_quantity_milli(text) // 1000)
