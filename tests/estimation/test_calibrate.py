"""titan-estimate calibrate, as far as a machine without a GPU can tell: its arithmetic, its file, and its refusal."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from estimation import calibrate
from estimation.__main__ import main
from estimation.devices import DEVICES, GIB, Device, device_named

MINE = Device("mine", 79, 1e-6, 0.7, 1e-6, 1, 1, float8=0.5, flash=(0.4, 0.3), communicator_gib=0.25, outside_gib=1.5)
WRITTEN = replace(MINE, tflops=100, memory_tb_s=1)


@pytest.fixture
def one_second(monkeypatch):
    """Everything is run once, and takes a second."""

    def run(work, device):
        work()
        return 1.0

    monkeypatch.setattr(calibrate, "best_seconds", run)


def test_rates_are_shares_of_the_named_peaks(one_second):
    """2 n^3 for a product, 4 h n^2 d / 2 for causal attention, a copy reads and writes; of 1e6 a second."""
    found = calibrate.rates(torch.device("cpu"), MINE, size=64)
    attention = 4 * 16 * 128 * 64**2 / 2 / 1e6
    assert found == {
        "efficiency": pytest.approx(2 * 64**3 / 1e6, abs=1e-3),
        "memory_share": pytest.approx(2 * 2 * 64 * 2**14 / 1e6, abs=1e-3),
        "flash": pytest.approx([attention, 2.5 * attention], abs=1e-3),
    }


def test_an_all_reduce_is_counted_as_nccl_tests_do(monkeypatch):
    monkeypatch.setattr(calibrate, "best_seconds", lambda work, device: 1.0)
    monkeypatch.setattr(calibrate.dist, "get_world_size", lambda: 4)
    found = calibrate.collectives(torch.device("cpu"), MINE, size=64)
    assert found == {"link_share": round(2 * 3 / 4 * 2 * 64 * 2**14 / 1e9, 3)}


def test_what_lies_outside_is_what_the_device_lacks_but_for_the_allocator(monkeypatch):
    """10 GiB of 80 were gone before; now 14 are, of which 3 are the allocator's."""
    cuda = {
        "set_device": lambda _: None, "synchronize": lambda: None, "empty_cache": lambda: None,
        "mem_get_info": lambda _: (66 * GIB, 80 * GIB), "memory_reserved": lambda _: 3 * GIB,
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(calibrate, "rates", lambda device, known: {"efficiency": 0.5})
    found = []
    calibrate._measure(0, 1, "", [10 * GIB], MINE, SimpleNamespace(put=found.append))
    assert found == [{"efficiency": 0.5, "outside_gib": 1.0}]


def test_a_written_device_is_read_back(tmp_path):
    for device in (WRITTEN, *DEVICES.values()):
        calibrate.write_device(tmp_path / "new" / "mine.toml", device)
        assert device_named(str(tmp_path / "new" / "mine.toml")) == device


@pytest.mark.parametrize(("degrees", "outside"), [([], 1.5), (["--parallelism.tensor_parallel_degree=2"], 1.75)])
def test_each_further_communicator_takes_its_own(tmp_path, capsys, degrees, outside):
    """Two ranks that share parameters or cut them: the world's communicator and one more; one rank has none but it."""
    calibrate.write_device(tmp_path / "mine.toml", WRITTEN)
    world_size = "2" if degrees else "1"
    with pytest.raises(SystemExit):
        main(["--device", str(tmp_path / "mine.toml"), "--world_size", world_size, *degrees])
    assert f"+ {outside:.2f} GiB outside the allocator" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", "--output", str(tmp_path / "mine.toml")])
    assert stopped.value.code == 2
    assert "torch sees none here" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", "--output", str(tmp_path / "file" / "mine.toml")])
    assert stopped.value.code == 2 and "error: --output is " in capsys.readouterr().err
