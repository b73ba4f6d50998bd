"""Wrapping leaves names and numbers alone. One process; what more processes do is shown in tests/distributed/."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler

from tests.distributed.compositions import composition
from titan_like.config import Config
from titan_like.models.flavors import resolve
from titan_like.oracle import make_batch
from titan_like.parallel.apply import build_model
from titan_like.parallel.compile import compiler_checks
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.step import accumulate_gradients

pytestmark = pytest.mark.usefixtures("one_process")
WRAPPINGS = (
    "",
    "recompute=full",
    "recompute=selective",
    "recompute=selective option=2",
    "compile=true",
    "dtype=bfloat16",
)


def built(line: str) -> tuple[ParallelModel, Config]:
    config = composition(line)
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    return build_model(shape, config, build_mesh("cpu", config.parallelism), torch.device("cpu")), config


def gradients(line: str) -> dict[str, torch.Tensor]:
    model, config = built(line)
    batch = make_batch(model.config, config, model.mesh, 0)
    accumulate_gradients(model, [batch], torch.tensor(1.0))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_names_do_not_depend_on_wrappers() -> None:
    """R122: checkpoints of a compiled, recomputed or sharded model load without any of that."""
    plain = [name for name, _ in built("")[0].named_parameters()]
    assert "layers.0.attention.wq.weight" in plain
    for line in WRAPPINGS[1:]:
        assert [name for name, _ in built(line)[0].named_parameters()] == plain, line


@pytest.mark.parametrize("line", ["recompute=full", "recompute=selective", "recompute=selective option=2"])
def test_recompute_changes_no_bit(line: str) -> None:
    """R124."""
    plain, recomputed = gradients(""), gradients(line)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def forward_calls(line: str) -> int:
    """How often the feed-forward of the blocks runs in one forward and backward."""
    model, config = built(line)
    calls = []
    for block in model.parts[0].layers.values():
        block.feed_forward.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    accumulate_gradients(model, [make_batch(model.config, config, model.mesh, 0)], torch.tensor(1.0))
    return len(calls)


def test_recompute_happens_where_it_is_asked_for() -> None:
    """4 blocks: each once, again all of them, again every second."""
    assert [forward_calls(line) for line in ("", "recompute=full", "recompute=selective option=2")] == [4, 8, 6]


def test_selective_recompute_keeps_the_listed_operations() -> None:
    """Between nothing and everything: attention is not run again, half of the matrix products are."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen[str(func)] = self.seen.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    found = {}
    for line in ("", "recompute=selective", "recompute=full"):
        model, config = built(line)
        batch = make_batch(model.config, config, model.mesh, 0)
        with Count() as count:
            accumulate_gradients(model, [batch], torch.tensor(1.0))
        attention = count.seen["titan_like.document_attention.default"]
        found[line] = (attention, count.seen["aten.mm.default"])
    products = found[""][1]  # 7 per block forward, and what the backward and the head need
    assert [attention for attention, _ in found.values()] == [4, 4, 8]
    # Full: all 7 of each of 4 blocks but the last, whose result no gradient needs; selective: 1st, 3rd, 5th, 7th.
    assert found["recompute=selective"][1] - products in (4 * 4, 4 * 3)
    assert found["recompute=full"][1] - products in (4 * 7, 4 * 6)


def test_compiling_for_the_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", find_none)
    monkeypatch.setenv("CXX", "nowhere/c++")
    monkeypatch.setattr("torch.__file__", "/torch/__init__.py")
    (problem,) = compiler_checks(torch.device("cpu"))
    assert "C++ compiler on a CPU, but CXX is 'nowhere/c++', which does not work" in problem
    monkeypatch.setattr("torch.__file__", "/my folder/torch/__init__.py")
    (problem,) = compiler_checks(torch.device("cpu"))
    assert "torch lies in /my folder/torch, which has a space in its name" in problem
    assert compiler_checks(torch.device("cuda")) == []


@pytest.mark.slow
def test_one_graph_serves_all_blocks_and_later_steps_compile_nothing() -> None:
    torch.compiler.reset()
    counters.clear()
    model, config = built("compile=true")
    graphs = []
    for step in range(3):
        accumulate_gradients(model, [make_batch(model.config, config, model.mesh, step)], torch.tensor(1.0))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [2, 3, 3], "block, loss; then, since a CPU leaves ignored labels out, the loss for any number"
    torch.compiler.reset()


def test_parameters_are_fp32_under_bf16_compute() -> None:
    """R132 in its first half: what the optimizer sees."""
    model, _ = built("dtype=bfloat16")
    assert {parameter.dtype for _, parameter in model.named_parameters()} == {torch.float32}
    assert set(gradients("dtype=bfloat16")) == set(gradients(""))
