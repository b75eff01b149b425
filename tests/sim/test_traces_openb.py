"""A trace is read correctly, and a malformed one is reported with file and line."""

import gzip
import os
from pathlib import Path

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.sim.scoring.traces import as_request, find_pod_list, read_pods

HEAD = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
GOOD = "p-0,12000,16384,1,460,LS,Running,10,70,10\n"
TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))


def write(folder: Path, *lines: str) -> Path:
    """Write a pod list with these lines."""
    path = folder / "openb_pod_list_default.csv"
    path.write_text(HEAD + "".join(lines))
    return path


def test_shares_are_rounded_up_to_a_gpu(tmp_path: Path) -> None:
    """A GPU fraction counts as one GPU."""
    (pod,) = read_pods(write(tmp_path, GOOD), 1)
    assert (pod.gpu_count, pod.cpu_milli, pod.duration_seconds) == (1, 12000, 60)


def test_the_last_pods_by_creation_time_are_read(tmp_path: Path) -> None:
    """The order in the file does not matter."""
    path = write(tmp_path, "b,1,1,1,1000,LS,Running,30,40,30\n", "a,1,1,1,1000,LS,Running,20,40,20\n", GOOD)
    assert [pod.name for pod in read_pods(path, 2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("p-1,many,1,1,1000,LS,Running,10,70,10\n", "cpu_milli"),
        ("p-1,1,1,1,1000,LS,Running,70,10,10\n", "before"),
        ("p-1,1,-5,1,1000,LS,Running,10,70,10\n", "memory_mib"),
        ("p-1,1,1,1\n", "argument"),
        (",1,1,1,1000,LS,Running,10,70,10\n", "name"),
        ("p-1,nan,1,1,1000,LS,Running,10,70,10\n", "cpu_milli"),
    ],
)
def test_a_malformed_line_is_reported(tmp_path: Path, line: str, word: str) -> None:
    """The message has file, line and column."""
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError, match=rf"{path.name}:3[\s\S]*{word}"):
        read_pods(path, 1)


def test_a_missing_column_is_reported(tmp_path: Path) -> None:
    """A file of another format is rejected as a whole."""
    path = tmp_path / "pods.csv"
    path.write_text("name,cpu\nx,1\n")
    with pytest.raises(ConfigError, match="cpu_milli"):
        read_pods(path, 1)


def test_too_few_pods_are_an_error(tmp_path: Path) -> None:
    """Requesting more pods than the trace has is an error, not a shorter run."""
    with pytest.raises(ConfigError, match="has 1 pods, 5 were requested"):
        read_pods(write(tmp_path, GOOD), 5)


def test_a_trace_is_found_by_folder_file_and_kind(tmp_path: Path) -> None:
    """Common spellings work; a missing list is reported with the searched paths."""
    path = write(tmp_path, GOOD)
    assert find_pod_list(f"openb:{tmp_path}") == find_pod_list(str(path)) == path
    with pytest.raises(ConfigError, match="looked for"):
        find_pod_list(f"openb:{tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="known: openb"):
        find_pod_list("borg:/x")


def test_a_gzipped_list_is_read(tmp_path: Path) -> None:
    """Traces are published compressed."""
    path = tmp_path / "openb_pod_list_default.csv.gz"
    path.write_bytes(gzip.compress((HEAD + GOOD).encode()))
    assert len(read_pods(find_pod_list(f"openb:{tmp_path}"), 1)) == 1


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"openb trace: no folder {TRACES}; set GPU_AUTOSCALER_TRACES")
def test_the_real_trace_is_read() -> None:
    """The last 500 pods of openb become 500 different jobs."""
    pods = read_pods(find_pod_list(f"openb:{TRACES / 'openb-gpu-2023'}"), 500)
    requests = [as_request(pod, run_seconds=60, number=number) for number, pod in enumerate(pods)]
    assert len({request.job_id for request in requests}) == 500
    assert sum(request.gpu_requirements.gpu_count for request in requests) == 492
