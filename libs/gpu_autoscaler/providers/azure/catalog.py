"""Built-in table of GPU sizes, used if the list of SKUs may not be read.

Source: Azure documentation, "Sizes for virtual machines in Azure", "GPU accelerated" (NCasT4_v3, NC_A100_v4,
NCads_H100_v5, NCv3, ND_A100_v4, NDm_A100_v4, ND_H100_v5, ND_H200_v5, NVadsA10_v5), read 2026-11-22. Without sizes that
have a share of a GPU.
"""

from gpu_autoscaler.providers.azure.translate import InstanceType, build_instance_type

AS_OF = "2026-11-22"

# name, family, vCPUs, memory GiB, GPUs
_ROWS = (
    ("Standard_NC4as_T4_v3", "Standard NCASv3_T4 Family", 4, 28, 1),
    ("Standard_NC8as_T4_v3", "Standard NCASv3_T4 Family", 8, 56, 1),
    ("Standard_NC16as_T4_v3", "Standard NCASv3_T4 Family", 16, 110, 1),
    ("Standard_NC64as_T4_v3", "Standard NCASv3_T4 Family", 64, 440, 4),
    ("Standard_NC6s_v3", "standardNCSv3Family", 6, 112, 1),
    ("Standard_NC12s_v3", "standardNCSv3Family", 12, 224, 2),
    ("Standard_NC24s_v3", "standardNCSv3Family", 24, 448, 4),
    ("Standard_NC24ads_A100_v4", "StandardNCADSA100v4Family", 24, 220, 1),
    ("Standard_NC48ads_A100_v4", "StandardNCADSA100v4Family", 48, 440, 2),
    ("Standard_NC96ads_A100_v4", "StandardNCADSA100v4Family", 96, 880, 4),
    ("Standard_ND96asr_v4", "standardNDASv4_A100Family", 96, 900, 8),
    ("Standard_ND96amsr_A100_v4", "standardNDAMSv4_A100Family", 96, 1900, 8),
    ("Standard_NC40ads_H100_v5", "standardNCadsH100v5Family", 40, 320, 1),
    ("Standard_NC80adis_H100_v5", "standardNCadsH100v5Family", 80, 640, 2),
    ("Standard_ND96isr_H100_v5", "standardNDSH100v5Family", 96, 1900, 8),
    ("Standard_ND96isr_H200_v5", "standardNDISRH200V5Family", 96, 1850, 8),
    ("Standard_NV36ads_A10_v5", "StandardNVADSA10v5Family", 36, 440, 1),
    ("Standard_NV72ads_A10_v5", "StandardNVADSA10v5Family", 72, 880, 2),
)

KNOWN_INSTANCE_TYPES: dict[str, InstanceType] = {
    name: build_instance_type(name, family=family, vcpu_count=vcpus, memory_gib=gibibytes, gpu_count=gpus)
    for name, family, vcpus, gibibytes, gpus in _ROWS
}
