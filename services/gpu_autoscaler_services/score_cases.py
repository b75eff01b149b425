"""Cases of `make score`: one system in one scenario; their scores, kept by what they depend on."""

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import msgspec
import structlog

import gpu_autoscaler
import gpu_autoscaler_services
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.sim.scoring import traces
from gpu_autoscaler.sim.scoring.baselines.cluster_autoscaler import ClusterAutoscaler
from gpu_autoscaler.sim.scoring.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.scoring.baselines.known_demand import FixedFleet, score_omniscient, sized_for
from gpu_autoscaler.sim.scoring.baselines.observation import Baseline
from gpu_autoscaler.sim.scoring.baselines.offline import OFFLINE, score_offline
from gpu_autoscaler.sim.scoring.baselines.utilization import UtilizationOnly, groups_for
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.ours import (
    OURS,
    PLAIN_PODS,
    VARIANTS,
    WITHOUT_LEVER,
    WITHOUT_SAVE_REQUESTS,
    score_ours,
    score_plain_pods,
    score_without_lever,
    score_without_save_requests,
)
from gpu_autoscaler.sim.scoring.runner import score_baseline
from gpu_autoscaler.sim.scoring.scenario import Scenario, bursts, steady
from gpu_autoscaler_services.scheduler.manifest import job_manifest
from gpu_autoscaler_services.simulation import ROLES

TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
KEPT = Path("out/scores")
CRITICAL = 50  # services log every refusal; the score holds what matters

CHECKPOINTS = "bamboo-checkpoints"
MakeScenario = Callable[[int, float], Scenario]
WORLDS: dict[str, MakeScenario] = {
    "steady": steady,
    "bursts": bursts,
    "openb": partial(traces.openb, TRACES),
    "philly": partial(traces.philly, TRACES),
    "bamboo": partial(traces.bamboo, TRACES),
    CHECKPOINTS: partial(traces.bamboo_checkpoints, TRACES),
}
BASELINES: dict[str, Callable[[Scenario], Baseline]] = {
    "fixed": lambda scenario: FixedFleet(sized_for(scenario)),
    "utilization": lambda scenario: UtilizationOnly(groups_for(scenario)),
    "cluster-autoscaler": lambda _: ClusterAutoscaler(),
    "karpenter": lambda _: Karpenter(),
}
OMNISCIENT = "omniscient"
SYSTEMS = (OURS, PLAIN_PODS, *BASELINES, OMNISCIENT)

_PACKAGES = {module.__name__: Path(str(module.__file__)).parent for module in (gpu_autoscaler, gpu_autoscaler_services)}
_SCORING = "gpu_autoscaler.sim.scoring"
_OF_ALL = (f"{_SCORING}.runner", f"{_SCORING}.baselines.known_demand", "gpu_autoscaler_services.scheduler.manifest")
CODE_OF_OURS = (*_OF_ALL, f"{_SCORING}.ours", "gpu_autoscaler_services.simulation")
CODE_OF_BASELINES = (
    *_OF_ALL,
    *(f"{_SCORING}.baselines.{name}" for name in ("cluster_autoscaler", "karpenter", "utilization")),
)
CODE_OF_OFFLINE = (f"{_SCORING}.baselines.offline",)


class Case(msgspec.Struct, frozen=True):
    """One system in one scenario."""

    world: str
    system: str
    seed: int
    hours: float


def systems_of(world: str) -> tuple[str, ...]:
    """Return the systems scored in this scenario; where all work checkpoints, also ours without checkpoint requests."""
    return (OURS, PLAIN_PODS, WITHOUT_SAVE_REQUESTS, *SYSTEMS[2:]) if world == CHECKPOINTS else SYSTEMS


def score(case: Case) -> Score:
    """Return the score of one case. Equal cases and code give equal scores."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    scenario = WORLDS[case.world](case.seed, case.hours)
    if case.system == OURS:
        return score_ours(scenario, ROLES)
    if case.system == PLAIN_PODS:
        return score_plain_pods(scenario, ROLES, _manifest)
    if case.system == WITHOUT_SAVE_REQUESTS:
        return score_without_save_requests(scenario, ROLES)
    if case.system in WITHOUT_LEVER:
        return score_without_lever(scenario, ROLES, case.system)
    if case.system == OFFLINE:
        return score_offline(scenario)
    if case.system == OMNISCIENT:
        return score_omniscient(scenario)
    return score_baseline(scenario, BASELINES[case.system](scenario), _manifest)


def _manifest(spec: JobSpec) -> dict[str, object]:
    return job_manifest(spec, EMPTY_STATE)


# ---- kept scores


def kept_score(case: Case) -> Score | None:
    """Return the kept score of the case; None: it was not scored, or what it depends on has changed."""
    try:
        return msgspec.json.decode(_kept_file(case).read_bytes(), type=Score)
    except (OSError, msgspec.DecodeError):
        return None


def keep_score(case: Case, result: Score) -> None:
    """Keep the score until the scenario, or the code that the case runs, changes."""
    path = _kept_file(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")  # moved into place whole: a command may be stopped at any time
    written.write_bytes(msgspec.json.encode(result))
    written.replace(path)


def _kept_file(case: Case) -> Path:
    scenario = msgspec.json.encode(WORLDS[case.world](case.seed, case.hours))
    is_ours = case.system in (OURS, *VARIANTS)
    code = code_digest(CODE_OF_OFFLINE if case.system == OFFLINE else CODE_OF_OURS if is_ours else CODE_OF_BASELINES)
    digest = hashlib.blake2b(f"{case.system}\0{code}\0".encode() + scenario, digest_size=16).hexdigest()
    return KEPT / f"{case.world}-{case.seed}-{digest}.json"


@cache
def code_digest(modules: tuple[str, ...]) -> str:
    """Return 32 hex digits over these modules, all that they import of our packages, and the version of Python."""
    digest = hashlib.blake2b(repr(sys.version_info[:2]).encode(), digest_size=16)
    for name, source in sorted(sources_of(modules).items()):
        digest.update(b"%b\0%d\0%b" % (name.encode(), len(source), source))
    return digest.hexdigest()


def sources_of(modules: Iterable[str]) -> dict[str, bytes]:
    """Return the sources of these modules and of all that they import of our packages, by name of the module."""
    found: dict[str, bytes] = {}
    open_names = list(modules)
    while open_names:
        name = open_names.pop()
        path = _path_of(name)
        if path is not None and name not in found:
            found[name] = path.read_bytes()
            open_names += _imported(found[name])
    return found


def _imported(source: bytes) -> Iterator[str]:
    """Yield the names of modules that the source imports, and of packages around them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path_of(name: str) -> Path | None:
    """Return the file of a module of our packages; None: it is none, as names of classes are not."""
    package, *parts = name.split(".")
    if package not in _PACKAGES:
        return None
    path = _PACKAGES[package].joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((candidate for candidate in candidates if candidate.is_file()), None)
