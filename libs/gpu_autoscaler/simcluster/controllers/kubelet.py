"""The kubelets of all nodes: start bound pods, end them when their work is done, stop them when deleted.

Annotations of a pod: `run-seconds` of work (without it, forever), `exit-code`, `stop-seconds` (at most its grace
period). A node that is not ready, or is powered off, does nothing until it is back.
"""

import itertools
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.checkpoints import Checkpoints
from gpu_autoscaler.simcluster.controllers.protocol import Agenda
from gpu_autoscaler.simcluster.kinds import NODES, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    annotation,
    is_finished,
    is_terminating,
    is_true,
    key_of,
    phase_of,
    seconds_in_annotation,
    set_pod_condition,
    stamp,
)
from gpu_autoscaler.simcluster.store import Change

START_SECONDS = 1.0  # with a cached image; pulls are part of the node's boot
STOP_SECONDS = 1.0  # a program that ends soon after SIGTERM
DUTIES_PER_STEP_MAX = 250  # a step must not block the event loop
TERMINATED_BY_SIGTERM = 143  # 128 + 15, what a shell reports

_Act = Literal["start", "end", "stop"]


@dataclass(frozen=True, slots=True)
class _Duty:
    """An action of a kubelet on one pod."""

    act: _Act
    key: str
    uid: str


class Kubelets:
    """All kubelets as one controller."""

    def __init__(self, api: Api, checkpoints: Checkpoints) -> None:
        self._api = api
        self._checkpoints = checkpoints
        self._agenda: Agenda[_Duty] = Agenda()
        self._known: dict[str, set[_Act]] = {}  # by pod uid: actions scheduled or done
        self._held_up: dict[str, set[_Duty]] = {}  # by node: actions waiting for its readiness
        self._powered_off: set[str] = set()
        self._addresses = 0

    def power_off(self, node_name: str) -> None:
        """Stop all actions on this node, as when its machine is gone; its objects stay."""
        self._powered_off.add(node_name)

    def power_on(self, node_name: str) -> None:
        """The node's machine runs (again)."""
        self._powered_off.discard(node_name)
        self._release(node_name)

    def end_work(self) -> int:
        """End all running programs now; return the number of pods."""
        running = [pod for pod in self._api.objects(PODS) if phase_of(pod) == "Running"]
        for pod in running:
            self._agenda.add(self._api.now(), _Duty("end", key_of(pod), pod["metadata"]["uid"]))
        return len(running)

    def on_change(self, change: Change) -> None:
        if change.table == NODES.table:
            if change.type == "DELETED":
                self._held_up.pop(change.record.key, None)
            elif is_true(change.record.object, "Ready"):
                self._release(change.record.key)
        elif change.table == PODS.table:
            self._pod_changed(change)

    def step(self, now: datetime) -> None:
        for duty in itertools.islice(self._agenda.take_due(now), DUTIES_PER_STEP_MAX):
            pod = self._api.find(PODS, duty.key)
            if pod is None or pod["metadata"]["uid"] != duty.uid:
                continue
            node_name = pod["spec"]["nodeName"]
            if self._node_works(node_name):
                self._perform(duty, pod, now)
            elif self._api.find(NODES, node_name) is not None:
                self._held_up.setdefault(node_name, set()).add(duty)

    def _pod_changed(self, change: Change) -> None:
        pod = change.record.object
        uid = pod["metadata"]["uid"]
        if change.type == "DELETED":
            self._known.pop(uid, None)
            return
        if not pod["spec"].get("nodeName"):
            return
        now = self._api.now()
        if is_terminating(pod):
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            wanted = seconds_in_annotation(pod, "stop-seconds")
            stop_seconds = min(grace, STOP_SECONDS if wanted is None else wanted)
            self._plan("stop", pod, now + timedelta(seconds=stop_seconds))
        elif phase_of(pod) == "Pending":
            self._plan("start", pod, now + timedelta(seconds=START_SECONDS))

    def _plan(self, act: _Act, pod: Json, due: datetime) -> None:
        uid = pod["metadata"]["uid"]
        known = self._known.setdefault(uid, set())
        if act not in known:
            known.add(act)
            self._agenda.add(due, _Duty(act, key_of(pod), uid))

    def _node_works(self, node_name: str) -> bool:
        node = self._api.find(NODES, node_name)
        return node is not None and node_name not in self._powered_off and is_true(node, "Ready")

    def _release(self, node_name: str) -> None:
        """Reschedule the actions that waited for the node."""
        for duty in sorted(self._held_up.pop(node_name, ()), key=lambda duty: (duty.key, duty.act)):
            self._agenda.add(self._api.now(), duty)

    def _perform(self, duty: _Duty, pod: Json, now: datetime) -> None:
        if duty.act == "stop":
            if not is_finished(pod):
                self._api.modify(PODS, duty.key, lambda new: end_pod(new, now, TERMINATED_BY_SIGTERM))
            self._api.finish_deletion(PODS, duty.key)
        elif duty.act == "start" and not is_terminating(pod) and phase_of(pod) == "Pending":
            self._addresses += 1
            address = f"10.{self._addresses >> 16 & 255}.{self._addresses >> 8 & 255}.{self._addresses & 255}"
            self._api.modify(PODS, duty.key, lambda new: start_pod(new, now, address))
            done_seconds = self._checkpoints.begin(pod, now)
            run_seconds = seconds_in_annotation(pod, "run-seconds")
            if run_seconds is not None:
                self._plan("end", pod, now + timedelta(seconds=max(0.0, run_seconds - done_seconds)))
        elif duty.act == "end" and not is_terminating(pod) and not is_finished(pod):
            exit_code = annotation(pod, "exit-code") or "0"
            code = int(exit_code) if exit_code.isdigit() else 1
            self._api.modify(PODS, duty.key, lambda new: end_pod(new, now, code))


def start_pod(pod: Json, now: datetime, address: str) -> None:
    """Write the status of a pod whose containers run, in place."""
    for condition_type in ("Initialized", "Ready", "ContainersReady", "PodScheduled"):
        set_pod_condition(pod, now, condition_type, status="True")
    at = stamp(now)
    pod["status"].update(
        phase="Running",
        startTime=at,
        podIP=address,
        podIPs=[{"ip": address}],
        containerStatuses=[
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "lastState": {},
                "state": {"running": {"startedAt": at}},
            }
            for container in pod["spec"]["containers"]
        ],
    )


def end_pod(pod: Json, now: datetime, exit_code: int) -> None:
    """Write the status of a pod whose containers have ended, in place."""
    succeeded = exit_code == 0
    word = "PodCompleted" if succeeded else "PodFailed"
    for condition_type in ("Ready", "ContainersReady"):
        set_pod_condition(pod, now, condition_type, status="False", reason=word)
    pod["status"]["phase"] = "Succeeded" if succeeded else "Failed"
    for container in pod["status"].get("containerStatuses") or ():
        began = container.get("state", {}).get("running", {}).get("startedAt", stamp(now))
        container.update(
            ready=False,
            started=False,
            state={
                "terminated": {
                    "exitCode": exit_code,
                    "reason": "Completed" if succeeded else "Error",
                    "startedAt": began,
                    "finishedAt": stamp(now),
                }
            },
        )
