"""Figures of a training step that must not change unnoticed: memory, graphs, collectives, waits; exact, from baselines.

After a change that is meant to move them: `python -m tests.test_regression --write`, and look at the difference.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import overhead
from estimation.kernels import composites
from estimation.trace import fake_world, wrap
from tests.distributed.compositions import composition
from tests.estimation.cpu_memory import CpuMemory
from titan_like.config import Config
from titan_like.data.loader import Batch
from titan_like.fake import train
from titan_like.models.flavors import parameter_count, resolve
from titan_like.optim.optimizer import build_optimizer
from titan_like.parallel.apply import build_model
from titan_like.parallel.distributed import close_process_group, init_process_group
from titan_like.parallel.mesh import build_mesh
from titan_like.step import training_step

BASELINES = Path(__file__).with_name("baselines.json")
VERSION = ".".join(torch.__version__.split(".")[:2])
CPU = torch.device("cpu")

ALONE = (
    "",
    "vocab=4096",
    "vocab=4096 chunks=4",
    "vocab=4096 chunks=4 z=0.01 dtype=bfloat16",
    "global=8",
    "recompute=full",
    "recompute=selective",
    "dtype=bfloat16",
    "documents=true",
    "float8=tensorwise",
)
TOGETHER = (
    "shard=2",
    "shard=2 global=16",
    "shard=2 global=16 reshard=never",
    "shard=2 dtype=bfloat16 recompute=full",
    "replicate=2 shard=2",
    "tp=2",
    "tp=2 loss_parallel=false chunks=2",
    "cp=2",
    "cp=2 rotate=alltoall",
    "pp=2",
    "pp=2 schedule=ZBVZeroBubble tied=true",
    "pp=2 shard=2 tp=2 cp=2",
    "shard=2 float8=tensorwise gather=true scales=true",
)


def peak_bytes(line: str) -> int:
    """Of a step after the first, above what is alive before it. Scalars are left out: threads of gloo hold some of them
    for a moment longer or shorter."""
    with trained(line) as step, CpuMemory() as memory:
        step()
    return max(accumulate(size for size in memory.changes if abs(size) > 8))


def compiled_graphs() -> list[int]:
    """After each of 4 steps. Other backends compile the same graphs, much faster."""
    torch.compiler.reset()
    counters.clear()
    compile_fast = lambda function, **options: COMPILE(function, backend="eager", **options)  # noqa: E731
    with mock.patch("torch.compile", compile_fast), trained("compile=true") as step:
        found = [counters["stats"]["unique_graphs"]]
        for _ in range(3):
            step()
            found.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    return found


def collectives(line: str) -> dict[str, list[int]]:
    """Number and bytes from the end of one update to the end of the next, by operation, for rank 0 of a world without
    peers."""
    config = composition(line)
    degrees = [value for key, value in config.parallelism if key.endswith("_degree")]
    steps: list[dict[str, list[int]]] = []

    def end_step(*_: Any) -> None:
        steps.append(dict(sorted(found.by_name.items())))
        found.by_name.clear()

    with fake_world(math.prod(max(degree, 1) for degree in degrees), rank=0):
        model, found = wrap(config), Collectives()
        hook = register_optimizer_step_post_hook(end_step)
        with FakeTensorMode(allow_non_fake_inputs=True), found:
            train(model, plain(config), steps=2)
        hook.remove()
    return steps[1]


def waits(line: str) -> int:
    """Operations of a step that make the host wait for a device."""
    with mock.patch("titan_like.loss._valid_rows", lambda labels: None), trained(line) as step, Waits() as found:
        step()
    return found.count


MEASURES: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "peak_bytes": (peak_bytes, ALONE),
    "collectives": (collectives, TOGETHER),
    "waits": (waits, ("", "recompute=full", "dtype=bfloat16", "global=8", "documents=true")),
}
COMPILE = torch.compile


@contextmanager
def trained(line: str) -> Iterator[Callable[[], None]]:
    """A model in this process alone that has made its first step; gives the function that makes another one."""
    config = composition(line)
    init_process_group(CPU, 60)
    try:
        model = build_model(shape_of(config), config, build_mesh("cpu", config.parallelism), CPU)
        optimizer = build_optimizer(model.named_parameters(), config.optimizer)
        micro_batches = max(1, config.training.global_batch_size // config.training.local_batch_size)

        def step() -> None:
            training_step(model, optimizer, [batch_of(config)] * micro_batches, config.training.max_norm)

        step()
        yield step
    finally:
        close_process_group()


def batch_of(config: Config) -> Batch:
    """All labels count; documents, where they are kept apart, have 8 tokens."""
    index = torch.arange(config.training.seq_len).repeat(config.training.local_batch_size, 1)
    tokens = index % 64
    starts = index // 8 * 8 if config.data.reset_attention_mask else None
    return Batch(tokens, tokens, index, starts, lengths=((8,) * (config.training.seq_len // 8),) * len(index))


def shape_of(config: Config) -> Any:
    return resolve(config.model.name, config.model.flavor, config.model.overrides)


def plain(config: Config) -> Config:
    """As titan_like/fake.py: fused kernels are slow on fake tensors."""
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"implementation": "for-loop"})})


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the larger of what each takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, list[int]] = {}
        self._composites = composites()  # attention in rings would hide its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func in self._composites:
            with self:
                return self._composites[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        space, name = func.name().split("::")
        if space in ("c10d", "_c10d_functional") and "wait_tensor" not in name and "barrier" not in name:
            entry = self.by_name.setdefault(name.split(".")[0], [0, 0])
            entry[0] += 1
            entry[1] += max(bytes_of(value) for value in (*args, result))
        return result


def bytes_of(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class Waits(TorchDispatchMode):
    """Counts what needs a value on the host: one that is read, or a size that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        self.count += func.name().removeprefix("aten::") in names
        return func(*args, **(kwargs or {}))


def baselines() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BASELINES.read_text())
    if found["torch"] != VERSION:
        pytest.skip(f"baselines are for torch {found['torch']}, this is {VERSION}")
    return found


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels allocate for each of their threads."""
    monkeypatch.delenv("RANK", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("measure", "line"), [(m, line) for m, (_, lines) in MEASURES.items() for line in lines])
def test_figures_are_those_of_the_baselines(measure: str, line: str) -> None:
    assert MEASURES[measure][0](line) == baselines()[measure][line]


def test_nothing_is_compiled_after_the_second_step() -> None:
    graphs = compiled_graphs()
    assert graphs == baselines()["graphs"]
    assert len(set(graphs[1:])) == 1


def test_fsdp_sends_what_it_must() -> None:
    """By hand: 4 blocks, embedding and head are units. Each is gathered for the forward, all but the head (which the
    backward begins with) again for the backward, and each unit's gradient is reduced once, in fp32."""
    shape = shape_of(composition(""))
    whole, head = 4 * parameter_count(shape), 4 * (shape.vocab_size * shape.dim + shape.dim)
    assert collectives("shard=2") == {
        "_allgather_base_": [6 + 5, whole + (whole - head)],
        "_reduce_scatter_base_": [6, whole],
        "allreduce_": [2, 8 + 16],  # the number of valid labels; loss and squared norm
    }


def test_a_wait_is_counted() -> None:
    with Waits() as found:
        torch.ones(3).nonzero()
        assert found.count == 1
        torch.ones(()).item()
    assert found.count == 2


@pytest.mark.slow
def test_the_trainer_costs_little_over_a_loop_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loose bound in CPU time, the best of some turns each; benchmarks/ has the real comparison."""
    monkeypatch.setattr("benchmarks.overhead.time.perf_counter", time.process_time)
    monkeypatch.setattr("gc.collect", lambda: 0)  # of each fit(), over all that other tests have left in this process
    trainer = overhead.make_trainer(tmp_path, steps=20)
    turns = {"trainer": overhead.trainer_turn(trainer, 3), "bare": overhead.bare_turn(trainer, 3)}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(4):
        for name, turn in turns.items():
            seconds[name].append(turn())
    trainer.close()
    assert min(seconds["trainer"]) < 1.3 * min(seconds["bare"]), seconds


def write() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": VERSION}
    for name, (measure, lines) in MEASURES.items():
        found[name] = {line: measure(line) for line in lines}
    found["graphs"] = compiled_graphs()
    BASELINES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.test_regression --write")
    write()
