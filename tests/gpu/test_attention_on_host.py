"""Attention's kernel source on the host, with fibers for threads (on_host/). Needs g++ 12 or later, and no GPU."""

import pathlib
import platform
import shutil
import subprocess

import pytest

FOLDER = pathlib.Path(__file__).parent / "on_host"
SOURCE = pathlib.Path(__file__).parents[2] / "cuda_src" / "src"
QUICK = ["2", "8", "10", "12", "16", "17", "22", "25"]  # of check_attention.cc's cases


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The check, compiled."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ (any machine)")
    path = tmp_path_factory.mktemp("on_host") / "check_attention"
    # Shared memory is thread_local: its address is what is wanted, not a function that makes it.
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-extern-tls-init", "-w"]
    if platform.machine() == "x86_64":
        flags += ["-mf16c", "-mfma"]
    command = [compiler, *flags, f"-I{FOLDER}", f"-I{SOURCE}", *map(str, FOLDER.glob("*.cc")), "-o", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in made.stderr:
        pytest.skip("needs a compiler with _Float16: gcc 12 or later (any machine)")
    assert made.returncode == 0, made.stderr
    return path


def run(program: pathlib.Path, cases: list[str]) -> None:
    """Run cases of the check; all that is wrong is in what it prints."""
    done = subprocess.run([str(program), *cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_attention_near_float64_and_bytes_equal(program: pathlib.Path) -> None:
    """Heads of 64, 80, 96 and 128, groups, a window: float64, and equal bytes by every way there is."""
    run(program, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_attention_in_all_cases(program: pathlib.Path) -> None:
    """The same for every case: several splits, heads of 256, groups of 24."""
    run(program, [])
