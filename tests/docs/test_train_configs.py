"""Every shipped TOML file can run on the number of processes that it states, and its model can be cut as it asks."""

import re
from pathlib import Path

import pytest

from titan_like.config import Config, load_config
from titan_like.launch import check_settings
from titan_like.models.flavors import resolve
from titan_like.parallel.checks import model_checks

REPO = Path(__file__).parents[2]
FILES = sorted((REPO / "train_configs").glob("*.toml"))


def world_size(file: Path) -> int:
    """From a comment line such as "# 512 GPUs of 80 GB" or "# 2 processes"."""
    found = re.findall(r"^# (\d+) (?:GPUs|processes)\b", file.read_text(), re.M)
    assert len(found) == 1, f"{file.name} states its number of processes {len(found)} times"
    return int(found[0])


def problems(config: Config, processes: int) -> list[str]:
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    return check_settings(config, processes) + model_checks(shape, config)


def test_there_are_files() -> None:
    assert {"debug.toml", "llama3_8b.toml", "llama3_405b.toml", "parity_4d.toml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_fits_the_world_that_it_states(file: Path, tmp_path: Path) -> None:
    config = load_config([f"--job.config_file={file}", f"--job.dump_folder={tmp_path}"])
    assert problems(config, world_size(file)) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_few_steps_can_be_asked_for(file: Path) -> None:
    assert load_config([f"--job.config_file={file}", "--training.steps=5"]).training.steps == 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_runs_do_not_share_a_folder_and_name_their_own_data(file: Path) -> None:
    config = load_config([f"--job.config_file={file}"])
    assert config.job.dump_folder == f"outputs/{file.stem}"
    is_small = config.model.flavor == "debug"
    assert all(
        (Path(prefix).parent.name == "stdlib") == is_small for prefix in (*config.data.train, *config.data.validation)
    )


def test_another_world_is_refused() -> None:
    config = load_config([f"--job.config_file={REPO / 'train_configs/llama3_405b.toml'}"])
    (problem,) = problems(config, 500)  # 8 stages x 8 tensor ranks = 64, and 500 = 7 x 64 + 52
    assert "= 64 does not divide the world size (500)" in problem
