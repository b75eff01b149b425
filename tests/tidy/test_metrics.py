"""Each metric family has an owner, and the table of owners agrees with the services."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.tidy.published import exported_by

from gpu_autoscaler.contracts.metrics_page import metrics_page
from gpu_autoscaler.providers.aws import translate as aws
from gpu_autoscaler.providers.azure import translate as azure
from gpu_autoscaler.providers.gcp import translate as gcp
from gpu_autoscaler.providers.karpenter import translate as karpenter
from gpu_autoscaler.runtime import metric_families
from gpu_autoscaler.runtime.metric_families import EVERY, FAMILIES, LABELS, REFUSAL_CODES, families_of
from gpu_autoscaler.simcluster.cloud import REFUSALS
from gpu_autoscaler_services.registry import NAMES, specs
from gpu_autoscaler_services.service_spec import ServiceSpec

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = tuple((spec.name, process.role) for spec in specs() for process in spec.processes)


def _names(chosen: Iterable[ServiceSpec]) -> set[str]:
    return {spec.name for spec in chosen}


GROUPS = {
    "CONSUMING": _names(spec for spec in specs() if spec.service.consumes),
    "FOLDING": _names(spec for spec in specs() if spec.service.folds),
    "PUBLISHING": _names(spec for spec in specs() if spec.service.publishes),
    "RESYNCING": _names(spec for spec in specs() if hasattr(spec.service, "resyncs")),
    "TICKING": _names(spec for spec in specs() if spec.service.tick_seconds is not None),
    "LEASED": _names(spec for spec in specs() if spec.has_lease),
    "WITH_POLICY_FILE": {
        spec.name if len(spec.processes) == 1 else f"{spec.name}/{process.role}"
        for spec in specs()
        for process in spec.processes
        if "policy" in process.uses
    },
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_services_are_those_that_declare_it(name: str) -> None:
    """A service that begins to consume, to fold or to tick exports the families about it."""
    assert set(getattr(metric_families, name)) == GROUPS[name]


def test_every_family_has_owners_that_exist() -> None:
    """Names are unique, labels from the closed list, owners services of the registry or a role of them."""
    assert len({family.full_name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert set(family.labels) <= LABELS | {"version", "python"}, family.name
        if family.owners != EVERY:
            assert {owner.partition("/")[0] for owner in family.owners} <= set(NAMES), family.name


@pytest.mark.parametrize(("service", "role"), PROCESSES)
def test_every_process_exports_the_families_that_it_owns_and_no_other(service: str, role: str | None) -> None:
    """The active process, after a tick."""
    owned = {family.full_name for family in families_of(service, role)}
    assert {family.name for family in exported_by(service, role)} == owned


def test_every_family_is_exported_by_some_process() -> None:
    """No row of the table is without a process."""
    exported = {family.name for process in PROCESSES for family in exported_by(*process)}
    assert exported == {family.full_name for family in FAMILIES}


def test_a_family_about_the_cluster_has_one_owner() -> None:
    """Only families about the process itself are exported by several services."""
    about_the_process = {
        "build_info", "ready", "bus_connected",
            "bus_stock_parser", "loop_restarts", "ticks", "facts_handled", "handle_seconds",
        "facts_published", "facts_resynced", "facts_folded", "facts_dated_ahead", "consumer_lag", "dead_letters",
        "snapshots", "snapshots_refused", "policy_changes", "policy_file_errors",
    }  # fmt: skip
    services = {
        family.name: {service for service in NAMES for role in (None, "central", "node", "nodes")
                      if family.is_exported_by(service, role)}
        for family in FAMILIES
    }  # fmt: skip
    assert {name for name, owners in services.items() if len(owners) > 1} == about_the_process


def test_refusal_codes_are_those_of_the_drivers() -> None:
    """Each code to which a driver gives a meaning, and each of our own, is counted by its name."""
    known = {*aws._REFUSED, *azure._REFUSED, *gcp._REFUSED, *karpenter._KNOWN_CODES, *REFUSALS}
    known |= {karpenter.INSUFFICIENT, karpenter.NOT_READY, "OperationNotAllowed", "Forbidden", "Invalid"}
    for path in sorted((ROOT / "libs/gpu_autoscaler/providers").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        known |= set(re.findall(r'code="([A-Z]\w+)"', text))
        for call in re.findall(r"misconfigured\((.*?)\n {8,16}\)", text, re.DOTALL):
            known |= set(re.findall(r'^\s+"([A-Z][A-Za-z]+)",$', call, re.MULTILINE))
            known |= set(re.findall(r'", "([A-Z][A-Za-z]+)"', call))
    assert known == set(REFUSAL_CODES)


def test_the_page_of_metrics_is_current() -> None:
    """`make schemas` writes it."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page(), "run `make schemas`"
