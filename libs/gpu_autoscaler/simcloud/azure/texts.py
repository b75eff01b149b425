"""Machine properties for the fake: the file of `azure.machine_path`."""

from typing import Any

_SUBNET = (
    "/subscriptions/00000000-0000-4000-8000-000000000000/resourceGroups/gpu/providers/Microsoft.Network"
    "/virtualNetworks/cluster/subnets/nodes"
)
_INTERFACE: dict[str, Any] = {
    "name": "node",
    "properties": {
        "primary": True,
        "deleteOption": "Delete",
        "ipConfigurations": [{"name": "node", "properties": {"subnet": {"id": _SUBNET}}}],
    },
}
MACHINE: dict[str, Any] = {
    "storageProfile": {
        "imageReference": {"publisher": "microsoft-dsvm", "offer": "ubuntu-hpc", "sku": "2204", "version": "latest"},
        "osDisk": {
            "createOption": "FromImage",
            "deleteOption": "Delete",
            "diskSizeGB": 100,
            "managedDisk": {"storageAccountType": "Premium_LRS"},
        },
    },
    "osProfile": {
        "adminUsername": "node",
        "linuxConfiguration": {"disablePasswordAuthentication": True, "provisionVMAgent": True},
    },
    "networkProfile": {"networkInterfaceConfigurations": [_INTERFACE]},
}
