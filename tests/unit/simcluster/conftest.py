"""An in-process cluster whose clock moves only when the test moves it."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.support.kube_objects import READY, Json, node

from gpu_autoscaler.simcluster.kinds import JOBS, LEASES, NODES, PODS, Kind
from gpu_autoscaler.simcluster.world import World

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class StillClock:
    """Cluster time that moves when told."""

    factor = 1.0

    def __init__(self) -> None:
        self.at = NOON

    def now(self) -> datetime:
        """Where the test left it."""
        return self.at

    async def sleep(self, seconds: float) -> None:
        """Time passes at once."""
        self.at += timedelta(seconds=seconds)


class Cluster:
    """A simulated cluster with the actions of test stories."""

    def __init__(self, *, history_changes_max: int = 20_000) -> None:
        self.clock = StillClock()
        self.world = World(self.clock, history_changes_max=history_changes_max, seed=1)
        self.api = self.world.api
        self.heartbeats: set[str] = set()

    def settle(self, seconds: float = 0.0, *, step_seconds: float = 0.5) -> None:
        """Let that much cluster time pass in steps, nodes renewing their leases meanwhile."""
        end = self.clock.at + timedelta(seconds=seconds)
        while True:
            for name in self.heartbeats:
                self._renew(name)
            for _ in range(3):  # controllers answer each other within a moment
                self.world.step()
            if self.clock.at >= end:
                return
            self.clock.at = min(end, self.clock.at + timedelta(seconds=step_seconds))

    def _renew(self, name: str) -> None:
        body = {"metadata": {"name": name}, "spec": {"renewTime": self.clock.at.isoformat()}}
        if not self.api.modify(LEASES, f"kube-node-lease/{name}", lambda new: new.update(spec=body["spec"])):
            self.api.create(LEASES, "kube-node-lease", body)

    def node(self, name: str, *, gpus: int = 8, zone: str = "us-west-2a", labels: Json | None = None) -> None:
        """Add a ready node that keeps its heartbeat."""
        self.api.create(NODES, None, node(name, gpus=gpus, zone=zone, labels=labels))
        self.api.patch(NODES, name, READY, "application/merge-patch+json", status=True)
        self.heartbeats.add(name)
        self.settle()

    def make(self, kind: Kind, *bodies: Json) -> None:
        """Create objects in the default namespace."""
        for body in bodies:
            self.api.create(kind, "default" if kind.namespaced else None, body)

    def pod(self, name: str) -> Json:
        """The pod of that name."""
        return self.api.record(PODS, f"default/{name}").object

    def job(self, name: str) -> Json:
        """The job of that name."""
        return self.api.record(JOBS, f"default/{name}").object

    def pods(self) -> list[Json]:
        """All pods of the default namespace."""
        return self.api.objects(PODS, "default")

    def where(self) -> dict[str, str | None]:
        """Which pod is on which node."""
        return {item["metadata"]["name"]: item["spec"].get("nodeName") for item in self.pods()}

    def phases(self) -> dict[str, str]:
        """Which pod is in which phase."""
        return {item["metadata"]["name"]: item["status"]["phase"] for item in self.pods()}


@pytest.fixture
def cluster() -> Cluster:
    """An empty cluster at noon."""
    return Cluster()
