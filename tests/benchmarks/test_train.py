import argparse
import io
import json
import math
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks import checkpoint, data, data_prepare, overhead, train
from benchmarks.peers import bare, ours
from benchmarks.peers.gate import Gate, Task
from titan_like.config import load_config
from titan_like.trainer import Trainer


def task(folder: Path, **changes: object) -> Task:
    values = dict(
        contender="", shape={}, seq_len=3, batch=4, warmup=2, turn=2, turns=2, processes=2, compiled=False,
        packed=False, lr=1e-3, corpus="", rows=str(folder / "rows.npy"), folder=str(folder),
    )  # fmt: skip
    return Task(**{**values, **changes})  # type: ignore[arg-type]


def test_a_rank_gets_its_rows_of_each_step(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(24)[:, None].repeat(4, 1))  # row k is k, k, k, k
    batches = task(tmp_path).batches(rank=1)
    assert [batch[:, 0].tolist() for batch in batches] == [[4 * step + 2, 4 * step + 3] for step in range(6)]


def test_only_the_turns_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1, 2, 4, 8, 16 and 32 CPU seconds, of which two are warm-up and each turn has two; waiting costs 100."""
    now = 0.0
    channel = io.StringIO()

    def wait() -> str:
        nonlocal now
        now += 100
        return "go\n"

    monkeypatch.setattr("benchmarks.peers.gate._cpu_seconds", lambda: now)
    monkeypatch.setattr("sys.stdin.readline", wait, raising=False)
    gate = Gate(task(tmp_path), channel)
    for number in range(6):
        gate.next()
        now += 2**number
    gate.finish(loss=1.5)
    messages = [json.loads(line) for line in channel.getvalue().splitlines()]
    assert [list(message) for message in messages[:2]] == [["first_step_at", "first_step_cpu"], ["ready"]]
    assert messages[0]["first_step_cpu"] == 1
    assert messages[2:5] == [{"turn_cpu": 4 + 8}, {"turn_cpu": 16 + 32}, {"loss": 1.5}]
    assert messages[5]["peak_bytes"] > 2**20


def test_the_last_line_gives_ratios_to_the_best_loop_and_to_each_peer() -> None:
    def ran(*rates: float) -> train.Result:
        return train.Result(tokens_per_cpu_second=list(rates))

    results = {
        "eager": {
            "titan_like": ran(100, 120, 110),
            "bare": ran(100, 100, 100),
            "bare, chunked loss": ran(200, 100, 110),
            "litgpt": ran(50, 80, 55),
            "torchtitan": train.Result(reason="No module named 'torchtitan'"),
        },
        "compiled": {
            "titan_like": ran(110, 121, 132),
            "bare": train.Result(reason="no compiler"),
            "litgpt, eager": ran(55, 110, 66),
            "transformers, eager": ran(10, 10, 10),
        },
        "fsdp2": {"titan_like": ran(1, 1, 1), "litgpt": train.Result(reason="no GPU")},
    }
    # Round by round: to the better loop (median 110) 0.5, 1.2, 1; to litgpt 2, 1.5, 2; compiled 2, 1.1, 2.
    assert train.summary(results) == (
        "titan_like / it: eager: best bare loop (bare, chunked loss) 1.00, litgpt 2.00; "
        "compiled: best eager peer (litgpt) 2.00; fsdp2: n/a"
    )


def test_a_page_says_what_a_results_file_says(tmp_path: Path) -> None:
    results = {
        "eager": {
            "titan_like": train.Result([100, 110], [5.0, 4.0], 2**30, 3.25),
            "bare": train.Result([200, 100], [3.0, 3.5], 2**29, 3.5),
            "litgpt": train.Result(reason="no wish"),
        }
    }
    about = {
        "cpu": "a CPU",
        "cores": 2,
        "time": "2026-01-02 03:04:05",
        "versions": {"peers": {"python": "3.11", "torch": "2.13.0"}},
    }
    path = train.write(tmp_path / "results" / "a.json", about, results)
    page = train.insert(f"head\n{train.BEGIN}\nold\n{train.END}\nfoot\n", train.report(path))
    assert page.splitlines() == [
        "head",
        train.BEGIN,
        "",
        "Measured on: a CPU, 2 cores, Python 3.11, torch 2.13.0; 2026-01-02.",
        "",
        "| eager      | tok/s | range      | titan_like / it     | first step | peak     | loss  |",
        "| ---        | ---:  | ---:       | ---:                | ---:       | ---:     | ---:  |",
        "| titan_like | 105   | 100 to 110 |                     | 4.0 s      | 1.00 GiB | 3.250 |",
        "| bare       | 150   | 100 to 200 | 0.80 (0.50 to 1.10) | 3.0 s      | 0.50 GiB | 3.500 |",
        "| litgpt     | n/a   |            |                     |            |          |       |",
        "",
        "litgpt: n/a (no wish)",
        "",
        "`titan_like / it: eager: best bare loop (bare) 0.80`",
        "",
        train.END,
        "foot",
    ]
    assert train.insert(page, train.report(path)) == page


def test_the_committed_page_shows_the_committed_results() -> None:
    path, page = train.REPOSITORY / "benchmarks" / "results" / "train.json", train.PAGE.read_text()
    if not path.exists():
        pytest.skip("not measured yet")
    assert train.insert(page, train.report(path)) == page, "run: python benchmarks/train.py --docs"


@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        (train, "--quick --peers_python /nosuch", "--peers_python /nosuch is no Python that runs"),
        (train, "--quick --peers_python /bin/echo", "--peers_python /bin/echo is no Python that runs"),
        (train, "--contenders foo", "invalid choice: 'foo' (choose from"),
        (train, "--contenders litgpt --modes eager packed", "mode packed has none of --contenders; it has: titan"),
        (train, "--quick --steps 0", "--steps: '0' is not a whole number from 1"),
        (train, "--quick --rounds 0", "--rounds: '0' is not a whole number from 1"),
        (train, "--quick --docs", "leave --quick or --docs out"),
        (train, "--results /proc/new", "but nothing can be written to /proc"),
        (overhead, "--rounds 1", "--rounds: '1' is not a whole number from 2"),  # quartiles of one
        (data, "--tokens -1", "--tokens: '-1' is not a whole number from 100,000"),
        (data_prepare, "nosuch.model", "cannot read the tokenizer nosuch.model"),
        (checkpoint, "--folder /nosuch/x", "--folder /nosuch/x cannot be written"),
        (checkpoint, "--megabytes 0", "--megabytes: '0' is not a whole number from 1"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    program: ModuleType, options: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["program", *options.split()])
    with pytest.raises(SystemExit) as caught:
        program.main()
    told = capsys.readouterr()
    assert caught.value.code == 2 and words in told.err.splitlines()[-1] and told.out == ""


def test_contenders_choose_their_modes_and_quick_leaves_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--contenders", "titan_like, dense mask"])
    assert train.parse()[0].modes == ["packed"]
    monkeypatch.setattr("sys.argv", ["train.py", "--quick", "--rounds", "2"])
    args, _ = train.parse()
    assert (args.rounds, args.starts, args.modes, args.results) == (2, 1, ["eager", "packed"], None)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_quick_run_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--quick", "--modes", "eager", "packed", "--results", str(tmp_path)])
    started = time.time()
    train.main()
    elapsed = time.time() - started
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"titan_like / it: eager: best bare loop \(bare.*\) \d\.\d\d; packed: titan_like, dense mask \d\.\d\d", last
    ), last
    found = json.loads((tmp_path / "train.json").read_text())
    assert found["environment"]["versions"]["titan_like"]["torch"]
    eager, packed = found["modes"]["eager"], found["modes"]["packed"]
    for result in (*eager.values(), *packed.values()):
        assert result["reason"] == ""
        assert result["peak_bytes"] > 100 * 2**20
        assert 0 < result["first_step_seconds"][0] < elapsed
        assert 0 < result["tokens_per_cpu_second"][0] < 1e7
    # Both losses by hand are the same, and so are both ways to keep documents apart; all begin near log(vocabulary).
    assert eager["bare"]["loss"] == pytest.approx(eager["bare, chunked loss"]["loss"], rel=1e-5)
    assert packed["titan_like"]["loss"] == pytest.approx(packed["titan_like, dense mask"]["loss"], rel=1e-5)
    assert eager["titan_like"]["loss"] == pytest.approx(eager["bare"]["loss"], abs=0.1)
    assert eager["titan_like"]["loss"] < math.log(128) + 0.1


@pytest.mark.slow
@pytest.mark.distributed
def test_a_peer_that_is_missing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--quick", "--modes", "eager", "--contenders", "litgpt", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["train.py", *quick, "--peers_python", sys.executable])
    train.main()
    assert "litgpt: n/a (No module named 'litgpt')" in capsys.readouterr().out


def test_the_loop_by_hand_trains_as_the_trainer_does(tmp_path: Path) -> None:
    """With the same weights and tokens, both losses of every step are the same."""
    arguments = argparse.Namespace(quick=True, steps=2, rounds=2)
    todo = train.task_maker(train.Mode(()), tmp_path / "run", arguments)("titan_like", 0)
    trainer = Trainer(load_config(ours.arguments(todo)))
    given = dict(trainer.model.named_parameters())
    model = bare.Model(**todo.shape, seq_len=todo.seq_len, chunked=True)
    with torch.no_grad():
        model.embedding.weight.copy_(given["tok_embeddings.weight"])
        model.head.weight.copy_(given["output.weight"])
        for number, block in enumerate(model.blocks):
            for linear, names in BLOCK.items():
                weights = [given[f"layers.{number}.{name}.weight"].detach() for name in names]
                block.get_parameter(f"{linear}.weight").copy_(torch.cat(weights))
    losses = list(bare.losses(model, todo))
    trainer.fit()
    trainer.close()
    lines = (Path(todo.folder) / "metrics.jsonl").read_text().splitlines()
    assert losses == pytest.approx([json.loads(line)["loss"] for line in lines], rel=1e-5)
    assert len(losses) == todo.steps


BLOCK = {
    "qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "out": ("attention.wo",),
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
}
