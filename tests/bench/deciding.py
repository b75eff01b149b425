"""V1: from a waiting pod to the launch decision for it, as a third process receives it, at 200 and at 2,000 pods/s.

The scaler is the real process, knows a thousand nodes with ten thousand pods, and has decided on some pods before. Each
pod needs a new node, and every decision is executed during the run. References: one request and its reply between two
processes on the same server beside each pod, the processor time of the plan with its check, made again from the facts,
at the median, and the median batching window, where one was open.

The stages come from the facts: publication of the pod, instant of its plan, publication of the plan. They show how much
longer a plan takes in the run, where its thread shares the interpreter with the execution of purchases.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from nats.aio.client import Client
from tests.bench.decision import ECHO, bought_for
from tests.bench.line import Line
from tests.bench.scaler_process import POLICY, Ground, cluster, envelopes, ground
from tests.support.stories import pod

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.events.scaling import ScalingPlanMade

PACES = ((200, 400), (2_000, 1_000))  # pods a second, pods
EARLY_COUNT = 20  # decided on before, so that no plan of the run is the first
DECIDED_SECONDS_MAX = 60.0
_LATE = "late-"  # begins the names of the pods that are measured
P50_RATIO_MAX, P99_RATIO_MAX = 2.0, 8.0
_HEAR = """
import asyncio, json, sys, time, nats
from tests.bench.decision import bought_for
async def main():
    seen, wanted = {}, int(sys.argv[2])
    done = asyncio.Event()
    connection = await nats.connect(sys.argv[1])
    async def hear(message):
        at = time.perf_counter()
        for key in bought_for(message.data):
            if key.startswith(sys.argv[4]):
                seen.setdefault(key, at)
        if len(seen) >= wanted:
            done.set()
    await connection.subscribe("scaling.plan_made", cb=hear)
    await connection.flush()
    print("ready", flush=True)
    await asyncio.wait_for(done.wait(), float(sys.argv[3]))
    print(json.dumps(seen), flush=True)
asyncio.run(main())
"""


def measure() -> list[Line]:
    """Two paces, each on a fresh cluster."""
    lines: list[Line] = []
    for pace, count in PACES:
        with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lines += runner.run(_measure(Path(folder), pace, count))
    return lines


async def _measure(folder: Path, pace: int, count: int) -> list[Line]:
    async with ground(folder) as here:
        offers = await here.offers()
        sized = max(offers, key=lambda offer: (offer.resources.gpu_count, offer.key))
        await here.say(cluster(offers, datetime.now(UTC), sized=sized))
        async with here.scaler() as scaler:
            await _decided(here, "early-", pace, EARLY_COUNT, gpus=sized.resources.gpu_count)
            before = scaler.processor_seconds()
            decided, echoes = await _decided(here, _LATE, pace, count, gpus=sized.resources.gpu_count)
            spent = scaler.processor_seconds() - before
            figures = await scaler.figures()
        recorded = await _recorded(here)
    case = f"V1 {pace}/s"
    stages = _stages(case, decided, recorded)
    plans = _plans_again(recorded)
    echo, planned = statistics.median(echoes), statistics.median(plans)
    seconds = sorted(each.seen_at - each.asked_at for each in decided.values())
    windows = figures.get("gpu_autoscaler_quiet_seconds_count", 0.0)
    quiet = figures.get("gpu_autoscaler_quiet_seconds_sum", 0.0) / windows if windows else 0.0
    allowed = echo + planned + quiet
    p50, p99 = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
    parts = f"echo {echo * 1e3:.2g} + plan {planned * 1e3:.3g} + window {quiet * 1e3:.2g} ms"
    return [
        Line(case=f"{case} p50", value=p50 * 1e3, unit="ms", against=f"{count} pods, each to a node of its own"),
        Line(case=f"{case} p99", value=p99 * 1e3, unit="ms", against=f"{count} pods, each to a node of its own"),
        *stages,
        Line(
            case=f"{case} processor", value=spent * 1e3 / len(plans), unit="ms",
            against=f"all of the scaler's, for each of {len(plans)} plans; plan and check alone {planned * 1e3:.3g} ms",
        ),
        Line(
            case=case, value=p50 / allowed, unit="x", against=f"p50: {parts}",
            target=f"<= {P50_RATIO_MAX}", met=p50 / allowed <= P50_RATIO_MAX,
        ),
        Line(
            case=f"{case} tail", value=p99 / allowed, unit="x", against=f"p99: {parts}",
            target=f"<= {P99_RATIO_MAX}", met=p99 / allowed <= P99_RATIO_MAX,
        ),
    ]  # fmt: skip


class Decided(msgspec.Struct, frozen=True):
    """One pod; seconds since 1970."""

    asked_at: float
    seen_at: float


def _stages(case: str, decided: dict[str, Decided], recorded: list[Recorded]) -> list[Line]:
    """Medians of three stages: pod until plan start, plan start until published, published until read by the third
    process."""
    made = {
        key: one
        for one in reversed(recorded)
        if isinstance(one.fact, ScalingPlanMade)
        for key in bought_for(encode(one.envelope))
    }
    waited, decided_for, carried = [], [], []
    for key, each in decided.items():
        plan_made = made[key]
        assert isinstance(plan_made.fact, ScalingPlanMade)
        as_of, said_at = plan_made.fact.plan.as_of.timestamp(), plan_made.envelope.time.timestamp()
        waited.append(as_of - each.asked_at)
        decided_for.append(said_at - as_of)
        carried.append(each.seen_at - said_at)
    parts = (
        ("waits", waited, "until its plan begins: stored, folded, the plan before"),
        ("decides", decided_for, "the plan, and the plan check"),
        ("carried", carried, "the plan stored, and read by the third process"),
    )
    return [
        Line(case=f"{case} {name}", value=statistics.median(seconds) * 1e3, unit="ms", against=what)
        for name, seconds, what in parts
    ]


async def _decided(
    here: Ground, name: str, pace: int, count: int, *, gpus: int
) -> tuple[dict[str, Decided], list[float]]:
    """Publish one pod after the other at this pace; when each was, and when it was seen that it is bought for.

    Beside each pod a request is sent; returns also how long each of their replies took.
    """
    url = here.server.url
    arguments = (url, str(count), str(DECIDED_SECONDS_MAX), f"pod/uid-{name}")
    async with _helper(_HEAR, *arguments) as listener, _helper(ECHO, url):
        connection = Client()
        await connection.connect(url)
        asked: dict[str, float] = {}
        echoes: list[float] = []

        async def ask() -> None:
            began = time.perf_counter()
            await connection.request("bench.echo", b"x" * 300, timeout=DECIDED_SECONDS_MAX)
            echoes.append(time.perf_counter() - began)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / pace - time.perf_counter()))
                (one,) = envelopes(pod(f"{name}{number}", gpus=gpus, at=datetime.now(UTC)))
                message = encode(msgspec.structs.replace(one, id=f"{name}{number}"))
                asked[f"pod/uid-{name}{number}"] = time.perf_counter()
                await connection.publish("pod.observed", message, headers={"Nats-Msg-Id": f"{name}{number}"})
                group.create_task(ask())
        seen = json.loads((await listener.communicate())[0] or "{}")
        await connection.close()
    assert seen.keys() == asked.keys(), f"{len(seen.keys() & asked.keys())} of {count} were decided on"
    since_1970 = time.time() - time.perf_counter()  # which counts the same in all processes
    return {key: Decided(at + since_1970, seen[key] + since_1970) for key, at in asked.items()}, echoes


@asynccontextmanager
async def _helper(program: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has said that it is ready; ended afterwards."""
    command = (sys.executable, "-c", program, *arguments)
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert running.stdout is not None
        await running.stdout.readline()
        yield running
    finally:
        if running.returncode is None:
            running.terminate()
        await running.wait()


async def _recorded(here: Ground) -> list[Recorded]:
    """All facts, in the order of their times."""
    recorded: list[Recorded] = []
    for stream in ("NODE", "POD", "SPOT", "SCALING"):
        last = await here.bus.last_sequence(stream)
        if not last:
            continue
        async for batch in await here.bus.projection(stream):
            recorded += [
                Recorded(envelope=FACT_CATALOG.decode(one.payload), stream=stream, sequence=one.sequence)
                for one in batch
            ]
            if batch[-1].sequence >= last:
                break
    return sorted(recorded, key=lambda one: one.envelope.time)


def _plans_again(recorded: list[Recorded]) -> list[float]:
    """Processor time of each plan that buys for measured pods, with its check, made again from what was known before.

    One after the other as they were: a plan that follows another reads less than one that follows nothing.
    """
    policy = msgspec.toml.decode(POLICY.encode(), type=ScalingPolicy)
    state: ClusterState = EMPTY_STATE
    folded_count, plans = 0, list[float]()
    for number, one in enumerate(recorded):
        if isinstance(one.fact, ScalingPlanMade) and one.fact.plan.decisions:
            state = fold(state, recorded[folded_count:number])
            folded_count = number
            began = time.process_time()
            check(plan(state, policy, one.envelope.time), state, policy)
            if any(key.startswith(f"pod/uid-{_LATE}") for key in bought_for(encode(one.envelope))):
                plans.append(time.process_time() - began)
    return plans
