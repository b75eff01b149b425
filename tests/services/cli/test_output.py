"""Tables for people, and the help of commands."""

import pytest

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.cli.output import Columns, Output, show, usd

COLUMNS: Columns = (
    ("NAME", lambda row: row["name"]),
    ("ZONE", lambda row: row["zone"]),
    ("REASON", lambda row: row["reason"]),
)
ROW = {"name": "node-" + "n" * 30, "zone": "zone-a", "reason": "Waits for capacity that is expected soon in this zone."}


def _show(*rows: dict[str, str], output: Output = "table") -> None:
    show(list(rows), rows, COLUMNS, lambda row: str(row["name"]), output, wide=("ZONE",))


def _terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


def test_a_terminal_wraps_the_last_column_and_truncates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names stay whole at 80 columns; where too little is left for the last column, its lines run on."""
    _terminal(monkeypatch, 80)
    _show(ROW)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) <= 80 for line in lines] == [True] * len(lines)
    assert lines[1].startswith(f"{ROW['name']}  Waits for")
    assert " ".join(" ".join(lines[1:]).split()) == f"{ROW['name']}  {ROW['reason']}".replace("  ", " ")

    _terminal(monkeypatch, 50)
    _show(ROW)
    assert capsys.readouterr().out.splitlines()[1] == f"{ROW['name']}  {ROW['reason']}"


def test_a_piped_row_is_one_line_and_wide_adds_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, and also where a value has several lines."""
    _show({**ROW, "reason": "first\nsecond"}, output="wide")
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "ZONE", "REASON"]
    assert row.split() == [ROW["name"], "zone-a", "first", "second"]
    assert row.index("zone-a") == header.index("ZONE")


def test_instants_are_shown_to_the_second(capsys: pytest.CaptureFixture[str]) -> None:
    """In UTC, and a truth value as JSON and kubectl write it."""
    _show({"name": "2026-11-28T06:07:48.924780Z", "zone": "", "reason": "until 2026-11-28T06:07:48+00:00"})
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "2026-11-28T06:07:48Z", "until", "2026-11-28T06:07:48Z"
    ]  # fmt: skip
    show([], [{"on": True}], (("", lambda row: row["on"]),), lambda _: "", "table")
    assert capsys.readouterr().out == "true\n"


def test_an_empty_table_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr: a program that reads stdout gets no header."""
    _show()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no resources found\n")


def test_cents_are_enough_above_a_dollar() -> None:
    """Prices of spot capacity have four digits."""
    assert [usd(amount) for amount in (None, 0, 263_200, 32_770_000, 1_234_567_890_000)] == [
        "-", "$0.00", "$0.2632", "$32.77", "$1,234,567.89"
    ]  # fmt: skip


def test_help_shows_the_examples_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the other commands of its group are in the help of the group; a switch has no default."""
    assert run(["jobs", "logs", "--help"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "gpu-autoscaler jobs logs train -f --tail 100" in shown
    assert "jobs submit" not in shown
    assert "[default: False]" not in shown
    assert run(["jobs", "--help"]) == Exit.OK
    assert "gpu-autoscaler jobs submit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["freeze", "--reason", "a", "--for", "30"], "--for: '30' is not a duration; examples: 90m, 2h"),
        (["jobs", "wait", "j1", "--timeout", "soon"], "--timeout: 'soon' is not a duration; examples: 90m, 2h"),
        (["jobs", "submit", "--name", "a"], "missing: --project, --gpus; give them, or a request with --file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_are_checked_before_a_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokens: list[str], message: str
) -> None:
    """Without a gateway, with the name of the option."""
    monkeypatch.setenv("COLUMNS", "120")
    assert run(tokens) == Exit.USAGE
    assert message in capsys.readouterr().err
