"""Traced memory against hand counts, and against real tensors in a fake world, measured by the allocator."""

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.exc import InvalidCxxCompiler
from torch._subclasses import FakeTensorMode

from estimation.kernels import held_messages
from estimation.trace import STEPS, fake_world, report, trace, track, wrap
from estimation.tracker import Tracker
from estimation.types import ALL_GATHER, LOSS, RECOMPUTE, TRANSIENT, MemoryReport
from tests.distributed.compositions import CSV, MATRIX, composition
from tests.estimation.cpu_memory import CpuMemory
from titan_like.config import Config
from titan_like.config.errors import TitanError
from titan_like.fake import train
from titan_like.models.flavors import resolve
from titan_like.parallel.apply import wrap_model
from titan_like.parallel.mesh import build_mesh

FAST = (
    (1, "dtype=bfloat16 recompute=selective"),
    (2, "global=16 reshard=never"),
    (2, "documents=true recompute=full"),
    (2, "tp=2 chunks=3"),
    (2, "tp=2 loss_parallel=false dtype=bfloat16 chunks=3 z=0.01"),
    (2, "cp=2"),
    (2, "pp=2 tied=true schedule=ZBVZeroBubble"),
    (4, "shard=2 tp=2 dtype=bfloat16 global=16"),
    (4, "pp=2 shard=2 schedule=1F1B global=16"),
    (4, "pp=2 cp=2 schedule=Interleaved1F1B"),
    (1, "float8=rowwise dtype=bfloat16"),
    (2, "float8=tensorwise gather=true scales=true"),
    (2, "tp=2 float8=tensorwise recompute=selective"),
)
COMPILED = (
    (1, "compile=true recompute=selective layers=2"),
    (2, "compile=true recompute=full dtype=bfloat16 layers=2 family=qwen3"),
    (2, "compile=true tp=2 layers=2"),
    (2, "compile=true cp=2 layers=2"),
    (2, "compile=true cp=2 documents=true recompute=selective layers=2 family=qwen2"),
    (2, "compile=true pp=2 schedule=Interleaved1F1B"),
    (2, "compile=true float8=rowwise dtype=bfloat16 layers=2"),
    (2, "compile=true tp=2 float8=tensorwise recompute=full layers=2"),
)
LINES = [(world, line) for world, lines in MATRIX.items() for line in lines]
ALL = [(world, line) for world, line in LINES if "compile" not in line]


def tracked(config: Config, world_size: int, rank: int, *, fake: bool) -> tuple[Tracker, int]:
    """The tracker after two steps, and bytes of the buffers that were there before it."""
    with fake_world(world_size, rank):
        model = wrap(config)
        with held_messages(until_wait=False):
            tracker = track(model, config, FakeTensorMode(allow_non_fake_inputs=True) if fake else None)
    return tracker, 0 if model.sequence_index is None else model.sequence_index.nbytes


def measured(config: Config, world_size: int, rank: int) -> CpuMemory:
    """The same two steps on real tensors; blocks are compiled before."""
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    with fake_world(world_size, rank), held_messages(until_wait=False):
        model = wrap_model(shape, config, build_mesh("cpu", config.parallelism), torch.device("cpu"))
        if config.compile.enable:
            torch._dynamo.reset()  # after other shapes it would compile for shapes that are not known
            train(model, config, 1)
        if model.pipeline is not None and config.compile.enable:  # another has no buffers yet; it finds the same code
            model = wrap_model(shape, config, build_mesh("cpu", config.parallelism), torch.device("cpu"))
        gc.collect()
        with CpuMemory() as memory:
            train(model, config, STEPS)
    return memory


def compiled_blocks(line: str) -> Config:
    """The blocks alone: the loss is traced uncompiled."""
    config = composition(line)
    only = config.compile.model_copy(update={"components": ["blocks"]})
    return config.model_copy(update={"compile": only})


def assert_exact(config: Config, world_size: int, rank: int) -> None:
    tracker, buffers = tracked(config, world_size, rank, fake=True)
    traced = report(tracker, world_size, rank, buffers, gpu=False)
    memory = measured(config, world_size, rank)
    memory.read(tracker.operations)
    assert memory.peak + buffers == traced.peak_bytes, memory.temporaries
    assert sum(traced.at_peak.values()) == traced.peak_bytes


@pytest.mark.parametrize(("world", "line"), FAST, ids=str)
def test_the_peak_is_that_of_real_kernels_to_the_byte(world: int, line: str) -> None:
    for rank in {0, world - 1}:
        assert_exact(composition(line), world, rank)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "line"), COMPILED, ids=str)
def test_the_peak_is_that_of_compiled_blocks_to_the_byte(world: int, line: str) -> None:
    assert_exact(compiled_blocks(line), world, world - 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", ["recompute=none", "recompute=selective", "recompute=full dtype=bfloat16"])
def test_every_allocation_comes_in_the_order_of_compiled_blocks(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what is kept between forward and backward is right for each block."""
    monkeypatch.setattr("titan_like.loss._valid_rows", lambda labels: None)
    config = compiled_blocks(f"compile=true layers=2 {line}")
    tracker, _ = tracked(config, 2, 0, fake=True)
    memory = measured(config, 2, 0)
    memory.read(tracker.operations)
    traced = [sign * record.size for sign, record in tracker.events if record.size >= 64]
    assert [change for change in memory.changes if abs(change) >= 64] == traced


@pytest.mark.parametrize(
    "line",
    [
        "global=16 reshard=never",
        "dtype=bfloat16 recompute=full",
        "recompute=selective chunks=3",
        "shard=1 replicate=2",
        "cp=2",
        "cp=2 documents=true",
    ],
)
def test_every_allocation_and_release_comes_in_the_order_of_real_kernels(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So every category is right at every moment, for each is a sum over these events. Scalars are left out: kernels
    make some from Python numbers. So is the look for ignored labels, which fake ones cannot be searched for."""
    monkeypatch.setattr("titan_like.loss._valid_rows", lambda labels: None)
    tracker, _ = tracked(composition(line), 2, 0, fake=True)
    memory = measured(composition(line), 2, 0)
    memory.read(tracker.operations)
    traced = [sign * record.size for sign, record in tracker.events if record.size >= 64]
    assert [change for change in memory.changes if abs(change) >= 64] == traced


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "line"), ALL, ids=str)
def test_every_composition_to_the_byte(world: int, line: str, tmp_path: Path) -> None:
    schedule = tmp_path / "by_hand.csv"
    schedule.write_text(CSV)
    rank = len(line) % world  # some rank, not always the first
    assert_exact(composition(line.format(csv=schedule)), world, rank)


@pytest.mark.parametrize(
    "line", ["batch=4", "dtype=bfloat16 recompute=selective", "pp=2 schedule=ZBVZeroBubble", "documents=true"]
)
def test_every_category_is_that_of_real_tensors(line: str) -> None:
    real, fake = (report(tracked(composition(line), 2, 0, fake=f)[0], 2, 0, 0, gpu=False) for f in (False, True))
    assert real == fake


@pytest.mark.parametrize("line", ["batch=16", "batch=16 dtype=bfloat16", "batch=16 recompute=full"])
def test_what_kernels_allocate_inside_is_below_one_percent_of_the_peak(line: str) -> None:
    """Sequences of 512 and a vocabulary of 4096: closer to real sizes than the other cases."""
    base = composition(line)
    config = base.model_copy(
        update={
            "training": base.training.model_copy(update={"seq_len": 512}),
            "model": base.model.model_copy(update={"overrides": {**base.model.overrides, "vocab_size": 4096}}),
        }
    )
    peak, memory = trace(config, 2, 0, gpu=False).peak_bytes, measured(config, 2, 0)
    assert peak <= memory.peak <= 1.01 * peak


def small() -> MemoryReport:
    """Two ranks of FSDP in fp32: 4 blocks, D 32, 4 heads of 8, 2 kv heads, F 48, V 64, B 4, S 32."""
    return trace(composition("batch=4"), 2, 0, gpu=False)


def test_resident_memory_counted_by_hand() -> None:
    # A block: 32 x 8 x (4 + 2 + 2 + 4) + 3 x 32 x 48 + 2 x 32 = 7744; tables 2 x 64 x 32; last norm 32: 35104 numbers.
    resident = small().resident
    assert resident.parameters == resident.gradients == 35_104 * 4 // 2
    # Two moments; one fp32 step counter for each of 4 x 9 + 3 tensors.
    assert resident.optimizer == 2 * 35_104 * 4 // 2 + 39 * 4
    assert resident.buffers == 0


def test_activations_under_full_recompute_counted_by_hand() -> None:
    """Only the input of each block (the output of the one before it) stays, B x S x D in fp32."""
    activations = trace(composition("recompute=full"), 2, 0, gpu=False).activations
    hidden = 4 * 32 * 32 * 4
    for module in ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"):
        assert activations[module] == hidden
    assert activations["decoder"] == 2 * 4 * 32 * 4 * 4  # cos and sin, B x S x H/2 in fp32
    # Last norm, composed on the CPU: x / rms, and one number per row. The loss does not keep its result.
    assert activations["norm"] == hidden + 4 * 32 * 4
    assert set(activations) == {"tok_embeddings", "decoder", "norm", *(f"layers.{i}" for i in range(4))}


def test_transient_memory_counted_by_hand() -> None:
    traced = trace(composition("recompute=full"), 2, 0, gpu=False)
    assert set(traced.transient) == set(TRANSIENT)
    block = 7744 * 4
    assert traced.transient[ALL_GATHER] == 3 * block  # two blocks gathered, and the flat buffer of a third
    # Logits and probabilities, B x S x V, the gradient of B x S x D hidden states, and some numbers per token.
    assert 0 < traced.transient[LOSS] - (2 * 64 + 32) * 4 * 32 * 4 < 7 * 8 * 4 * 32
    # In two chunks, half as many logits at a time.
    chunked = trace(composition("recompute=full chunks=2"), 2, 0, gpu=False)
    assert 0 < chunked.transient[LOSS] - (64 + 32) * 4 * 32 * 4 - 64 * 32 * 4 < 7 * 8 * 4 * 32
    assert 0 < traced.transient[RECOMPUTE] < traced.peak_bytes
    assert trace(composition("batch=4"), 2, 0, gpu=False).transient[RECOMPUTE] == 0


def test_the_peak_is_in_the_second_step_and_says_where() -> None:
    moment = small().moment
    assert (moment.step, moment.phase) == (2, "forward")
    assert "step 2, forward of output" in str(moment)


def test_each_stage_of_a_pipeline_has_its_own_report() -> None:
    first, last = (trace(composition("pp=2 batch=8"), 2, rank, gpu=False) for rank in (0, 1))
    assert first.transient[LOSS] < last.transient[LOSS]
    assert first.activations["layers.0"] > 0 and "layers.0" not in last.activations


def test_gpu_attention_and_norms_keep_less() -> None:
    """In bf16: the composed norm keeps two fp32 copies of its input, the fused one a number per row."""
    config = composition("dtype=bfloat16")
    cpu, gpu = (trace(config, 2, 0, gpu=gpu) for gpu in (False, True))
    rows = 4 * 32
    assert gpu.activations["layers.0.ffn_norm"] == rows * (32 * 2 + 4)  # its output in bf16 and 1 / rms in fp32
    assert cpu.activations["layers.0.ffn_norm"] > gpu.activations["layers.0.ffn_norm"]
    assert gpu.reserved_bytes >= gpu.peak_bytes and cpu.reserved_bytes == cpu.peak_bytes


@pytest.mark.parametrize(
    "line", ["tp=2 documents=true dtype=bfloat16", "cp=2 documents=true", "cp=2 dtype=bfloat16", "tp=2"]
)
def test_every_attention_can_be_traced_as_a_gpu_runs_it(line: str) -> None:
    assert trace(composition(line), 2, 1, gpu=True).peak_bytes > 0


def test_what_is_left_out_is_said() -> None:
    notes = " ".join(trace(composition("compile=true layers=1"), 2, 0, gpu=True).not_included)
    assert "compiled loss" in notes and "written for a CPU" in notes and "CUDA context" in notes


def test_a_compiled_block_keeps_what_the_partitioner_chooses_counted_by_hand() -> None:
    """Llama block in fp32: x, n1, q, k and v with their heads repeated, the attention and its log-sum-exp, wo, n2, w1,
    w3, the gate, and a number per row of each norm; no silu, and nothing of the rotation. With recompute per operation:
    x, and what the policy keeps (wk, attention and its log-sum-exp, wo, w3)."""
    rows, wide, heads, keys, units = 4 * 32, 32, 4 * 8, 2 * 8, 48
    attention = rows * (heads + 4) * 4
    kept = {
        "none": attention + rows * (3 * wide + 3 * heads + 3 * units + 2) * 4,
        "selective": attention + rows * (keys + wide + units) * 4,
        "full": 0,
    }
    hidden = rows * wide * 4  # its result, the next block's input
    for mode, size in kept.items():
        traced = trace(composition(f"compile=true layers=2 recompute={mode}"), 2, 0, gpu=False)
        assert traced.activations["layers.0"] == size + hidden, mode


def test_compiled_blocks_are_traced_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise InvalidCxxCompiler

    config = composition("compile=true layers=1")
    with monkeypatch.context() as patched:
        patched.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
        patched.setattr("torch._inductor.cpp_builder.cpp_compiler_search", missing)
        without = trace(config, 1, 0, gpu=False)
    assert not any(note.startswith("compilation") for note in without.not_included)
    assert without == trace(config, 1, 0, gpu=False)


def test_a_block_that_cannot_be_compiled_is_traced_as_it_is_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no cut today\nand more")

    monkeypatch.setattr("torch._inductor.compile_fx.partition_fn", fail)
    line = "layers=2 recompute=selective"
    eager, found = (trace(composition(f"{line} compile={compiled}"), 2, 0, gpu=False) for compiled in ("false", "true"))
    assert found.peak_bytes == eager.peak_bytes
    notes = [note for note in found.not_included if note.startswith("compilation")]
    assert notes == ["compilation: a block is traced as it is, for RuntimeError: no cut today"]


@pytest.mark.parametrize(
    "line",
    [
        "dtype=bfloat16 recompute=selective",
        "tp=2 documents=true",
        "pp=2 schedule=1F1B",
        "float8=tensorwise gather=true scales=true",
        "tp=2 float8=tensorwise",
        "float8=rowwise_with_gw_hp",
        "compile=true layers=1 dtype=bfloat16",
        "compile=true layers=1 float8=tensorwise dtype=bfloat16",
        "compile=true layers=1 float8=rowwise dtype=bfloat16",
        "compile=true layers=1 tp=2 float8=tensorwise dtype=bfloat16",
    ],
)
def test_no_operator_runs_in_a_trace(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would run one without a shape function on real tensors of full size."""

    def run(mode: object, operator: object, *_: object) -> None:
        raise AssertionError(f"{operator} runs")

    monkeypatch.setattr("torch._subclasses.fake_tensor.run_fallback_kernel", run)
    config = composition(line)
    if config.float8.enable:  # products of the hardware, which no CPU has to run
        config = config.model_copy(update={"float8": config.float8.model_copy(update={"emulate": False})})
    told = trace(config, 2, 0, gpu=True)
    assert not [note for note in told.not_included if note.startswith("compilation")]


def test_an_operator_without_a_shape_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("estimation.compiled._ExternKernels._scaled_mm")
    config = composition("compile=true layers=1 float8=tensorwise dtype=bfloat16")
    config = config.model_copy(update={"float8": config.float8.model_copy(update={"emulate": False})})
    told = trace(config, 2, 0, gpu=True)
    assert any("_scaled_mm" in note for note in told.not_included)


def test_one_outside_of_compiled_blocks_ends_the_trace_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("test_trace", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    monkeypatch.setattr("titan_like.models.decoder.rotate", lambda x, *_: torch.ops.test_trace.twice(x))
    with pytest.raises(TitanError, match=r"cannot tell what the operator test_trace\.twice\.default makes"):
        trace(composition(""), 1, 0, gpu=True)


def test_compiling_for_a_trace_leaves_nothing_behind_that_a_real_compilation_would_find() -> None:
    """Inductor's modules are kept by the source they were read from; a trace's are without kernels."""
    known = set(PyCodeCache.modules)
    trace(composition("compile=true layers=1"), 1, 0, gpu=False)
    assert set(PyCodeCache.modules) == known


def test_counting_the_shape_propagation_of_dtensor_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof can fail: DTensor runs operations in full size for their shapes, which must not count."""
    config = composition("tp=2")
    right, _ = tracked(config, 2, 0, fake=True)
    monkeypatch.setattr(Tracker, "pause", lambda self: nullcontext())
    wrong, _ = tracked(config, 2, 0, fake=True)
    assert len(wrong.events) > len(right.events)


def test_a_process_group_is_left_behind_by_no_trace() -> None:
    with pytest.raises(ValueError, match="mesh_sizes"):
        trace(composition("shard=3"), 2, 0, gpu=False)
    assert not torch.distributed.is_initialized()
