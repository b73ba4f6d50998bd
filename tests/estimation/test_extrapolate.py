"""Few layers tell of many: to the byte, or not at all."""

from dataclasses import replace

import pytest

from estimation import extrapolate
from estimation.extrapolate import trace_some_layers
from estimation.trace import trace
from tests.distributed.compositions import composition

EXACT = (
    (1, True, "layers=12 tied=true recompute=selective dtype=bfloat16"),
    (2, False, "layers=8 recompute=full global=16 reshard=never"),
    (4, True, "layers=8 replicate=2 shard=2 chunks=3"),
)
MORE = (
    (2, True, "layers=9 tp=2 dtype=bfloat16 recompute=full"),
    (2, False, "layers=9 cp=2 recompute=selective"),
    (2, True, "layers=12"),
    (2, False, "layers=12 dtype=bfloat16 global=16"),
    (4, True, "layers=9 replicate=2 recompute=full global=32"),
    (2, True, "layers=9 float8=tensorwise gather=true"),
    (4, False, "layers=9 shard=2 tp=2 recompute=full dtype=bfloat16 documents=true"),
    (4, True, "layers=9 cp=2 tp=2 tied=true"),
)


def assert_exact(world_size: int, gpu: bool, line: str) -> None:
    told = trace_some_layers(composition(line), world_size, 0, gpu=gpu)
    whole = trace(composition(line), world_size, 0, gpu=gpu)
    assert told is not None
    # Of fragmentation, which pools of few layers do not have as those of many, only the whole trace knows.
    assert told == (replace(whole, reserved_bytes=told.reserved_bytes) if gpu else whole)
    assert told.reserved_bytes >= told.peak_bytes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world_size", "gpu", "line"), EXACT, ids=str)
def test_what_few_layers_tell_is_the_whole_trace_to_the_byte(world_size: int, gpu: bool, line: str) -> None:
    assert_exact(world_size, gpu, line)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "gpu", "line"), MORE, ids=str)
def test_more_of_them(world_size: int, gpu: bool, line: str) -> None:
    assert_exact(world_size, gpu, line)


@pytest.mark.parametrize(
    ("world_size", "line"),
    [
        (1, "layers=6"),  # nothing is gained
        (2, "pp=2 layers=8"),
        (1, "layers=8 recompute=selective option=2"),
    ],
)
def test_layers_that_are_not_alike_are_traced_whole(world_size: int, line: str) -> None:
    assert trace_some_layers(composition(line), world_size, 0, gpu=True) is None


def test_so_are_those_of_which_one_is_not_in_float8() -> None:
    config = composition("layers=8 float8=rowwise")
    some = config.float8.model_copy(update={"filter_fqns": ("layers.1.",)})
    assert extrapolate.are_alike(config)
    assert not extrapolate.are_alike(config.model_copy(update={"float8": some}))


def test_a_third_trace_that_is_not_on_the_lines_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer more than it should have: still of the same kinds of moments, but not where 4 and 5 point."""
    longer = {4: 4, 5: 5, 6: 7}
    few = extrapolate.with_layers
    monkeypatch.setattr(extrapolate, "with_layers", lambda config, count: few(config, longer[count]))
    assert trace_some_layers(composition("layers=8"), 1, 0, gpu=False) is None
