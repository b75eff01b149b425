"""Users: jobs that arrive, invalid requests, repeated requests, cancellations, and programs that report demand."""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import FactId, JobId, derive_id
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.virtual_time import VirtualLoop

JOBS_PER_HOUR = (16.0, 26.0)
RUN_SECONDS_MIN, RUN_SECONDS_MEDIAN, RUN_SECONDS_MAX = 30.0, 1200.0, 5400.0
RETRY_SECONDS = 5.0  # while the broker is unavailable
FRACTIONS_RATIO = 0.5  # of jobs, where some need a GPU fraction
_MODELS = (None, None, None, "T4", "A10G", "L4")
# Some set a job budget from the spot price of a GPU, ignoring expensive GPUs and work that is done twice.
TIGHT_RATIO = 0.2  # of the jobs without a budget
TIGHT_USD_PER_GPU_HOUR = 0.4


class Users:
    """All users who submit jobs."""

    def __init__(
        self,
        loop: VirtualLoop,
        bus: SimBus,
        faults: Faults,
        rng: random.Random,
        *,
        jobs_per_hour: float | None = None,
        wants_fractions: bool = False,
        changed: Callable[[JobRequested], JobRequested],
    ) -> None:
        """`jobs_per_hour`: None: chosen by the seed. `wants_fractions`: some jobs need a GPU fraction. `changed`: the
        request as it is sent."""
        self._changed = changed
        self._wants_fractions = wants_fractions
        self.requests: list[tuple[FactId, JobRequested]] = []
        self._loop = loop
        self._bus = bus
        self._faults = faults
        self._rng = rng
        chosen = rng.uniform(*JOBS_PER_HOUR)
        self._jobs_per_hour = chosen if jobs_per_hour is None else jobs_per_hour
        self._count = 0
        self._is_over = False

    def begin(self) -> None:
        self._next()

    def stop(self) -> None:
        """Submit no more jobs; accepted jobs continue."""
        self._is_over = True

    def resume(self) -> None:
        """Submit jobs again after a stop."""
        self._is_over = False
        self._next()

    # ---- jobs

    def _next(self) -> None:
        self._loop.call_later(self._rng.expovariate(self._jobs_per_hour / 3600.0), self._submit_next)

    def _submit_next(self) -> None:
        if self._is_over:
            return
        request = self._changed(self._request())
        if self._faults.strikes("user_talks_nonsense"):
            request = self._invalid(request)
        self._submit(request)
        if self._faults.strikes("user_asks_again"):
            self._loop.call_later(self._faults.seconds("user_asks_again", 1.0, 900.0), self._submit, request)
        if self._faults.strikes("user_cancels") and request.job_id is not None:
            cancel = JobCancelRequested(job_id=request.job_id, requested_by="somebody")
            self._loop.call_later(self._faults.seconds("user_cancels", 0.0, 2400.0), self._submit, cancel)
        self._next()

    def _request(self) -> JobRequested:
        rng = self._rng
        run_seconds = min(max(rng.lognormvariate(0.0, 1.0) * RUN_SECONDS_MEDIAN, RUN_SECONDS_MIN), RUN_SECONDS_MAX)
        name = f"work-{len(self.requests) + 1}"
        request = JobRequested(
            job_name=name,
            job_id=JobId(name),
            project_id=rng.choice(("vision", "speech", "ranking")),
            gpu_requirements=self._gpus(),
            container=ContainerRequest(image="work:1"),
            priority=rng.choice(("low", "medium", "medium", "high")),
            budget_limit_usd=rng.choice((None, None, 1.0, 50.0)),
            max_duration_hours=rng.choice((None, None, None, 0.25)),
            preemptible=rng.random() < 0.8,
            members=rng.choice((1, 1, 1, 1, 2, 3)),
            workload_type=rng.choice((None, "training", "batch")),
            run_seconds=round(run_seconds, 1),
        )
        # Some elastic jobs start with fewer members; drawn from a separate generator to keep recorded seeds stable.
        members_min = random.Random(f"{name}/{run_seconds}").choice((None, 1, 2)) if request.members > 2 else None
        interval = random.Random(f"{name}/{run_seconds}/interval").choice((None, None, 0.0, 2.0, 5.0, "auto"))
        request = replace(
            request,
            min_members=members_min,
            budget_limit_usd=_budget(request),
            checkpoint_interval_minutes=interval if request.workload_type == CHECKPOINTING_WORKLOAD else None,
        )
        # Where some jobs ask for GPU fractions, gangs ask for one zone.
        return replace(request, within=labels.ZONE) if self._wants_fractions and request.members > 1 else request

    def _gpus(self) -> GpuRequirements:
        rng = self._rng
        if self._wants_fractions and rng.random() < FRACTIONS_RATIO:
            return GpuRequirements(gpu_count=1, gpu_fraction=rng.choice((0.1, 0.25, 0.5, 0.9)))
        gpu_count, model = rng.choice((1, 1, 1, 1, 2, 4)), rng.choice(_MODELS)
        # Some jobs accept a second model; drawn from a separate generator to keep recorded seeds stable.
        second = random.Random(f"{len(self.requests)}/{model}").choice((None, None, "T4", "L4"))
        if model is None or second in (None, model):
            return GpuRequirements(gpu_count=gpu_count, gpu_type=model)
        return GpuRequirements(gpu_count=gpu_count, gpu_type=(model, second))

    def _invalid(self, request: JobRequested) -> JobRequested:
        invalid_fields: tuple[dict[str, Any], ...] = (
            {"members": 0},
            {"members": 2, "min_members": 3},
            {"gpu_requirements": GpuRequirements(gpu_count=-1)},
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type="abacus")},
            {"gpu_requirements": GpuRequirements(gpu_count=999)},
            {"priority": "now!"},
            {"max_duration_hours": -3.0},
            {"job_id": JobId("No Such Name!")},
            {"job_id": JobId("work-1"), "members": 7},
        )
        return replace(request, **self._rng.choice(invalid_fields))

    def _submit(self, fact: Fact) -> None:
        self._count += 1
        fact_id = FactId(fact.condition() or derive_id("user", self._count))
        if isinstance(fact, JobRequested):
            self.requests.append((fact_id, fact))
        self._publish(Envelope(id=fact_id, source="/users", time=self._loop.now(), fact=fact))

    def _publish(self, envelope: Envelope) -> None:
        try:
            self._bus.publish(envelope)
        except TransientError:
            self._loop.call_later(RETRY_SECONDS, self._publish, envelope)


def _budget(request: JobRequested) -> float | None:
    """Return the job budget, for some a tight one; drawn from a separate generator to keep recorded seeds stable."""
    rng = random.Random(f"{request.job_id}/{request.run_seconds}/budget")
    gpu_count = request.gpu_requirements.gpu_count
    if request.budget_limit_usd is not None or request.run_seconds is None or rng.random() >= TIGHT_RATIO:
        return request.budget_limit_usd
    return round(max(0.01, gpu_count * request.members * request.run_seconds / 3600.0 * TIGHT_USD_PER_GPU_HOUR), 4)


# Programs that report demand, change it and stop; some never withdraw it.

SOURCES_COUNTS = (0, 0, 1, 2)
REPORT_SECONDS = (600.0, 5400.0)  # between two reports of a source
VALID_SECONDS = (300.0, 2400.0)
WANTED_COUNTS = (0, 1, 1, 2, None)


class DemandReporters:
    """All programs that report demand in a run."""

    def __init__(self, loop: VirtualLoop, bus: SimBus, rng: random.Random) -> None:
        self._loop = loop
        self._bus = bus
        self._rng = rng
        self._sources = [f"program-{number}" for number in range(rng.choice(SOURCES_COUNTS))]
        self._count = 0
        self._is_over = False

    def begin(self) -> None:
        for source in self._sources:
            self._next(source)

    def stop(self) -> None:
        self._is_over = True
        for source in self._sources:
            self._submit(source, 0)

    def _next(self, source: str) -> None:
        self._loop.call_later(self._rng.uniform(*REPORT_SECONDS), self._submit_next, source)

    def _submit_next(self, source: str) -> None:
        if not self._is_over:
            self._submit(source, self._rng.choice(WANTED_COUNTS))
            self._next(source)

    def _submit(self, source: str, count: int | None) -> None:
        """Report once; the report is lost while the broker is unavailable, as programs do not retry."""
        self._count += 1
        now = self._loop.now()
        report = DemandReported(
            source=source,
            shape=DemandShape(gpu_count=self._rng.choice((1, 2))),
            count=count,
            until=now + timedelta(seconds=self._rng.uniform(*VALID_SECONDS)),
        )
        fact_id = FactId(derive_id("asker", source, self._count))
        try:
            self._bus.publish(Envelope(id=fact_id, source=f"/{source}", time=now, fact=report))
        except TransientError:
            return
