"""Sources of the control plane's programs, and the errors when one is unavailable."""

import contextlib
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.controlplane import plane, programs, recipes
from tests.controlplane.programs import CONTROL_PLANE


def old_go(folder: Path) -> None:
    """A Go of years ago, on a PATH of its own."""
    (folder / "go").write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n", encoding="utf-8")
    (folder / "go").chmod(0o755)


@pytest.mark.parametrize(
    ("go", "said"), [("none", r"no Go \(1\.26 or newer\)"), ("old", r"go version go1\.19\.8 .*is too old")]
)
def test_without_a_go_that_can_build_it_the_tests_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go: str, said: str
) -> None:
    """A skip names what is missing and the command that helps."""
    if go == "old":
        old_go(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if go == "old" else str(tmp_path))
    monkeypatch.setattr(recipes, "CACHE", tmp_path / "cache")

    with pytest.raises(pytest.skip.Exception, match=f"no Kubernetes control plane: {said}.*`make controlplane`"):
        plane.needed_programs()


def test_what_is_built_is_found_again_by_its_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call only looks, without Go at all; other pins are another folder."""
    monkeypatch.setattr(recipes, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", "")
    CONTROL_PLANE.folder().mkdir(parents=True)

    assert CONTROL_PLANE.build() == CONTROL_PLANE.folder() == plane.needed_programs()
    other = msgspec.structs.replace(CONTROL_PLANE, module=tmp_path)
    for name in ("go.mod", "go.sum"):
        (tmp_path / name).write_text("k8s.io/kubernetes v1.99.0\n", encoding="utf-8")
    assert not other.folder().is_dir()


def test_the_pinned_version_is_passed_to_the_linker() -> None:
    """Without it the server would report v0.0.0-master, and clients trust the reported version."""
    major, minor, _ = programs.version().removeprefix("v").split(".")

    assert f"gitVersion={programs.version()} " in programs.link_flags() + " "
    assert f"gitMajor={major} " in programs.link_flags()
    assert f"gitMinor={minor} " in programs.link_flags() + " "


def failing_go(folder: Path, *, times: int) -> None:
    """A Go that cannot fetch a module a few times, as behind a busy proxy, and then builds an empty program."""
    (folder / "go").write_text(
        f"""#!/bin/sh
echo try >> {folder}/tries
[ "$(wc -l < {folder}/tries)" -gt {times} ] || exit 1
while [ "$1" != -o ]; do shift; done
: > "$2"
""",
        encoding="utf-8",
    )
    (folder / "go").chmod(0o755)


@pytest.mark.parametrize(("times", "is_built"), [(3, True), (4, False)])
def test_a_module_that_could_not_be_fetched_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, times: int, is_built: bool
) -> None:
    """A few times; what still fails is an error, and no folder that looks whole is left."""
    failing_go(tmp_path, times=times)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(recipes, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(recipes, "_PAUSE_SECONDS", 0.0)
    recipe = msgspec.structs.replace(CONTROL_PLANE, programs={"one": "example.org/one"}, link_flags=str)

    with contextlib.nullcontext() if is_built else pytest.raises(subprocess.CalledProcessError):
        assert (recipe.build() / "one").is_file()
    assert recipe.folder().is_dir() is is_built
