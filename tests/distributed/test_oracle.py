"""Every composition equals one process; see titan_like/oracle.py for what is compared, compositions.py for what is run."""

import itertools
from pathlib import Path

import pytest

from tests.distributed.compositions import CSV, MATRIX, composition
from titan_like.config.composition import FEATURES, RULES, features_of
from titan_like.oracle import Report, launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
LINES = [(processes, line) for processes, lines in MATRIX.items() for line in lines]


@pytest.fixture(scope="module")
def csv_schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedule") / "by_hand.csv"
    path.write_text(CSV)
    return path


@pytest.fixture(scope="module")
def reports(csv_schedule: Path, request: pytest.FixtureRequest) -> dict[tuple[int, str], Report]:
    """All selected lines, one launch per number of processes: a torch process takes seconds to start."""
    chosen = {item.callspec.params["line"] for item in request.session.items if hasattr(item, "callspec") and "line" in item.callspec.params}
    found = {}
    for processes, lines in MATRIX.items():
        cases = {line: composition(line.format(csv=csv_schedule)) for line in lines if line in chosen}
        for report in launch(cases, processes) if cases else []:
            found[processes, report.name] = report
    return found


@pytest.mark.parametrize(("processes", "line"), LINES, ids=[f"{processes}-{line}" for processes, line in LINES])
def test_composition_equals_one_process(processes: int, line: str, reports: dict[tuple[int, str], Report]) -> None:
    report = reports[processes, line]
    assert report.is_exact, report.table()


def test_the_matrix_holds_every_pair_that_is_allowed(csv_schedule: Path) -> None:
    """What a pair of features needs to be allowed is to be shown exact somewhere."""
    seen = [features_of(composition(line.format(csv=csv_schedule))) for lines in MATRIX.values() for line in lines]
    refused = [set(rule.features) for rule in RULES if len(rule.features) <= 2 and not rule.without]
    gpu_only = {"async tensor"}
    exclusive = [{"pipeline", "pipeline, split backward"}, {"full recompute", "selective recompute (op)"}]
    missing = [
        pair
        for pair in itertools.combinations(sorted(set(FEATURES) - gpu_only), 2)
        if not any(rule <= set(pair) for rule in [*refused, *exclusive]) and not any(set(pair) <= used for used in seen)
    ]
    assert missing == []
