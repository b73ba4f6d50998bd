"""Every composition equals one process: titan_like/oracle.py says what is compared, compositions.py what is run."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.compositions import CSV, MATRIX, composition
from titan_like.config import load_config
from titan_like.config.composition import FEATURES, RULES, features_of
from titan_like.oracle import FLOAT8_OTHER_SCALES, FLOAT8_TOLERANCE, Report, launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]
LINES = [(processes, line) for processes, lines in MATRIX.items() for line in lines]
SELECTABLE = [  # a C++ compiler takes most of the time of compiled blocks
    pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=[pytest.mark.slow] if "compile=true" in pair[1] else [])
    for pair in LINES
]


@pytest.fixture(scope="module")
def csv_schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedule") / "by_hand.csv"
    path.write_text(CSV)
    return path


@pytest.fixture(scope="module")
def report_of(csv_schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Report]:
    """Runs a line once. Lines share compiled code."""
    inductor = tmp_path_factory.mktemp("inductor")

    @cache
    def run(processes: int, line: str) -> Report:
        case = {line: composition(line.format(csv=csv_schedule))}
        return launch(case, processes, inductor_cache=inductor)[0]

    return run


@pytest.mark.parametrize(("processes", "line"), SELECTABLE)
def test_composition_equals_one_process(processes: int, line: str, report_of: Callable[[int, str], Report]) -> None:
    report = report_of(processes, line)
    assert report.is_exact, report.table()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_of_a_larger_model_agrees_up_to_its_own_rounding(recipe: str) -> None:
    """In the compositions few numbers lie at a boundary of float8, here many: tests/quantize/test_float8.py."""
    options = ["--float8.enable", "--float8.emulate", "--float8.filter_fqns=output", "--training.seq_len=256"]
    options += [
        f"--float8.recipe={recipe}",
        "--training.local_batch_size=4",
        "--training.mixed_precision_param=float32",
    ]
    config = load_config([*options, "--parallelism.tensor_parallel_degree=2"])
    (report,) = launch({"debug": config}, 2)
    assert not report.problem
    assert max(report.loss, report.grad_norm) <= FLOAT8_TOLERANCE and report.gradient <= FLOAT8_OTHER_SCALES


# Public reports of faults in composition, and the line that would show each of them.
REPORTS = {
    "R002 labels that differ between data-parallel ranks": (2, "global=16"),
    "R006 a rank without any label": (2, "global=16"),
    "R090 clipping over pipeline stages": (4, "pp=4"),
    "R092 clipping over tensor-parallel and replicated parameters": (2, "tp=2 family=qwen3 recompute=selective"),
    "R093 a vocabulary that tensor parallelism does not divide": (2, "tp=2 loss_parallel=false vocab=257"),
    "R093 the same, with parallel loss": (4, "tp=4 kv=4 vocab=257"),
    "R097 labels at the cut of a sequence": (2, "cp=2"),
    "R099 documents of odd lengths over context-parallel ranks": (2, "cp=2 documents=true"),
    "R100 embeddings tied across stages": (2, "pp=2 tied=true layers=5 global=8"),
    "R105 accumulation under pipelining": (4, "pp=2 shard=2 schedule=1F1B global=16"),
    "R107 layers that stages do not divide": (2, "pp=2 tied=true layers=5 global=8"),
    "R115 replicas start with the same weights": (4, "replicate=2 global=32"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_public_report(report: str, report_of: Callable[[int, str], Report]) -> None:
    assert REPORTS[report] in LINES
    found = report_of(*REPORTS[report])
    assert found.is_exact, found.table()


def test_the_matrix_holds_every_pair_that_is_allowed(csv_schedule: Path) -> None:
    """What a pair of features needs to be allowed is to be shown exact somewhere."""
    seen = [features_of(composition(line.format(csv=csv_schedule))) for lines in MATRIX.values() for line in lines]
    refused = [set(rule.features) for rule in RULES if len(rule.features) <= 2 and not rule.without]
    gpu_only = {"async tensor"}
    exclusive = [
        {"pipeline", "pipeline, split backward"},
        {"full recompute", "selective recompute (op)"},
        {"float8 tensorwise", "float8 rowwise"},
    ]
    missing = [
        pair
        for pair in itertools.combinations(sorted(set(FEATURES) - gpu_only), 2)
        if not any(rule <= set(pair) for rule in [*refused, *exclusive]) and not any(set(pair) <= used for used in seen)
    ]
    assert missing == []
