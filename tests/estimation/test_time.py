"""Step time: every part by hand, and rules that hold for all compositions."""

import json
from dataclasses import replace
from itertools import pairwise, product
from math import isfinite

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from estimation.devices import DEVICES, Device
from estimation.job import Job, job_of
from estimation.profiles import TITAN_2024_12, TITAN_LIKE
from estimation.program import block_program
from estimation.schedules import single_stage, torch_tables
from estimation.time.block import coster_of, loss_traffic, traffic
from estimation.time.network import BASE, LINK_STEP, NETWORK_STEP, Group, Network
from estimation.time.overlap import FSDP, Work, overlapped
from estimation.time.pipeline import simulate
from estimation.time.speed import EAGER_SHARE, FUSED_SHARE, LAUNCH, Speed, waves
from estimation.time.step import step_time
from estimation.time.timeline import timeline, write_trace
from estimation.time.way import Way, way_of
from titan_like.config import ConfigError, load_config
from titan_like.models.decoder import Block, rope_frequencies
from titan_like.models.flavors import flops_per_token, resolve

MADE_UP = Device("made up", 80, 100, 0.5, 1.0, 100, 10, memory_share=0.5, units=128)
H100 = DEVICES["h100-sxm"]
DOCUMENTS = "--data.reset_attention_mask"


def job(*argv: str, world_size: int = 8) -> Job:
    return job_of(load_config(["--model.flavor=8B", "--training.seq_len=8192", *argv]), world_size)


def seconds(*argv: str, world_size: int = 8, device: Device = H100) -> float:
    config = load_config(["--model.flavor=8B", "--training.seq_len=8192", *argv])
    return step_time(job_of(config, world_size), device, way_of(config)).seconds


def test_kernels_by_hand():
    """4096 cubed on 128 units: 1024 tiles of 128 x 128, 8 full rounds; 50e12 operations and 0.5e12 bytes a second."""
    assert Speed(MADE_UP).product(4096, 4096, 4096, 2) == pytest.approx(2 * 4096**3 / 50e12)
    assert Speed(MADE_UP).moving(1e9) == pytest.approx(LAUNCH + 1e9 / 0.5e12)
    # One row: its weights are read, 4096 x 4096 x 2 bytes.
    assert Speed(MADE_UP).product(1, 4096, 4096, 2) == pytest.approx(LAUNCH + 2 * (4096**2 + 2 * 4096) / 0.5e12)


def test_kernels_of_a_compiled_ffn_between_two_norms_take_what_was_measured():
    """Llama 3 8B, 8192 tokens, on the 500 W H100: 3.078 ms beside the products (float8_experimental pull request 298).

    17 bf16 numbers of each of 8192 x 4096: the first norm reads and writes one, the second reads its two parts and is
    summed up at once; backward 3 and 2 of the second norm, 5 and 3 of the first. 8 of 8192 x 14336: the gate 3 and 5.
    Gradients of three weights and of the input are added to those of the step before: 3 numbers each.
    """
    speed = Speed(DEVICES["h100-96gb-500w"])
    moved = 2 * (17 * 8192 * 4096 + 8 * 8192 * 14336)
    added = 2 * 3 * (3 * 4096 * 14336 + 8192 * 4096)
    plain = speed.moving(moved, FUSED_SHARE) + speed.moving(added)
    assert plain == pytest.approx(3.078e-3, rel=0.02)
    # With dynamic scaling in float8, 4.30 ms: inputs and gradients of w1, w3 and w2 are cast, and their weights.
    casts = 4 * 3 * (8192 * 4096 + 8192 * 14336) + 8 * 3 * 4096 * 14336
    assert plain + speed.moving(casts) == pytest.approx(4.30e-3, rel=0.07)


def test_kernels_of_an_eager_norm_take_what_was_measured():
    """2048 x 16384 fp32 numbers: 0.4825 ms for a square, a mean and two products (pytorch issue 141916, llama_rms)."""
    speed, numbers = Speed(DEVICES["h100-96gb-500w"]), 2048 * 16384
    kernels = (8 * numbers, 4 * numbers, 8 * numbers, 8 * numbers)
    assert sum(speed.moving(size, EAGER_SHARE) for size in kernels) == pytest.approx(0.4825e-3, rel=0.02)


def test_rounds_of_tiles():
    """128 x 384 on 4 units: two tiles of 128 x 256, or three of 128 x 128, which use three quarters."""
    assert waves(128, 384, 4) == 0.75
    assert waves(128, 512, 4) == 1.0


def test_collectives_by_hand():
    """80 % of 100 GB/s in a node; 8 nodes apart the group has one adapter of 10 GB/s, 4 apart two."""
    network = Network(MADE_UP)
    assert network.gather(800e6, Group(8, 1)) == pytest.approx(BASE + 7 * LINK_STEP + 700e6 / 80e9)
    assert network.gather(800e6, Group(4, 8)) == pytest.approx(BASE + 3 * NETWORK_STEP + 600e6 / 8e9)
    assert network.gather(800e6, Group(8, 4)) == pytest.approx(BASE + 4 * LINK_STEP + 3 * NETWORK_STEP + 700e6 / 16e9)
    assert network.gather(800e6, Group(1, 1)) == 0


def test_the_next_gathering_hides_behind_this_unit():
    """Gather A 0-1, A 1-4, gather B 1-3, B 4-6: one second is exposed."""
    found = overlapped([Work("A", 3, gather=1), Work("B", 2, gather=2)], 0.0)
    assert (found.seconds, found.parts[FSDP]) == (6, 1)


def test_one_reduction_is_in_flight():
    """A 0-2, its reduction 2-5; B 2-3 waits until 5 with its own, which ends at 8."""
    found = overlapped([Work("A", 2, reduce=3), Work("B", 1, reduce=3)], 0.0)
    assert (found.seconds, found.parts[FSDP]) == (8, 5)


def test_communication_slows_what_runs_beside_it():
    """Two seconds of gathering take a quarter of the units from A: half a second is lost."""
    found = overlapped([Work("A", 3), Work("B", 1, gather=2)], 0.25)
    assert found.seconds == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("name", "virtual", "bubble"),
    [  # of P ranks and M micro-batches, forward : backward = 1 : 2 (Primus, pipeline table)
        ("GPipe", 1, lambda p, m: (p - 1) / (m + p - 1)),
        ("1F1B", 1, lambda p, m: (p - 1) / (m + p - 1)),
        ("Interleaved1F1B", 2, lambda p, m: (p - 1) / (2 * m + p - 1)),
        ("LoopedBFS", 2, lambda p, m: (p - 1) / (2 * m + p - 1)),
        ("ZBVZeroBubble", 2, lambda p, m: (p - 1) / (6 * m + p - 1)),
    ],
)
@pytest.mark.parametrize(("ranks", "batches"), [(4, 8), (8, 16)])
def test_bubbles_are_those_of_the_formulas(name, virtual, bubble, ranks, batches):
    if virtual == 1:
        actions = [single_stage(name, ranks, rank, batches) for rank in range(ranks)]
    else:
        actions = torch_tables(name, ranks, virtual, batches)
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    ran = simulate(actions, ranks * virtual, {a: cost[a.kind] for row in actions for a in row}, 0.0)
    end = max(row[-1].end for row in ran)
    assert 1 - 3 * batches * virtual / end == pytest.approx(bubble(ranks, batches))


def test_a_schedule_that_waits_for_itself_is_told():
    backward_first = [single_stage("1F1B", 1, 0, 1)[::-1]]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(backward_first, 1, dict.fromkeys(backward_first[0], 1.0), 0.0)


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        (["--training.global_batch_size=32"], 8),
        (["--parallelism.tensor_parallel_degree=8", "--activation_checkpoint.mode=full"], 64),
        (["--parallelism.context_parallel_degree=2", "--compile.enable"], 16),
        (["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8"], 8),
        (["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8", "--compile.enable",
          "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], 8),
    ],
)  # fmt: skip
def test_the_parts_are_the_step(argv, world_size):
    """The parts of a pass sum to its seconds, and those of the step to the timeline's end."""
    described = job(*argv, world_size=world_size)
    step = step_time(described, H100, Way())
    assert step.parts.total == pytest.approx(step.seconds) and min(step.parts.values()) >= -1e-12
    for stage in step.stages:
        for kind, flag in (("F", True), ("B", False)):
            assert stage.run(kind, flag).parts.total == pytest.approx(stage.run(kind, flag).seconds)
    tokens = described.batch_rows * described.accumulation * 8192 * described.replicate * described.fsdp / described.cp
    assert step.tokens_per_second == pytest.approx(tokens / step.seconds / world_size)
    assert step.mfu == pytest.approx(flops_per_token(described.model, 8192) * step.tokens_per_second / 989e12)
    assert (step.bubble > 0) == (described.pp > 1) and step.bubble < 0.5


@pytest.mark.parametrize("documents", ["", "--data.reset_attention_mask"])
@pytest.mark.parametrize("flavor", ["8B", "1B"])
@pytest.mark.parametrize("compiled", ["", "--compile.enable"])
def test_every_valid_composition_has_a_time(documents, flavor, compiled):
    """Heads of keys that are repeated or not, and all recomputes; what the trainer refuses is left out."""
    found = 0
    recompute = ("mode=none", "mode=full", "mode=selective", "mode=selective selective_ac_option=2")
    for cp, tp, dtype, heads, again in product((1, 2), (1, 2), ("bfloat16", "float32"), (8, 32), recompute):
        argv = [
            f"--model.flavor={flavor}", f"--model.overrides.n_kv_heads={heads}",
            f"--parallelism.context_parallel_degree={cp}", f"--parallelism.tensor_parallel_degree={tp}",
            f"--training.mixed_precision_param={dtype}", documents, compiled,
            *(f"--activation_checkpoint.{part}" for part in again.split()),
        ]  # fmt: skip
        try:
            config = load_config([option for option in argv if option])
        except ConfigError:
            continue
        step = step_time(job_of(config, 8), H100, way_of(config))
        assert isfinite(step.seconds) and step.seconds > 0 and min(step.parts.values()) >= -1e-12, argv
        found += 1
    assert found >= 48


def memory_bound(described: Job, *names: str) -> tuple[float, float]:
    """Seconds of the memory-bound part of operations of a block, forward and backward."""
    coster, ops = coster_of(described, Way(), MADE_UP), block_program(described.shape)
    chosen = [op for op in ops if op.name in names]
    forward, backward = (
        sum(work(op, ops)["memory-bound"] for op in chosen) for work in (coster._forward, coster._inputs)
    )
    return forward, backward


def test_norms_and_sums_of_a_compiled_block_by_hand():
    """Per number of 8192 x 4096, of two bytes: the norms read and write x, and read x and the
    result of attention and write, the last sum reads three and writes. Backward, the kernels for the inputs read x, the
    three gradients of wq, wk and wv, that of the sum, and write; x and attention's result, two gradients and that of
    the block, and write; those for the weights x and three gradients; x, attention's result and two gradients."""
    names = ("n1", "n2", "residual 1", "residual 2", "wq", "wk", "wv", "w1", "w3")
    forward, backward = memory_bound(job("--compile.enable"), *names)
    number = 2 * 8192 * 4096 / (0.5e12 * FUSED_SHARE)
    assert forward == pytest.approx((2 + 3 + 4) * number, abs=5 * LAUNCH)
    assert backward == pytest.approx((6 + 6 + 4 + 4) * number, abs=8 * LAUNCH)


def test_recompute_per_operation_writes_the_gate_in_the_kernel_that_reads_its_inputs():
    described = job("--compile.enable")
    coster, ops = coster_of(described, Way(), MADE_UP), block_program(described.shape)
    (gate,) = (op for op in ops if op.name == "gate")
    number = 2 * 8192 * 14336 / (0.5e12 * FUSED_SHARE)
    for mode, numbers in (("op", 1), ("full", 3)):
        assert coster._again(gate, ops, mode).total == pytest.approx(LAUNCH + numbers * number)


def test_complex_rotary_positions_are_the_same_kernels_in_a_compiled_block():
    """A cast (2 + 4 bytes), a product (4 + 4), a cast (4 + 2); without complex numbers one kernel reads and writes."""
    plain = job("--compile.enable")
    complexes = replace(plain, profile=TITAN_2024_12)
    queries = 8192 * 4096
    for described, size, share in ((plain, 4, FUSED_SHARE), (complexes, 20, EAGER_SHARE)):
        forward, backward = memory_bound(described, "q")
        assert forward == backward == pytest.approx(LAUNCH + queries * size / (0.5e12 * share))


@pytest.mark.parametrize(("rows", "copied"), [(1, 1), (2, 2)])
def test_messages_of_tensor_parallelism_are_copied(rows, copied):
    """A sum's input always; what was gathered where there are several sequences. Backward, the other way round."""
    described = job("--parallelism.tensor_parallel_degree=2", f"--training.local_batch_size={rows}", world_size=2)
    forward, backward = memory_bound(described, "n1 gathered", "wo scattered")
    copy = LAUNCH + 2 * rows * 8192 * 4096 * 2 / 0.5e12
    assert forward == backward == pytest.approx(copied * copy)
    asynchronous = coster_of(described, Way(async_tensor=True), MADE_UP)
    ops = block_program(described.shape)
    (op,) = (op for op in ops if op.name == "n1 gathered")
    assert asynchronous._forward(op, ops)["memory-bound"] == 0


def test_cross_entropy_by_hand():
    """Per logit: a cast (2 + 4), three passes and a result (16); zeros (4), two passes over the gradient, one over the
    result, a gradient (16), a cast (6)."""
    shape = replace(job(), profile=replace(TITAN_LIKE, loss="whole")).shape
    assert loss_traffic(shape) == (8192 * 128256 * 22, 8192 * 128256 * 26)


def test_an_optimizer_of_single_operations_reads_and_writes_twenty_numbers():
    """In one kernel seven; clipping reads twice and writes. 8B over 8 GPUs, four bytes a number."""
    described = job()
    fused, foreach = (
        step_time(described, MADE_UP, Way(update=kind)).parts["clipping and optimizer"] for kind in ("fused", "foreach")
    )
    share = 8030261248 / 8
    assert fused == pytest.approx(share * 4 * (3 + 7) / 0.5e12, rel=1e-3)
    assert foreach - fused == pytest.approx(share * 4 * 13 / 0.5e12, rel=1e-3)
    assert way_of(load_config(["--optimizer.implementation=foreach"])).update == "foreach"
    assert way_of(load_config([])).update == "fused"


def test_layouts_of_float8_weights_by_hand():
    """Bytes of a weight: read for its maximum and twice to be cast, two results (8), again without the maximum and in
    one layout (4); gathered in float8, a layout (2)."""
    described = job("--compile.enable")
    (w1,) = (op for op in block_program(described.shape) if op.name == "w1")
    inputs, gradients, weight = 8192 * 4096 * 4, 8192 * 14336 * 4, 4096 * 14336
    for gathered, again, expected in ((False, False, (8, 0)), (False, True, (8, 4)), (True, True, (2, 2))):
        way = Way(float8=True, float8_gather=gathered, float8_again=again)
        forward, backward = coster_of(described, way, H100)._casts(w1)
        assert (forward - inputs, backward - gradients) == (expected[0] * weight, expected[1] * weight)


@pytest.mark.parametrize("compiled", [False, True])
def test_gathered_keys_and_values_by_hand(compiled):
    """Two ranks of 4096 of 8192 tokens, 8 of 32 heads of 128 numbers, 32 blocks: keys and values are gathered, and
    their gradients scattered. Each is put in order, and its heads repeated four times; compiled, at once."""
    argv = ["--data.reset_attention_mask", "--parallelism.context_parallel_degree=2"]
    described = job(*argv, *(["--compile.enable"] if compiled else []), world_size=2)
    step, keys = step_time(described, MADE_UP, Way()), 8192 * 1024 * 2
    gather = BASE + LINK_STEP + keys / 2 / 80e9
    assert step.parts["context parallel (exposed)"] == pytest.approx(32 * 4 * gather)
    (op,) = (op for op in block_program(described.shape) if op.name == "k everywhere")
    seconds = coster_of(described, Way(), MADE_UP)._forward(op, [])["memory-bound"]
    assert seconds == pytest.approx(LAUNCH + ((0 if compiled else 2) + 1 + 4) * keys / 0.5e12)


def test_a_mask_is_written_in_every_block_and_hides_nothing_from_the_kernel():
    """8192 squared numbers of a bool and 4 bytes; under context parallelism half of them, which are there as bools."""
    plain, masked = (job("--training.mixed_precision_param=float32", *more) for more in ([], [DOCUMENTS]))
    cut = job(DOCUMENTS, "--parallelism.context_parallel_degree=2")
    mask, half = ([op for op in block_program(each.shape) if op.name == "mask"] for each in (masked, cut))
    assert traffic(mask[0], masked.shape) == (8192**2 * (4 + 4), 0)
    assert traffic(half[0], cut.shape) == (8192**2 / 2 * (1 + 2), 0)
    before, after = (step_time(each, H100, Way()).parts["attention"] for each in (plain, masked))
    assert after == pytest.approx(2 * before)


def test_products_have_the_operations_that_torch_counts():
    """A block's forward on meta, attention apart: torch counts its whole square there."""
    model = resolve("llama3", "debug")
    with torch.device("meta"):
        block, x = Block(model), torch.empty(2, 64, model.dim)
        angles = torch.empty(2, 64, 1, 1) * rope_frequencies(model, torch.device("meta"))
        with FlopCounterMode(display=False) as counter:
            block(x, angles.cos(), angles.sin(), None)
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op) and "bmm" not in str(op)
    )
    described = job_of(load_config(["--training.seq_len=64", "--training.local_batch_size=2"]), 1)
    assert counted == sum(op.flops for op in block_program(described.shape) if op.kind == "product")


def test_what_makes_a_step_slower():
    base = seconds()
    assert seconds("--activation_checkpoint.mode=full") > seconds("--activation_checkpoint.mode=selective") > base
    assert seconds("--compile.enable") < base
    assert seconds("--training.mixed_precision_param=float32") > 5 * base
    tensor = ["--parallelism.tensor_parallel_degree=8", "--compile.enable"]
    together = ["--parallelism.enable_async_tensor_parallel"]
    assert seconds(*tensor, *together, world_size=64) < seconds(*tensor, world_size=64)
    assert seconds(device=DEVICES["a100-80gb"]) > 2 * base


def test_full_recompute_repeats_the_forward_of_the_blocks():
    """Matrix products of 8B: the block's forward is a third of forward and backward; it runs again up to w1 and w3."""
    none, full = (step_time(job(f"--activation_checkpoint.mode={mode}"), H100, Way()) for mode in ("none", "full"))
    blocks = none.parts["matrix products"] / 3 * (32 * 218_103_808 / (32 * 218_103_808 + 128_256 * 4096))
    again = full.parts["recompute"] - none.parts["attention"] / 4
    assert 0.7 * blocks < again < 1.3 * blocks


def test_float8_needs_a_device_that_has_it():
    assert step_time(job(), H100, Way(float8=True)).seconds < step_time(job(), H100, Way()).seconds
    with pytest.raises(ConfigError, match="a100-80gb has no float8"):
        step_time(job(), DEVICES["a100-80gb"], Way(float8=True))


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_timeline_is_a_chrome_trace(tmp_path, pipelined):
    argv = ["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8"] if pipelined else []
    step = step_time(job(*argv), H100, Way())
    write_trace(tmp_path / "trace.json", step)
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["pid"] for event in events} == set(range(4 if pipelined else 1))
    for rank, track in {(event["pid"], event["tid"]) for event in events}:
        own = sorted((e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == (rank, track))
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in pairwise(own))
    assert max(each.start + each.seconds for each in timeline(step)) == pytest.approx(step.seconds, rel=0.05)
