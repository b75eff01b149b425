"""Life cycle of moto's instances by our clock: boot, delayed listing, slow termination, failure, expiry."""

import copy
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

ACCOUNT = "123456789012"  # moto's
TERMINATING_SECONDS = 5.0  # fixture: from termination request to the end of billing
FORGOTTEN_SECONDS = 3600.0  # EC2 User Guide, "Terminate Amazon EC2 instances": visible for about an hour


class _Life(msgspec.Struct, kw_only=True):
    reservation: Any
    user_data: str = ""  # in base64
    usd_per_hour_max: float | None = None  # None: the on-demand price
    runs_at: datetime
    shown_at: datetime
    ends_at: datetime | None = None  # None: running


class FleetInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the cloud describes it."""

    instance_id: str
    instance_type: str
    zone: str
    is_spot: bool
    tags: dict[str, str]
    user_data: str
    launched_at: datetime
    usd_per_hour_max: float | None
    ended_by_user_at: datetime | None
    is_alive: bool


class Machines:
    """All instances launched through the layer. `now` may be a test's clock."""

    def __init__(self, region: str, now: Callable[[], datetime]) -> None:
        from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto loads slowly, and only fakes need it

        ec2_backends[ACCOUNT].pop(region, None)  # of an earlier fake in this process
        self.backend: Any = ec2_backends[ACCOUNT][region]
        self.boot_seconds = 0.0
        self.shown_after_seconds = 0.0
        self._now = now
        self._lives: dict[str, _Life] = {}

    def launched(self, ids: Iterable[str], user_data: str = "", usd_per_hour_max: float | None = None) -> None:
        """Start the life cycle of instances that moto just created."""
        now = self._now()
        for instance_id in ids:
            reservation = next(
                reservation
                for reservation in self.backend.reservations.values()
                if any(instance.id == instance_id for instance in reservation.instances)
            )
            self._lives[instance_id] = _Life(
                reservation=reservation,
                user_data=user_data,
                usd_per_hour_max=usd_per_hour_max,
                runs_at=now + timedelta(seconds=self.boot_seconds),
                shown_at=now + timedelta(seconds=self.shown_after_seconds),
            )
            machine = self.get(instance_id)
            machine.launch_time = now.replace(microsecond=0)
            self._set(machine, "pending", 0)
        self.settle()

    def terminating(self, ids: Iterable[str]) -> None:
        """Start the termination of instances that moto terminated at once; idempotent."""
        now = self._now()
        for instance_id in ids:
            life = self._lives.get(instance_id)
            if life is not None and life.ends_at is None:
                life.ends_at = now + timedelta(seconds=TERMINATING_SECONDS)
                machine = self.get(instance_id)
                machine._reason = f"User initiated ({now:%Y-%m-%d %H:%M:%S} GMT)"  # noqa: SLF001 - no setter in moto
        self.settle()

    def die(self, instance_id: str, code: str = "Server.InternalError") -> datetime:
        """End the instance at boot: as in EC2 the reason has no date. Returns the time."""
        return self._end(instance_id, code, transition=code)

    def reclaim(self, instance_id: str) -> datetime:
        """Reclaim a spot instance; return the time, which EC2 dates to the second."""
        now = self._now().replace(microsecond=0)
        transition = f"Service initiated ({now:%Y-%m-%d %H:%M:%S} GMT)"
        self._end(instance_id, "Server.SpotInstanceTermination", transition=transition)
        return now

    def _end(self, instance_id: str, code: str, *, transition: str) -> datetime:
        life, machine, now = self._lives[instance_id], self.get(instance_id), self._now()
        life.ends_at = now
        machine._reason = transition  # noqa: SLF001 - no setter in moto
        machine.state_reason.code, machine.state_reason.message = code, f"{code}: it ended on its own"
        self.settle()
        return now

    def seen(self) -> list["FleetInstance"]:
        return [
            FleetInstance(
                instance_id=instance_id,
                instance_type=machine.instance_type,
                zone=machine.availability_zone,
                is_spot=machine.lifecycle == "spot",
                tags=dict(self.backend.tags[instance_id]),
                user_data=life.user_data,
                launched_at=machine.launch_time,
                usd_per_hour_max=life.usd_per_hour_max,
                ended_by_user_at=_dated(machine._reason) if life.ends_at is not None else None,  # noqa: SLF001 - as above
                is_alive=life.ends_at is None,
            )
            for instance_id, life in self._lives.items()
            for machine in [self.get(instance_id)]
        ]

    def stock(self, instance_id: str, count: int) -> None:
        """Create copies of an instance, with its tags: a large fleet without individual launches. Copies have no disks
        and network interfaces, which cause most of moto's work in a list."""
        life, model = self._lives[instance_id], self.get(instance_id)
        tags = dict(self.backend.tags[instance_id])
        described = [{"key": key, "value": value} for key, value in tags.items()]
        bare = {"network_interfaces": [], "block_device_mappings": [], "get_tags": lambda _: described}
        twin_class: Any = type("Twin", (type(model),), bare)
        for number in range(count):
            twin, reservation = copy.copy(model), copy.copy(life.reservation)
            twin.__class__ = twin_class
            twin.id, reservation.id = f"i-{number:017x}", f"r-{number:017x}"
            reservation.instances = [twin]
            self.backend.tags[twin.id].update(tags)
            self.backend.reservations[reservation.id] = reservation
            self._lives[twin.id] = _Life(reservation=reservation, runs_at=life.runs_at, shown_at=life.shown_at)

    def get(self, instance_id: str) -> Any:  # noqa: ANN401 - moto ships no types
        """Return moto's instance, even while it is not listed."""
        return next(
            instance for instance in self._lives[instance_id].reservation.instances if instance.id == instance_id
        )

    def is_alive(self, instance_id: str) -> bool:
        """Return whether its end has not begun."""
        life = self._lives.get(instance_id)
        return life is not None and life.ends_at is None

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._lives

    def settle(self) -> None:
        now = self._now()
        for instance_id, life in list(self._lives.items()):
            reservations, machine = self.backend.reservations, self.get(instance_id)
            if life.ends_at is not None:
                is_over = now >= life.ends_at
                self._set(machine, *(("terminated", 48) if is_over else ("shutting-down", 32)))
            elif now >= life.runs_at:
                self._set(machine, "running", 16)
            is_forgotten = life.ends_at is not None and now >= life.ends_at + timedelta(seconds=FORGOTTEN_SECONDS)
            if is_forgotten or now < life.shown_at:
                reservations.pop(life.reservation.id, None)
            else:
                reservations.setdefault(life.reservation.id, life.reservation)
            if is_forgotten:
                del self._lives[instance_id]

    @staticmethod
    def _set(machine: Any, name: str, code: int) -> None:  # noqa: ANN401 - moto ships no types
        machine._state.name, machine._state.code = name, code  # noqa: SLF001 - no setter in moto


def _dated(reason: str) -> datetime | None:
    match = re.search(r"\((.+) GMT\)", reason)
    return None if match is None else datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
