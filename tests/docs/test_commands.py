"""The commands of the documentation work: every ```bash block of the README and of docs/ is run.

Blocks of one page run one after another in one folder, so that a page may resume what it has trained; long runs are cut
short by what SHORTER appends. A block under the comment <!-- cluster --> is only checked: each run_train.sh in it loads
its config, which must fit the number of processes that the block names.
"""

import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan_like.config import load_config, world_checks

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(<!-- cluster -->\n)?```bash\n(.*?)^```$", re.M | re.S)
SHORTER = {  # how a command begins -> what makes it take seconds
    "./run_train.sh": "--training.steps 3 --validation.interval 0 --checkpoint.interval 3",
    "./run_tests.sh": "tests/test_loss.py",
}
TOOLS = {"python": "", "titan-prepare": "-m titan_like.prepare.main", "titan-estimate": "-m estimation"}
ANSWERS = ("--print_config", "--help", "--comm.mode fake")  # these are short as they are


@dataclass
class Block:
    is_cluster: bool
    commands: list[str]


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text())
    return [Block(bool(mark), text.replace("\\\n", " ").strip().splitlines()) for mark, text in found]


def shortened(command: str) -> str:
    """The command with a comment at its end removed and SHORTER appended."""
    command = re.sub(r"\s+# .*$", "", command)
    start = next((start for start in SHORTER if f" {start} " in f" {command} "), None)
    if start is None or any(answer in command for answer in ANSWERS):
        return command
    return f"{command} {SHORTER[start]}"


def workspace(folder: Path) -> dict[str, str]:
    """Make a copy of the repository by links, and return the environment of an installed one."""
    for entry in REPO.iterdir():
        if entry.name not in ("data", "outputs", ".git", ".venv"):
            (folder / entry.name).symlink_to(entry)
    tools = folder / "tools"
    tools.mkdir()
    for name, arguments in TOOLS.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (tools / name).chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    clean = {key: value for key, value in os.environ.items() if key not in ("NPROC", "NNODES", "NODE_RANK", "CI")}
    return {**clean, "PATH": path, "PYTHONPATH": str(folder), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def has_test_tools() -> bool:
    """Whether this Python has all that ./run_tests.sh asks for, so that it makes no .venv."""
    check = [sys.executable, "scripts/check_env.py", "pyproject.toml", "prepare", "test", "dev"]
    return subprocess.run(check, cwd=REPO, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    env = workspace(tmp_path)
    for block in blocks(page):
        for command in [] if block.is_cluster else block.commands:
            if command.startswith("./run_tests.sh") and not has_test_tools():
                warnings.warn(f"not run, for it would install what is missing here: {command}", stacklevel=1)
                continue
            done = subprocess.run(
                ["bash", "-c", shortened(command)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{shortened(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cluster_commands_fit_their_worlds(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    for block in blocks(page):
        for command in block.commands if block.is_cluster else []:
            assert check_cluster_command(command) == []


def check_cluster_command(command: str) -> list[str]:
    """Load the config of a run_train.sh on NNODES (or srun --nodes) x NPROC processes; other commands are refused."""
    words = shlex.split(re.sub(r"\s+# .*$", "", command))
    assert "./run_train.sh" in words, f"no check is known for {command}"
    place = words.index("./run_train.sh")
    before = words[:place]
    given = dict(word.split("=", 1) for word in before if "=" in word and not word.startswith("-"))
    nodes = before[before.index("--nodes") + 1] if "--nodes" in before else given.get("NNODES", "1")
    return world_checks(load_config(words[place + 1 :]), int(nodes) * int(given.get("NPROC", "8")))


def test_the_check_of_cluster_commands_notices_a_wrong_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    command = "srun --nodes {} --ntasks-per-node 1 ./run_train.sh --job.config_file train_configs/llama3_405b.toml"
    assert check_cluster_command(command.format(64)) == []  # 64 x 8 = 512 = 8 stages x 8 tensor ranks x 8
    assert check_cluster_command(command.format(12)) != []  # 12 x 8 = 96


def test_commands_are_found_and_cut_short(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\n./run_train.sh  # first\na \\\n  b\n```\n\n```\nno\n```\n\n<!-- cluster -->\n```bash\nc\n```\n"
    )
    assert blocks(page) == [Block(False, ["./run_train.sh  # first", "a    b"]), Block(True, ["c"])]
    assert shortened("./run_train.sh  # first") == f"./run_train.sh {SHORTER['./run_train.sh']}"
    assert shortened("./run_train.sh --help") == "./run_train.sh --help"
    assert shortened("ls") == "ls"


@pytest.mark.parametrize("page", [*PAGES, REPO / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_what_pages_point_at_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    absent = [link for link in links if not (page.parent / link).exists()]
    named = set(re.findall(r"\b(?:titan_like|scripts|train_configs|tests|benchmarks)/[\w./-]*\w", text))
    absent += [name for name in sorted(named) if not (REPO / name).exists()]
    assert absent == []
