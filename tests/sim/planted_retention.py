"""Bugs to plant in what keeps living objects in streams that discard. See `planted.py`."""

from tests.sim.planting import Planted

_SERVICES = "services/gpu_autoscaler_services"
_PROFILE = "short retention"

# 9: everything alive can be read from the streams
RETENTION = (
    Planted(
        "unchanged pods and nodes are not published again",
        9,
        f"{_SERVICES}/pod_watcher/service.py",
        "            yield from filter(None, tuple(kind.published.values()))\n",
        "",
        _PROFILE,
        hours=2.0,
    ),
    Planted(
        "the last list of pods is not published again",
        9,
        f"{_SERVICES}/pod_watcher/service.py",
        "            if kind.last_list is not None:\n",
        "            if False:\n",
        _PROFILE,
        hours=2.0,
    ),
    Planted(
        "open purchases are not published again",
        9,
        f"{_SERVICES}/scaler/living.py",
        "        if order_ended_at(order) is None or _is_uncharged(order.terminated, state):\n",
        "        if _is_uncharged(order.terminated, state):\n",
        _PROFILE,
        hours=2.0,
    ),
    Planted(
        "waiting jobs are not published again",
        9,
        f"{_SERVICES}/scheduler/service.py",
        "            if job.queued is not None and job.finished is None:\n",
        "            if job.started is not None and job.finished is None:\n",
        _PROFILE,
        hours=2.0,
    ),
    Planted(
        "facts are published again too late",
        9,
        "libs/gpu_autoscaler/runtime/resync.py",
        "now - position.stored_at > span.age_max / 2",
        "now - position.stored_at > span.age_max * 2",
        _PROFILE,
        hours=2.0,
    ),
    Planted(
        "the limit by size is ignored",
        9,
        "libs/gpu_autoscaler/runtime/resync.py",
        "if is_old or (span.is_half_full and position.sequence < middle):",
        "if is_old:",
        "overflowing streams",
        hours=2.0,
    ),
    Planted(
        "discarded messages are skipped silently",
        9,
        "libs/gpu_autoscaler/bus/protocol.py",
        "    if 0 < read_up_to < first_sequence - 1:\n",
        "    if False:\n",
        "suspended readers",
        hours=2.0,
    ),
    Planted(
        "a clock that is hours ahead is believed",
        4,
        "libs/gpu_autoscaler/events/envelope.py",
        "AHEAD_MAX = timedelta(seconds=60)\n",
        "AHEAD_MAX = timedelta(days=60)\n",
        "clocks",
    ),
)
