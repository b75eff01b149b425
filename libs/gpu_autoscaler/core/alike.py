"""What Kubernetes said of one pod holds for those that ask for the same. Used where demand is put together.

Its scheduler looks at one pod after the other, and takes seconds to say of each pod of a burst that it fits nowhere.
"""

import msgspec

from gpu_autoscaler.core.demand_items import DemandItem, DemandSource


def infer_unschedulable(items: list[DemandItem]) -> list[DemandItem]:
    """Pods of which Kubernetes has not spoken want room as well where it found none for one that asks for the same.

    Members of groups and of jobs are spoken of one by one.
    """
    refused = {_asked(item) for item in items if item.source is DemandSource.PENDING_POD and item.gang is None}
    if not refused:
        return items
    return [
        msgspec.structs.replace(item, source=DemandSource.PENDING_POD, is_inferred_unschedulable=True)
        if item.source is DemandSource.ARRIVING_POD and item.job_id is None and _asked(item) in refused
        else item
        for item in items
    ]


def _asked(item: DemandItem) -> tuple[object, ...]:
    return item.shape, item.priority, item.project, item.blocked, item.gang
