"""Megatron's memory: against public golden values of its functional tests (commit d98e8a64), and by hand."""

from dataclasses import replace

import pytest

from estimation.megatron import MegatronRun
from estimation.megatron_rows import measured_rank, run_of
from estimation.profiles import NotCovered
from estimation.schedules import Action
from estimation.validate import score_row, summary

DETERMINISTIC = "deterministic-mode=True;no-gradient-accumulation-fusion=True"
SMALL = {  # tests/functional_tests/test_cases/gpt: a GPT of 12 layers
    "framework": "Megatron-LM/Core", "model": "gpt", "layers": "12", "dim": "512", "heads": "8", "kv_heads": "8",
    "ffn_dim": "2048", "vocab": "50257(gpt2 BPE, padded to mult of 128)", "seq_len": "1024", "gpu": "A100",
    "gpu_mem_GiB": "79.25", "dp_shard": "1", "dp_replicate": "1", "tp": "1", "sp": "0", "pp": "1", "cp": "1", "ep": "1",
    "pp_schedule": "", "micro_bs": "4", "grad_accum": "4", "global_bs": "32", "ac": "none", "precision": "bf16",
    "float8": "", "optimizer": "Adam replicated", "other_flags": DETERMINISTIC, "peak_mem_GiB": "",
    "mem_kind": "allocated, last rank", "resident_mem_GiB": "",
}  # fmt: skip
LARGE = {
    **SMALL, "layers": "32", "dim": "4096", "heads": "32", "ffn_dim": "16384", "vocab": "131073", "seq_len": "8192",
    "dp_replicate": "2", "optimizer": "Adam ZeRO-1",
    "other_flags": DETERMINISTIC + ";untie-embeddings-and-output-weights=True",
}  # fmt: skip
UNFUSED = DETERMINISTIC + ";attention-backend=unfused"
VIRTUAL = {"pp": "4", "pp_schedule": "Interleaved1F1B(layers_per_vstage=1,vstages=None)"}
EXPERTS = DETERMINISTIC + (
    ";swiglu=True;disable-bias-linear=True;num-experts=4;moe-router-topk=1;moe-grouped-gemm=True"
)
GOLDEN = [  # row, bytes between steps, bytes at the peak
    ({**LARGE, "tp": "4", "micro_bs": "2", "grad_accum": "2"}, 20634103808, 58188115968),
    ({**LARGE, "tp": "4", "micro_bs": "2", "grad_accum": "2", "gpu": "H100"}, 20663519232, 57143791616),
    ({**LARGE, **VIRTUAL, "micro_bs": "1"}, 24510808064, 60489064448),
    ({**SMALL, "other_flags": UNFUSED, **VIRTUAL, "dp_replicate": "2"}, 733860352, 4122704384),
    ({**SMALL, "other_flags": UNFUSED, **VIRTUAL, "grad_accum": "5"}, 733860352, 4596793344),
    ({**SMALL, "gpu": "GB200", "dp_replicate": "4", "ac": "full(uniform,n=1)"}, 1259751424, 2562383872),
    (
        {**SMALL, "gpu": "H100", "dp_replicate": "8", "layers": "4", "ffn_dim": "1344", "other_flags": EXPERTS},
        1384148992, 2956333056,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "resident", "peak"), GOLDEN)
def test_golden_values(row, resident, peak):
    run = run_of({**row, "kv_heads": "8"})
    memory = measured_rank(row, run)
    assert memory.resident == pytest.approx(resident, rel=0.01)
    assert memory.peak == pytest.approx(peak, rel=0.005)
    assert sum(memory.terms.values()) == memory.peak


def make(**changes: object) -> MegatronRun:
    return replace(run_of(SMALL), **changes)  # type: ignore[arg-type]


def test_bytes_of_a_parameter():
    """A layer of width d without biases of products: 12 d^2 in products; biases 9 d, norms 4 d; 18 bytes each."""
    d, table = 512, 50304 * 512
    numbers = 12 * (12 * d**2 + 13 * d) + table + 1024 * d + 2 * d
    assert make().weights(0).total() == 18 * numbers
    shared = make(shares_optimizer=True, dp=4)
    assert shared.weights(0).total() == 6 * numbers + 12 * numbers // 4
    assert make(half=True).weights(0).total() == 20 * numbers  # 4 of them until the next step
    last = make(pp=2).rank_numbers(1)  # a copy of the tied table, no positions
    assert sum(last) == 6 * (12 * d**2 + 13 * d) + table + 2 * d


def test_experts_share_the_optimizer_among_their_own_ranks():
    """8 experts over ep 4, etp 1 of tp 2 and dp 8: each rank has 2, whose optimizer 2 x 8 / 4 ranks share."""
    flags = {"num-experts": "8", "expert-tensor-parallel-size": "1", "disable-bias-linear": "True"}
    run = make(tp=2, dp=8, ep=4, shares_optimizer=True, flags={**run_of(SMALL).flags, **flags})
    assert run.rank_numbers(0)[2] == 12 * 2 * (2 * 512 * 2048)
    dense = sum(run.rank_numbers(0)[:2])
    assert run.weights(0)["optimizer"] == 12 * dense // 8 + 12 * run.rank_numbers(0)[2] // 4


def test_order_of_interleaved_stages():
    """Two ranks of two chunks, four micro-batches: rank 1 runs 2 forwards before its first pair, rank 0 two more."""
    actions = [f"{kind}{chunk}{i}" for kind, chunk, i in make(pp=2, chunks=2).actions(1)]
    assert actions[:8] == ["F00", "F01", "F10", "B10", "F11", "B11", "F02", "B00"]
    assert [kind for kind, *_ in make(pp=2, chunks=2).actions(0)].index("B") == 5
    # Five micro-batches on four ranks: groups of 4 would leave one over, so all five are a group.
    first = list(make(pp=4, chunks=2, micro_batches=5).actions(3))[:6]
    assert first[5] == Action("F", 1, 0)


def test_recompute_drops_what_it_names():
    """Scores: 5 bytes a number (softmax, mask, dropped); a whole layer leaves its input, T x d x 2 bytes."""
    run = make(flags={**run_of(SMALL).flags, "attention-backend": "unfused"})
    layers, scores, hidden = range(12), 4 * 8 * 1024**2 * 5, 4096 * 512 * 2
    assert run.stored(layers) - replace(run, modules=("core_attn",)).stored(layers) == 12 * scores
    assert replace(run, recompute=("uniform", 3)).stored(layers) == 4 * hidden
    assert replace(run, recompute=("block", 2)).stored(layers) == 2 * hidden + run.stored(range(10))
    mlp = hidden + 2 * 4 * hidden  # what the norm made, and 2 x 4 d
    assert run.stored(layers) - replace(run, modules=("mlp",)).stored(layers) == 12 * mlp


def test_parallelism_cuts_activations():
    """Sequence and tensor parallelism cut all of a layer, context parallelism the tokens."""
    run = make(flags={**run_of(SMALL).flags, "attention-backend": "fused"})
    whole = run.stored(range(1))
    assert replace(run, tp=2, sequence_parallel=True).stored(range(1)) * 2 == whole
    assert replace(run, cp=2).stored(range(1)) * 2 == whole
    assert replace(run, tp=2).stored(range(1)) * 2 > whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dim": ""}, "its dim"), ({"gpu": "TPU"}, "TPU"), ({"pp_schedule": "ZBV"}, "schedule ZBV"),
        ({"optimizer": "Muon"}, "optimizer Muon"), ({"other_flags": "cpu-offloading=True"}, "offload"),
        ({"pp": "5"}, "cannot be cut"), ({"mem_kind": "nvidia-smi"}, "nvidia-smi"), ({"ac": "some"}, "recompute"),
    ],
)  # fmt: skip
def test_what_is_not_modelled(changes, reason):
    with pytest.raises(NotCovered, match=reason):
        score_row(2, {**SMALL, "peak_mem_GiB": "4.0", **changes})


def test_rows_with_experts_in_a_column_and_summary_apart():
    row = {**SMALL, "ffn_dim": "moe 1024 x16 top2", "ep": "4", "dp_replicate": "4", "peak_mem_GiB": "100"}
    run = run_of(row)
    assert run.is_moe(3) and run.rank_numbers(0)[2] == 12 * 4 * (2 * 512 * 1024 + 1024 + 512)
    assert run.flags["moe-router-topk"] == "2"
    scores = score_row(2, {**row, "resident_mem_GiB": "50"})
    assert [(score.kind, score.profile) for score in scores] == [
        ("resident", "Megatron-LM (Transformer Engine)"), ("allocated", "Megatron-LM (Transformer Engine)"),
    ]  # fmt: skip
    assert "fit right 0 of 0; Megatron-LM: resident n 1" in summary(scores, [])
    assert summary(scores, [(3, "no")]).endswith("fit right 1 of 1; 2 rows: 1 scored, 1 left out")
