"""Which layers are in which stage, and which stages on which rank."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny_run import SHAPE
from titan_like.config import load_config
from titan_like.config.schema import SCHEDULES, SINGLE_STAGE, SPLIT_BACKWARD
from titan_like.fake import train
from titan_like.models.flavors import block_parameters, resolve
from titan_like.parallel.apply import wrap_model
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.pipeline import balanced_ranges, layer_ranges, shard_slice, stages_of_rank

P = "--parallelism."


def pipelined(*argv: str, degree: int = 2):
    return load_config([f"{P}pipeline_parallel_degree={degree}", "--training.local_batch_size=8", *argv])


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "expected"),
    [
        (4, 2, 0, 0, [2, 2]),
        (5, 2, 0, 0, [2, 3]),  # R107: no layer is lost
        (30, 4, 0, 0, [7, 7, 8, 8]),
        (8, 4, 1, 1, [2, 2, 2, 2]),
        (10, 4, 1, 1, [2, 3, 3, 2]),
        (6, 3, 2, 0, [1, 2, 3]),
        (3, 3, 9, 9, [1, 1, 1]),
    ],
)
def test_balanced_by_cost(layers: int, stages: int, first: float, last: float, expected: list[int]) -> None:
    """By hand: a layer costs 1; the costliest stage is as cheap, then the stages are as equal as they can be."""
    ranges = balanced_ranges(layers, stages, first=first, last=last, block=1.0)
    costs = [len(r) + first * (i == 0) + last * (i == stages - 1) for i, r in enumerate(ranges)]
    wanted = [n + first * (i == 0) + last * (i == stages - 1) for i, n in enumerate(expected)]
    assert [layer for r in ranges for layer in r] == list(range(layers))
    assert (max(costs), sum(c * c for c in costs)) == (max(wanted), sum(c * c for c in wanted))


@pytest.mark.parametrize("layers", range(2, 12))
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_every_layer_once(layers: int, stages: int) -> None:
    if layers < stages:
        return
    ranges = balanced_ranges(layers, stages, first=3.0, last=2.5, block=1.0)
    assert [layer for r in ranges for layer in r] == list(range(layers)) and all(map(len, ranges))


def test_the_tables_weigh_on_the_first_and_last_stage() -> None:
    model = resolve("llama3", "8B")  # a table weighs as much as 2.4 blocks
    assert 2.4 < model.vocab_size * model.dim / block_parameters(model) < 2.5
    ranges = layer_ranges(model, pipelined(degree=4))
    assert [len(r) for r in ranges] == [7, 9, 9, 7]


def test_a_split_by_hand() -> None:
    config = pipelined(f"{P}pipeline_parallel_schedule=LoopedBFS", f"{P}pipeline_parallel_split=1,2,3")
    assert layer_ranges(resolve("llama3", "debug"), config) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1F1B", [[0], [1]]),
        ("Interleaved1F1B", [[0, 2], [1, 3]]),
        ("ZBVZeroBubble", [[0, 3], [1, 2]]),
        ("DualPipeV", [[0, 3], [1, 2]]),
    ],
)
def test_stages_of_each_rank(schedule: str, expected: list[list[int]]) -> None:
    config = pipelined(f"{P}pipeline_parallel_schedule={schedule}")
    assert [stages_of_rank(config, rank) for rank in range(2)] == expected


def test_shards_as_dtensor_cuts_them() -> None:
    """257 rows over 4 ranks: chunks of 65, the last one short; over 8 of 5 rows some get none."""
    assert [len(range(257)[shard_slice(257, 4, rank)]) for rank in range(4)] == [65, 65, 65, 62]
    assert [len(range(5)[shard_slice(5, 4, rank)]) for rank in range(4)] == [2, 2, 1, 0]


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """A world in which no other rank exists: messages return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_trace_names_each_forward_and_backward(schedule: str, first_of_two: None) -> None:
    shape = {**SHAPE, "n_layers": 4}
    config = pipelined(
        f"{P}pipeline_parallel_schedule={schedule}", "--training.seq_len=16", "--training.local_batch_size=4",
        *(f"--model.overrides.{key}={value}" for key, value in shape.items()), "--comm.backend=gloo",
    )  # fmt: skip
    model_config = resolve("llama3", "debug", config.model.overrides)
    model = wrap_model(model_config, config, build_mesh("cpu", config.parallelism), torch.device("cpu"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        train(model, config, steps=1)
    names = [event.name for event in trace.events()]
    chunks = 4 * (1 if schedule in SINGLE_STAGE else 2)  # micro-batches x stages of this rank
    assert names.count("forward") == chunks
    # A backward in two parts is named twice; these schedules keep some whole.
    least, most = (chunks, 2 * chunks) if schedule in SPLIT_BACKWARD else (chunks, chunks)
    assert least <= names.count("backward") <= most
