"""Fixtures of the launcher's tests."""

from pathlib import Path

import pytest

from tests.launcher.stand_in import FAKE, FakePython


@pytest.fixture
def fake_python(tmp_path: Path) -> FakePython:
    """An executable in a folder with a space and an equals sign in its name."""
    folder = tmp_path / "my tools=1"
    folder.mkdir()
    path = folder / "python"
    path.write_text(FAKE)
    path.chmod(0o755)
    run = tmp_path / "my run"
    (run / "checkpoint").mkdir(parents=True)
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHON": str(path),
        "FAKE_LOG": str(folder / "log"),
        "FAKE_RUN": str(run),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return FakePython(path, folder / "log", env)
