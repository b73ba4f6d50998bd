"""scripts/setup_env.sh and run_tests.sh, with a stand-in for Python in a copy of the repository's shell."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.stand_in import REPO, FakePython


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the set-up needs, in a folder with a space in its name."""
    copy = tmp_path / "my titan"
    (copy / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "run_tests.sh", "scripts/setup_env.sh", "scripts/check_env.py"):
        shutil.copy(REPO / name, copy / name)
    return copy


def set_up(copy: Path, fake: FakePython, *extras: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = 'set -euo pipefail; REPO=$1; shift; . "$REPO/scripts/setup_env.sh"; setup_env "$@"; echo "$PYTHON"'
    return subprocess.run(
        ["bash", "-c", script, "x", str(copy), *extras],
        env={**fake.env, "FAKE_BARE": "1", **env}, cwd="/", capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_a_python_that_has_all_is_used_as_it_is(copy: Path, fake_python: FakePython) -> None:
    done = set_up(copy, fake_python, FAKE_BARE="")
    assert done.stdout == f"{fake_python.path}\n" and done.stderr == ""
    assert not (copy / ".venv").exists()


def test_the_environment_is_made_once(copy: Path, fake_python: FakePython) -> None:
    first = set_up(copy, fake_python, "test", "dev")
    assert first.stdout == f"{copy}/.venv/bin/python\n", first.stderr
    assert "Setting up" in first.stderr
    (install,) = fake_python.calls("-m|pip")
    assert f"|-c|{copy}/constraints.txt|-e|{copy}[test,dev]|" in install
    again = set_up(copy, fake_python, "test", "dev")
    fewer_extras = set_up(copy, fake_python)
    assert again.stdout == fewer_extras.stdout == first.stdout
    assert again.stderr == fewer_extras.stderr == ""
    assert len(fake_python.calls("-m|venv")) == len(fake_python.calls("-m|pip")) == 1


def test_new_requirements_or_extras_are_installed(copy: Path, fake_python: FakePython) -> None:
    set_up(copy, fake_python)
    set_up(copy, fake_python, "test")
    with (copy / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    set_up(copy, fake_python, "test")
    assert len(fake_python.calls("-m|pip")) == 3


def test_a_failed_installation_is_said_and_done_again(copy: Path, fake_python: FakePython) -> None:
    failed = set_up(copy, fake_python, FAKE_PIP="1")
    assert failed.returncode != 0 and failed.stdout == ""
    assert "set-up failed" in failed.stderr
    assert set_up(copy, fake_python).returncode == 0
    assert len(fake_python.calls("-m|pip")) == 2


def test_an_unsupported_python_is_refused(copy: Path, fake_python: FakePython) -> None:
    done = set_up(copy, fake_python, FAKE_UNSUPPORTED="1")
    assert done.returncode != 0
    assert "no Python 3.10 to 3.13" in done.stderr and str(fake_python.path) in done.stderr
    assert not (copy / ".venv").exists()


@pytest.mark.parametrize(
    ("args", "env", "expected"),
    [
        (["-k", "a b"], {}, "-m|pytest|-m|not slow|-k|a b|"),
        (["--all", "tests/x"], {}, "-m|pytest|tests/x|"),
        ([], {}, "-m|pytest|-m|not slow|-n|2|--dist|loadfile|--no-loadscope-reorder|"),
        (["tests/x"], {"OMP_NUM_THREADS": "2"}, "-m|pytest|-m|not slow|tests/x|"),
        ([], {"CI": "true"}, "-m|pytest|-n|2|--dist|loadfile|--no-loadscope-reorder|"),
    ],
)
def test_run_tests_is_fast_unless_asked(
    copy: Path, fake_python: FakePython, args: list[str], env: dict[str, str], expected: str
) -> None:
    subprocess.run([copy / "run_tests.sh", *args], env={**fake_python.env, **env}, check=True, timeout=30)
    assert fake_python.calls("pytest|") == [f"{expected}NPROC= OMP={env.get('OMP_NUM_THREADS', '1')}"]


@pytest.mark.parametrize(
    ("requirement", "found"),
    [("pytest>=1.0", True), ("pytest>=999.1", False), ("no-such-thing>=1.0", False)],
)
def test_check_env_compares_lowest_versions(tmp_path: Path, requirement: str, found: bool) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(f'dependencies = [\n    "{requirement}",  # why\n]\n')
    done = subprocess.run(
        [sys.executable, REPO / "scripts/check_env.py", pyproject], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode == 0) == found
    assert done.stdout == (f"{sys.executable}\n" if found else "")


def test_check_env_reads_every_dependency_of_the_project() -> None:
    sys.path.insert(0, str(REPO / "scripts"))
    import check_env

    text = (REPO / "pyproject.toml").read_text()
    names = [name for name, _ in check_env.requirements(text, ["prepare", "test", "dev"])]
    assert len(names) == text.count(">=") - 2, "all but setuptools and requires-python"
    assert {"torch", "tomli_w", "pytest-timeout", "matplotlib"} <= set(names)
    pinned = {line.split("==")[0] for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line}
    assert pinned == set(names)
