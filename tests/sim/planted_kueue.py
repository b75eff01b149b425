"""Bugs to plant in how ProvisioningRequests are served that runs with Kueue find. See `planted.py`."""

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_SOURCES = f"{_CORE}/demand/sources.py"
_REQUESTS = f"{_CORE}/demand/provisioning_requests.py"
_ANSWERS = f"{_CORE}/provisioning/request_answers.py"
_WRITER = "services/gpu_autoscaler_services/scaler/request_answers.py"
_WATCHER = "services/gpu_autoscaler_services/pod_watcher/provisioning_requests.py"

# 2: limits are never exceeded, nor is anything promised that is not there
KUEUE = (
    Planted(
        "nodes are bought for a capacity check",
        2,
        _SOURCES,
        "DemandSource.CAPACITY_CHECK if is_check(request) else DemandSource.PROVISIONING",
        "DemandSource.PROVISIONING",
        "kueue",
    ),
    Planted(
        "capacity for one pod of each pod set counts as capacity for all",
        2,
        _SOURCES,
        "                member_count=count,\n                gang=request_key(request),",
        "                member_count=1,\n                gang=request_key(request),",
        "kueue",
    ),
    Planted(
        "nodes are bought for some pods of a request",
        2,
        f"{_CORE}/provisioning/basket.py",
        "buyer.member_count > 1:\n            for key in bought:\n                self.free_capacity.remove",
        "buyer.member_count > 99:\n            for key in bought:\n                self.free_capacity.remove",
        "kueue",
        also=(
            (
                f"{_CORE}/provisioning/gangs.py",
                "        if late is None and not any(outcome.missing_count for outcome in outcomes):\n",
                "        if True:\n",
            ),
        ),
    ),
    Planted(
        "each pod set of a request is a gang of its own",
        2,
        _SOURCES,
        "                gang=request_key(request),\n",
        '                gang=f"{request_key(request)}/{number}",\n',
        "kueue",
    ),
    Planted(
        "capacity counts as provisioned once its nodes are ordered",
        2,
        _ANSWERS,
        "    if found.is_ready:\n",
        "    if found.missing is None:\n",
        "kueue",
    ),
    Planted(
        "capacity is free again as soon as it is promised",
        2,
        _SOURCES,
        "    for request in booked_requests(state, as_of):\n",
        "    for request in list(booked_requests(state, as_of))[:0]:\n",
        "kueue",
    ),
    Planted(
        "capacity stays booked for a week",
        2,
        _REQUESTS,
        "BOOKED_SECONDS = 600.0\n",
        "BOOKED_SECONDS = 604_800.0\n",
        "kueue",
    ),
    Planted(
        "a booking ends after five minutes",
        3,
        _REQUESTS,
        "BOOKED_SECONDS = 600.0\n",
        "BOOKED_SECONDS = 300.0\n",
        "kueue",
    ),
    Planted(
        "a request waits for ever",
        1,
        _REQUESTS,
        "    return has_lasted(request.created_at, request.valid_seconds or VALID_SECONDS, as_of)\n",
        "    return has_lasted(request.created_at, VALID_SECONDS, as_of)\n",
        "kueue",
    ),
    Planted(
        "a request expires before its time",
        1,
        _REQUESTS,
        "    return has_lasted(request.created_at, request.valid_seconds or VALID_SECONDS, as_of)\n",
        "    return has_lasted(request.created_at, (request.valid_seconds or VALID_SECONDS) / 2, as_of)\n",
        "kueue",
    ),
    Planted(
        "a request fails before its templates come",
        1,
        _REQUESTS,
        "TEMPLATE_SECONDS_MAX = 60.0\n",
        "TEMPLATE_SECONDS_MAX = 1.0\n",
        "kueue",
    ),
    Planted(
        "templates that come after their request are not read",
        1,
        _WATCHER,
        "        if (changed and item.kind is PRIORITY_CLASSES) or is_first:\n",
        "        if item.kind is not PRIORITY_CLASSES and not is_first:\n            return ()\n"
        "        if (changed and item.kind is PRIORITY_CLASSES) or is_first:\n",
        "kueue",
    ),
    Planted(
        "a capacity check is tried once, whatever it says",
        1,
        _ANSWERS,
        "    is_final = is_check(request) and request.is_tried_once\n",
        "    is_final = is_check(request)\n",
        "kueue",
    ),
    Planted(
        "any node that ends revokes the capacity of a request",
        3,
        _ANSWERS,
        "if order.decision and order.decision.gang == request_key(request))",
        "if order.decision)",
        "kueue and notices",
        hours=1.0,
    ),
    Planted(
        "every condition is written as true",
        2,
        _WRITER,
        '            status="True" if decision.is_true else "False",\n',
        '            status="True",\n',
        "kueue",
    ),
    Planted(
        "a condition replaces all others",
        2,
        _WRITER,
        "            for condition in conditions.values()\n",
        "            for condition in (answer,)\n",
        "kueue",
    ),
)
