"""Each alert of the chart fires when it should and stays silent otherwise, by promtool; its text can be followed."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.alerts.cases import CASES, Case, Series
from tests.alerts.programs import ALERT_TOOLS
from tests.chart.charting import CHART, SECRETS, VALUES, Json, helm, objects, of_kind

from gpu_autoscaler.runtime.metric_families import FAMILIES
from gpu_autoscaler_services.cli.main import app

pytestmark = pytest.mark.timeout(300)

# Release -> namespace and values: the default ones, and those of a cluster with three brokers under another full name.
RELEASES: Mapping[str, tuple[str, str | None]] = {
    "gpu-autoscaler": ("gpu-autoscaler-system", None),
    "blue": ("team-gpus", "cluster"),
}
ENABLED = "monitoring.prometheusRule.enabled=true,monitoring.serviceMonitor.enabled=true"
SELECTED = {"namespace", "release"}  # what the ServiceMonitor adds and every expression selects by


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool; skips the test if it is not built."""
    if not ALERT_TOOLS.folder().is_dir():
        pytest.skip(f"no promtool: {ALERT_TOOLS.missing() or 'it is not built yet'}; `make chart`")
    program = str(ALERT_TOOLS.folder() / "promtool")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=240, check=False)


@cache
def chart(release: str) -> tuple[Json, ...]:
    """Return the objects of the chart for this release."""
    namespace, values = RELEASES[release]
    chosen = ("--values", str(SECRETS), "--values", str(VALUES[values or "simulated"]))
    result = helm("template", release, str(CHART), "--namespace", namespace, *chosen, "--set", ENABLED)
    assert result.returncode == 0, result.stderr
    return tuple(objects(result.stdout))


def groups(release: str) -> list[Json]:
    """Return the groups of rules."""
    (rule,) = of_kind(chart(release), "PrometheusRule").values()
    found: list[Json] = rule["spec"]["groups"]
    return found


def alerts(release: str) -> dict[str, Json]:
    """Return the alerts by name."""
    return {rule["alert"]: rule for group in groups(release) for rule in group["rules"]}


def series_of(series: Series, namespace: str, release: str) -> Iterator[Mapping[str, str]]:
    """Yield the series as promtool reads them, scraped from this release."""
    for name, values in series.items():
        metric, _, labels = name.rstrip("}").partition("{")
        selected = f'namespace="{namespace}",release="{release}"'
        yield {"series": f"{metric}{{{selected},{labels}}}", "values": values}


def checks(release: str, *, is_swapped: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the tests of all alerts: alone, and beside another release in the opposite state."""
    namespace = RELEASES[release][0]
    # The same name elsewhere, and another release in the same namespace.
    others = (("elsewhere", release), (namespace, "green"))
    for name, rule in alerts(release).items():
        case = CASES[name]
        for silent in case.silent:
            states = ((case.fires, silent, True), (silent, case.fires, False))
            for own, other, is_firing in states:
                for beside in ((), others):
                    yield {
                        "name": f"{name}: {'fires' if is_firing else 'silent'} beside {beside}",
                        "interval": "1m",
                        "input_series": [
                            *series_of(own, namespace, release),
                            *(line for place in beside for line in series_of(other, *place)),
                        ],
                        "alert_rule_test": [
                            {
                                "eval_time": f"{case.minutes}m",
                                "alertname": name,
                                "exp_alerts": [_expected(rule, case, namespace, release)] * (is_firing != is_swapped),
                            }
                        ],
                    }


def _expected(rule: Json, case: Case, namespace: str, release: str) -> Json:
    return {
        "exp_labels": {**rule["labels"], "namespace": namespace, "release": release, **case.labels},
        "exp_annotations": rule["annotations"],
    }


def written(folder: Path, release: str, tests: list[dict[str, Any]]) -> tuple[Path, Path]:
    """Write the rules of the release and these tests; return their files."""
    rules, file = folder / "rules.yaml", folder / "tests.yaml"
    rules.write_text(yaml.safe_dump({"groups": groups(release)}), encoding="utf-8")
    content = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return rules, file


def test_every_alert_has_a_case_that_fires_and_one_that_stays_silent() -> None:
    """An alert without both fails here, and so does a case without an alert."""
    assert set(alerts("blue")) == set(CASES)
    assert all(case.fires and case.silent for case in CASES.values())


@pytest.mark.parametrize("release", RELEASES)
def test_every_alert_fires_and_stays_silent(tmp_path: Path, release: str) -> None:
    """Whatever another release in the cluster does: it neither hides an alert of this one nor raises it."""
    rules, file = written(tmp_path, release, list(checks(release)))
    checked = promtool("check", "rules", "--lint-fatal", str(rules))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"SUCCESS: {len(CASES)} rules found" in checked.stdout
    tested = promtool("test", "rules", str(file))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_case_fails_with_the_opposite_expectation(tmp_path: Path) -> None:
    """So that none of them passes whatever the alert does."""
    tests = list(checks("blue", is_swapped=True))
    _, file = written(tmp_path, "blue", tests)
    tested = promtool("test", "rules", str(file))
    assert tested.returncode != 0
    output = tested.stdout + tested.stderr
    assert [test["name"] for test in tests if test["name"] not in output] == []


def _labels_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    for metric, matchers in re.findall(r"\b((?:gpu_autoscaler|dcgm)_\w+)\{([^}]*)\}", expression):
        yield metric, set(re.findall(r"(\w+)(?==|!=|=~|!~)", matchers))


@pytest.mark.parametrize("name", CASES)
def test_an_alert_selects_its_release_and_uses_exported_metrics(name: str) -> None:
    """Every metric of an expression exists, with its labels, and is selected by namespace and release."""
    labels = {
        f"{family.full_name}{'_total' if family.kind == 'counter' else ''}": set(family.labels) for family in FAMILIES
    }
    rule = alerts("blue")[name]
    expression = rule["expr"]
    named = dict(_labels_in(expression))
    assert set(re.findall(r"\b(?:gpu_autoscaler|dcgm)_\w+", expression)) == set(named)
    for metric, selected in named.items():
        assert metric in labels
        assert SELECTED <= selected <= SELECTED | labels[metric]
    assert 'namespace="team-gpus",release="blue"' in expression
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_an_alert_can_be_followed(name: str) -> None:
    """Commands are accepted by our command line, or name an object of the chart, as do the other texts."""
    rule = alerts("blue")[name]
    assert set(rule["annotations"]) == {"summary", "description"}
    text = rule["annotations"]["description"]
    workloads = {
        f"{document['kind'].lower()}/{document['metadata']['name']}" for document in chart("blue")
        if document["kind"] in {"Deployment", "StatefulSet", "DaemonSet"}
    }  # fmt: skip
    assert set(re.findall(r"\b(?:deployment|statefulset|daemonset)/[\w-]+", text)) <= workloads
    for command in re.findall(r"`([^`]+)`", text):
        program, *arguments = command.split()
        if program == "kubectl":
            assert arguments[:2] == ["-n", "team-gpus"], command
            assert arguments[2] == "logs", command
        else:
            assert program == "gpu-autoscaler", command
            app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert not re.search(r"\b(gpu-autoscaler|kubectl) ", re.sub(r"`[^`]+`", "", text)), "a command without quotes"


def test_a_wrong_command_would_be_noticed() -> None:
    """The parser refuses unknown commands, options and missing arguments."""
    for arguments in (["frobnicate"], ["dead-letters", "frobnicate"], ["why", "pod"], ["budget", "--frobnicate"]):
        with pytest.raises(Exception, match=r"(?i)unknown|requires|invalid|missing|unused"):
            app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_the_service_monitor_adds_the_labels_that_alerts_select_by() -> None:
    """The release, from the label of the pods; the namespace is added by the Prometheus operator itself."""
    (monitor,) = of_kind(chart("blue"), "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    added = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"] if "targetLabel" in rule}
    assert added == {"release": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]}
    for workload in of_kind(chart("blue"), "Deployment").values():
        assert workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/instance"] == "blue"
