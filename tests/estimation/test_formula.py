"""The formula against sizes worked out by hand, and against rules that hold for every composition."""

import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from estimation import program
from estimation.compiled_block import CompiledBlock, compiled_backward, compiled_forward
from estimation.float8 import Float8, cast_products
from estimation.formula import memory_of
from estimation.groups import local_rows
from estimation.job import Job, job_of
from estimation.profiles import TITAN_2024_12, TITAN_2025_11, TITAN_LIKE, TITAN_LIKE_CPU, TORCHTUNE_FSDP2
from estimation.program import Shape, block_program, kept_results
from estimation.reserve import events_of
from estimation.run import left_gradients
from estimation.schedules import Action, gathered_stages, rounds, single_stage
from estimation.tape import Event, Mode, Segment, backward, forward, inputs_backward, kept, sizes_of, weights_backward
from titan_like.config import load_config
from titan_like.models import documents
from titan_like.models.flavors import resolve

ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30
LLAMA_8B = resolve("llama3", "8B")
ONE_PASS = ((Action("F", 0, 0), Action("B", 0, 0)),)


def job(*argv: str, world_size: int = 8) -> Job:
    return job_of(load_config(argv), world_size)


@pytest.mark.parametrize(
    ("rows", "ranks", "parts"), [(10, 4, [3, 3, 3, 1]), (5, 4, [2, 2, 1, 0]), (8, 4, [2, 2, 2, 2])]
)
def test_rows_are_cut_as_torch_chunk_cuts_them(rows, ranks, parts):
    assert [local_rows(rows, ranks, rank) for rank in range(ranks)] == parts


def test_resident_bytes_of_8b_on_8_ranks():
    """8,030,261,248 parameters, each dim divisible by 8; 32 blocks of 9, embedding, norm and head: 291 tensors."""
    resident = memory_of(job("--model.flavor=8B"))[0].resident
    assert resident.parameters == resident.gradients == 8_030_261_248 * 4 // 8
    assert resident.optimizer == 8_030_261_248 + 4 * 291


def test_parts_are_padded_to_the_longest():
    """On 3 ranks the debug model's rows are padded: 128 to 129, 64 to 66, 384 is whole, 4096 to 4098."""
    block = 2 * 43 + 43 * 128 * 2 + 22 * 128 * 2 + 43 * 384 + 2 * 128 * 128
    tables = 2 * 1366 * 128 + 43
    assert memory_of(job(world_size=3))[0].resident.parameters == 4 * (4 * block + tables)


# An 8B block in bf16: D = Q = 4096, K = 1024, F = 14336; for 8,192 tokens, 4096 numbers a token are 64 MiB.
BLOCK_MIB = {
    # x, n1, q, k heads, v heads, attention, h, n2: 8 x 64; w1, silu, w3, gate: 4 x 224; log-sum-exp 1; 2 norms of 1/32
    ("none", False): 8 * 64 + 4 * 224 + 1 + 2 / 32,
    ("none", True): 8 * 64 + 3 * 224 + 1 + 2 / 32,  # silu is computed again
    ("op", False): 64 + 64 + 1 + 16 + 64 + 224,  # x, attention, log-sum-exp, and the products wk, wo, w3
    ("op", True): 64 + 64 + 1 + 16 + 64 + 224,
    ("full", False): 64,
}


def passes(shape: Shape, mode: Mode) -> tuple[list[Event], list[Event]]:
    """The forward and the backward of a block."""
    if shape.compiled:
        block = CompiledBlock(shape, kept_results(shape))
        return compiled_forward(block, mode), compiled_backward(block, mode, "reduce-scatter")
    ops = block_program(shape)
    return forward(ops, shape.hidden, kept(ops, mode)), backward(ops, shape.hidden, mode)


@pytest.mark.parametrize(("mode", "is_compiled"), BLOCK_MIB)
def test_activations_of_a_block(mode, is_compiled):
    shape = Shape(LLAMA_8B, 1, 8192, compiled=is_compiled, profile=TITAN_LIKE)
    made, freed = map(Segment.of, passes(shape, mode))
    assert made.delta[0] / MIB == BLOCK_MIB[mode, is_compiled]
    # The backward frees them and the gradient of the output, and leaves those of the input and of the weights.
    weights = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert made.delta[0] + freed.delta[0] == weights


def test_the_other_products_are_kept_by_torchtitan():
    """wq 64, wv 16, w1 224, w2 64, with x, attention and log-sum-exp: 497 MiB; compiled, w2 is read by nobody. Some
    versions named no attention."""
    for is_compiled, profile, expected in (
        (False, TITAN_2024_12, 497), (True, TITAN_2024_12, 433), (True, TITAN_2025_11, 433 - 65),
    ):  # fmt: skip
        shape = Shape(LLAMA_8B, 1, 8192, compiled=is_compiled, profile=profile)
        assert Segment.of(passes(shape, "op")[0]).delta[0] == expected * MIB


def test_recompute_is_inside_of_torchtitan_s_compiled_blocks() -> None:
    """What a program makes again it makes where it is read, so that its result and the last product are left out."""
    for profile, is_inside in ((TITAN_LIKE, False), (TITAN_2024_12, True), (TORCHTUNE_FSDP2, False)):
        found = Job(
            LLAMA_8B, rows=1, batch_rows=1, seq_len=8192, accumulation=1, replicate=1, fsdp=8, cp=1, tp=1,
            stages=(range(32),), actions=ONE_PASS, recompute="full", compiled=True, profile=profile,
        )  # fmt: skip
        names = {event.name for segment in memory_of(found)[0].steps() for event in events_of(segment)}
        assert {"again attention", "again w1", "again w3", "again n2"} <= names
        assert ("again w2" in names) != is_inside


def test_what_python_holds_stays_until_recomputation_stops() -> None:
    """The arguments of the feed-forward, and the sum that it is added to; before that the gradient of the block's
    result is gathered, which asks for nothing that was saved."""
    shape = Shape(LLAMA_8B, 1, 8192, tp=2, profile=TITAN_LIKE_CPU)
    events = backward(block_program(shape), shape.hidden, "full")
    names = [(event.name, event.size > 0) for event in events]
    again = [index for index, (name, is_made) in enumerate(names) if is_made and name.startswith("again ")]
    assert names.index(("d w2", True)) < again[0]
    assert names.index(("again n2", False)) > again[-1] and names.index(("again h", False)) > again[-1]
    forwards = [(event.name, event.size > 0) for event in forward(block_program(shape), shape.hidden, {"x"})]
    attended, result = forwards.index(("attention", True)), forwards.index(("wo scattered", True))
    for name in ("n1", "q", "k", "wv"):  # also where heads are repeated
        assert attended < result < forwards.index((name, False))


def test_a_published_peak():
    """torchtitan 6a6f755d2: llama3 8B, 8 GPUs, selective recompute, peak active memory 41.17145 GiB."""
    run = Job(
        LLAMA_8B, rows=1, batch_rows=1, seq_len=8192, accumulation=1, replicate=1, fsdp=8, cp=1, tp=1,
        stages=(range(32),), actions=ONE_PASS, recompute="op", profile=TITAN_2024_12,
    )  # fmt: skip
    assert memory_of(run)[0].peak.allocated / GIB == pytest.approx(41.17145, abs=0.005)


def loss_terms(*argv: str) -> dict[str, int]:
    """Bytes at the peak of 8B with sequences of 8192, which the loss reaches."""
    base = ("--model.flavor=8B", "--training.seq_len=8192", "--activation_checkpoint.mode=full")
    memory = memory_of(job(*base, *argv))[0]
    assert memory.peak.label == "forward loss"
    assert memory.peak.terms["activations", "x"] == 33 * 8192 * 4096 * 2
    assert sum(memory.peak.terms.values()) == memory.peak.allocated
    return {name: size for (term, name), size in memory.peak.terms.items() if term == "logits/loss"}


SMALL_TERMS = {  # hidden states and their gradient in bf16, one fp64 number per token
    "normed": 8192 * 4096 * 2, "gradient of the hidden states": 8192 * 4096 * 2, "factors": 8192 * 8,
}  # fmt: skip


def test_the_peak_of_a_whole_loss_is_its_logits_in_bf16_and_in_fp32():
    numbers = 8192 * 128_256
    whole = {"logits": 2 * numbers, "probabilities": 4 * numbers}
    assert loss_terms("--training.loss_chunks=1") == {**whole, **SMALL_TERMS}


def test_the_peak_of_a_chunked_loss_is_the_gradient_of_the_table():
    """Two chunks of 4096 tokens, as many as the model is wide: a chunk has as many logits as the table has weights.
    Its gradient is added up in fp32, beside the products and the logits' gradient in bf16."""
    numbers = 4096 * 128_256
    table = {"fp32 sum": 4 * numbers, "logits": 2 * numbers, "probabilities": 4 * numbers}
    assert loss_terms() == {**table, **SMALL_TERMS}


@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_steady_state_is_walked_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is repeated is every action in its order, and its memory is that of walking through each of them."""
    pipeline = job(
        "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=24", "--training.seq_len=256",
        f"--parallelism.pipeline_parallel_schedule={schedule}", world_size=4,
    )  # fmt: skip

    def peaks() -> list[tuple[object, ...]]:
        return [(m.peak.allocated, m.peak.pools, m.peak.label, m.peak.terms) for m in memory_of(pipeline)]

    for row in pipeline.actions:
        found = rounds(row, gathers_ahead=True)
        walked = [(step.kind, step.stage) for steps, times in found for step in steps * times]
        assert walked == [(action.kind, action.stage) for action in row] and len(found) < len(row) / 2
    short = peaks()
    monkeypatch.setattr("estimation.run.rounds", lambda row, **how: [(s * n, 1) for s, n in rounds(row, **how)])
    assert peaks() == short


def test_1f1b_order():
    """Rank 2 of 4 starts two forwards, then alternates."""
    kinds = [f"{kind}{micro_batch}" for kind, _, micro_batch in single_stage("1F1B", 4, 2, 4)]
    assert kinds == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]


def test_a_looped_schedule_asks_for_three_stages_ahead():
    """Of four stages per rank the fourth waits until the first has run its last; that one is given back then."""
    actions = tuple(Action("F", stage, 0) for stage in (0, 2, 4, 6, 6, 4))
    assert gathered_stages(actions) == [([], [0, 2, 4]), ([0], [6]), ([2], []), ([], []), ([], []), ([6], [])]


def test_halves_of_a_backward_free_what_a_whole_one_frees():
    """The inputs' half keeps every activation and the gradients of the results of operations with a weight."""
    shape = Shape(LLAMA_8B, 1, 8192, profile=TITAN_LIKE)
    ops = block_program(shape)
    inputs = Segment.of(inputs_backward(ops, shape.hidden))
    weights, rest = (Segment.of(events) for events in weights_backward(ops, shape.hidden, "gradients", adds=False))
    whole = Segment.of(backward(ops, shape.hidden, "none"))
    assert inputs.delta[0] + weights.delta[0] + rest.delta[0] == whole.delta[0]
    # Left for the weights: d n1, d wq, d h (for wo), d n2 of 64 MiB each, d wk and d wv of 16, d w1 and d w3 of 224.
    # The gradient of the result (for w2) was there before and stays; that of x is new, as in a whole backward.
    assert inputs.delta[0] == (4 * 64 + 2 * 16 + 2 * 224 + 64) * MIB


@pytest.mark.parametrize(("schedule", "in_flight"), [("1F1B", [2, 1]), ("GPipe", [4, 4])])
def test_activations_in_flight(schedule, in_flight):
    """Full recompute keeps one hidden state per layer (2 of 4) and micro-batch, and one for the stage's output."""
    ranks = memory_of(
        job("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4", "--training.seq_len=256",
            "--activation_checkpoint.mode=full", f"--parallelism.pipeline_parallel_schedule={schedule}", world_size=2)
    )  # fmt: skip
    for rank, count in zip(ranks, in_flight, strict=True):
        now = highest = 0
        for action in rank.actions:
            now += {"F": 1, "B": -1}[action.kind]
            highest = max(highest, now)
        assert highest == count
    hidden = 256 * 128 * 2
    assert ranks[0].stages[0].forward(gathers=False).total()["activations", "x"] == 3 * hidden


def _random_jobs(count: int) -> list[Job]:
    """Valid compositions; the seed is fixed."""
    draw = random.Random(0)
    jobs = []
    while len(jobs) < count:
        pp, tp, cp, shard, replicate = (draw.choice(sizes) for sizes in ((1, 1, 2), (1, 2), (1, 2), (1, 2, 3), (1, 2)))
        schedule = draw.choice(["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"])
        name, flavor = draw.choice([("llama3", "debug"), ("qwen2", "debug"), ("qwen3", "debug")])
        is_split = pp > 1 and schedule == "ZBVZeroBubble"  # which composes with less
        recompute = draw.choice(["none"] if is_split else ["none", "selective", "full"])
        reduced, always = draw.choice(["float32", "bfloat16"]), [] if is_split else ["always"]
        rows = draw.choice([4, 8]) if pp > 1 else draw.choice([1, 3])
        argv = [
            f"--model.name={name}", f"--model.flavor={flavor}", f"--training.local_batch_size={rows}",
            f"--parallelism.pipeline_parallel_degree={pp}", f"--parallelism.tensor_parallel_degree={tp}",
            f"--parallelism.context_parallel_degree={cp}", f"--parallelism.data_parallel_replicate_degree={replicate}",
            f"--training.mixed_precision_param={draw.choice(['float32', 'bfloat16'])}", "--training.seq_len=64",
            f"--activation_checkpoint.mode={recompute}", f"--training.mixed_precision_reduce={reduced}",
            f"--training.global_batch_size={rows * shard * replicate * draw.choice([1, 2, 5])}",
            f"--parallelism.fsdp_reshard_after_forward={draw.choice(['default', 'never', *always])}",
            f"--parallelism.data_parallel_shard_degree={shard}",
        ]  # fmt: skip
        argv += [f"--parallelism.pipeline_parallel_schedule={schedule}"] if pp > 1 else []
        if len(jobs) % 3 == 0 and shard < 3:
            recipe = draw.choice(["tensorwise", "rowwise", "rowwise_with_gw_hp"])
            gathers = recipe == "tensorwise" and draw.random() < 0.5
            argv += ["--float8.enable", f"--float8.recipe={recipe}", "--float8.filter_fqns=layers.1."]
            argv += ["--float8.enable_fsdp_float8_all_gather"] * gathers
        jobs.append(job_of(load_config(argv), pp * tp * cp * shard * replicate))
    return jobs


def test_what_a_step_leaves_is_what_stays():
    """After the last backward only resident memory, the batch and receive buffers are there."""
    for run in _random_jobs(60):
        for memory in memory_of(run):
            left = memory.start.delta[0] + sum(segment.delta[0] for segment in memory.steps())
            buffers = sum(stage.receive_buffers for stage in memory.stages.values())
            buffers += left_gradients(memory.actions, memory.stages) * run.shape.hidden
            padding = left - memory.resident.total - run.input_bytes - buffers
            # Gradients are views of padded buffers.
            assert padding == (memory.resident.parameters - memory.resident.gradients if run.wrapped else 0), run
            assert memory.peak.allocated >= left
            assert sum(memory.peak.terms.values()) == memory.peak.allocated
            assert all(size > 0 for size in memory.peak.terms.values()), memory.peak.terms


def test_every_tensor_is_in_the_documentation():
    text = (ROOT / "docs/memory.md").read_text()
    words = set(re.findall(r"[\w.-]+", text))
    for run in _random_jobs(40):
        for memory in memory_of(run):
            for segment in (memory.start, *memory.steps()):
                for _, name in segment.total():
                    if not name.startswith(("gradient of ", "sum of ")):  # a parameter's name follows
                        plain = name.removeprefix("again ").removeprefix("d ").removesuffix(" at work")
                        assert plain in text or set(plain.split()) <= words, name


@pytest.mark.parametrize(
    ("world_size", "argv"),
    [
        (8, ["--model.flavor=8B", "--training.seq_len=8192", "--activation_checkpoint.mode=selective"]),
        (512, ["--job.config_file", str(ROOT / "train_configs/llama3_405b.toml")]),
    ],
)
def test_it_is_fast(world_size, argv):
    """Less than 5 ms: a core of 2024 takes 4.5 ms for 12,000 calls of functions in Python and what lies between."""
    config, calls = load_config(argv), Counter()
    memory_of(job_of(config, world_size))  # torch's tables of a schedule are looked up once
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        assert all(rank.peak.allocated for rank in memory_of(job_of(config, world_size)))
    finally:
        sys.setprofile(None)
    assert calls["call"] < 14_000


def test_a_cast_takes_nine_bytes_a_number_for_a_while():
    """An fp32 product with the scale, a copy of it within bounds, and the result: w2 of 8B reads 8192 x 14336."""
    shape = Shape(LLAMA_8B, 1, 8192, profile=TITAN_LIKE)
    names = frozenset({"w1", "w2"})
    ops = {op.name: op for op in cast_products(block_program(shape), shape, Float8("tensorwise", (names,)), names)}
    numbers, weight = 8192 * 14_336, 4096 * 14_336
    assert ops["w2 operands"].output[1] == numbers + weight
    assert ops["w2 operands"].output[1] + ops["w2 operands"].temporary[0] == 9 * numbers
    assert ops["w2"].saves == ("gate",) and "w3 operands" not in ops  # the layer keeps its input as it came


def test_tensor_parallel_ranks_keep_what_they_sent_in_float8():
    """One byte instead of two for what w1 and w3, and w2, have read: 8192 x 4096, and 8192 x 14336 / 2."""
    shape = Shape(LLAMA_8B, 1, 8192, tp=2, profile=TITAN_LIKE)
    names = frozenset({"w1", "w2", "w3"})
    ops = cast_products(block_program(shape), shape, Float8("tensorwise", (names,)), names)
    sizes = sizes_of(ops)
    assert {"n2 gathered", "w2 input", "n1 gathered"} <= kept(ops, "none")
    assert (sizes["n2 gathered"], sizes["w2 input"]) == (8192 * 4096, 8192 * 14_336 // 2)
    assert sizes["n1 gathered"] == 2 * 8192 * 4096


def test_weights_that_are_gathered_in_float8_take_a_byte_each():
    """A block of 8B: 218,103,808 numbers in matrices, two norms of 4096 in bf16."""
    float8 = ["--float8.enable", "--float8.filter_fqns=output", "--float8.enable_fsdp_float8_all_gather"]
    stage = memory_of(job("--model.flavor=8B", *float8))[0].stages[0]
    assert stage.groups["block"][0].gathered(8, 2) == 218_103_808 + 2 * 2 * 4096


def test_fewer_ranks_hold_more():
    run = job("--model.flavor=8B")
    small, large = (memory_of(replace(run, fsdp=ranks))[0].peak.allocated for ranks in (8, 64))
    assert large < small


def test_attention_on_a_cpu_is_cut_as_the_trainer_cuts_it():
    assert (program.KEYS, program.LONGEST) == (documents.KEYS, documents.LONGEST)
