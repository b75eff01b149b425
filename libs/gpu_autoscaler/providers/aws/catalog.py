"""Built-in table of GPU instance types, used if the cloud may not be asked.

Source: Amazon EC2 Instance Types Guide, "Specifications for Amazon EC2 accelerated computing instances", compared with
the DescribeInstanceTypes answers in moto 5.2.5 (2026-11-21); a test repeats the comparison.
"""

from gpu_autoscaler.providers.aws.translate import InstanceType, build_instance_type

AS_OF = "2026-11-21"

# name, vCPUs, memory GiB, GPUs, GPU model (with its memory GiB where the model has several sizes)
_ROWS = (
    ("g4dn.12xlarge", 48, 192, 4, "T4"),
    ("g4dn.16xlarge", 64, 256, 1, "T4"),
    ("g4dn.2xlarge", 8, 32, 1, "T4"),
    ("g4dn.4xlarge", 16, 64, 1, "T4"),
    ("g4dn.8xlarge", 32, 128, 1, "T4"),
    ("g4dn.metal", 96, 384, 8, "T4"),
    ("g4dn.xlarge", 4, 16, 1, "T4"),
    ("g5.12xlarge", 48, 192, 4, "A10G"),
    ("g5.16xlarge", 64, 256, 1, "A10G"),
    ("g5.24xlarge", 96, 384, 4, "A10G"),
    ("g5.2xlarge", 8, 32, 1, "A10G"),
    ("g5.48xlarge", 192, 768, 8, "A10G"),
    ("g5.4xlarge", 16, 64, 1, "A10G"),
    ("g5.8xlarge", 32, 128, 1, "A10G"),
    ("g5.xlarge", 4, 16, 1, "A10G"),
    ("g6.12xlarge", 48, 192, 4, "L4"),
    ("g6.16xlarge", 64, 256, 1, "L4"),
    ("g6.24xlarge", 96, 384, 4, "L4"),
    ("g6.2xlarge", 8, 32, 1, "L4"),
    ("g6.48xlarge", 192, 768, 8, "L4"),
    ("g6.4xlarge", 16, 64, 1, "L4"),
    ("g6.8xlarge", 32, 128, 1, "L4"),
    ("g6.xlarge", 4, 16, 1, "L4"),
    ("g6e.12xlarge", 48, 384, 4, "L40S"),
    ("g6e.16xlarge", 64, 512, 1, "L40S"),
    ("g6e.24xlarge", 96, 768, 4, "L40S"),
    ("g6e.2xlarge", 8, 64, 1, "L40S"),
    ("g6e.48xlarge", 192, 1536, 8, "L40S"),
    ("g6e.4xlarge", 16, 128, 1, "L40S"),
    ("g6e.8xlarge", 32, 256, 1, "L40S"),
    ("g6e.xlarge", 4, 32, 1, "L40S"),
    ("gr6.4xlarge", 16, 128, 1, "L4"),
    ("gr6.8xlarge", 32, 256, 1, "L4"),
    ("p3.16xlarge", 64, 488, 8, "V100/16"),
    ("p3.2xlarge", 8, 61, 1, "V100/16"),
    ("p3.8xlarge", 32, 244, 4, "V100/16"),
    ("p4d.24xlarge", 96, 1152, 8, "A100/40"),
    ("p4de.24xlarge", 96, 1152, 8, "A100/80"),
    ("p5.48xlarge", 192, 2048, 8, "H100"),
    ("p5.4xlarge", 16, 256, 1, "H100"),
    ("p5e.48xlarge", 192, 2048, 8, "H200"),
    ("p5en.48xlarge", 192, 2048, 8, "H200"),
    ("p6-b200.48xlarge", 192, 2048, 8, "B200"),
)


def _instance_type(name: str, vcpus: int, memory_gib: int, gpus: int, gpu: str) -> InstanceType:
    model, _, gpu_memory_gib = gpu.partition("/")
    return build_instance_type(
        name,
        vcpu_count=vcpus,
        memory_mib=memory_gib * 1024,
        gpu_count=gpus,
        gpu_name=model,
        gpu_memory_mib=int(gpu_memory_gib) * 1024 if gpu_memory_gib else None,
    )


KNOWN_INSTANCE_TYPES: dict[str, InstanceType] = {row[0]: _instance_type(*row) for row in _ROWS}
