"""Plans of compiled blocks: each kind once, however many traces ask for it."""

from collections import Counter
from dataclasses import replace

import pytest

from estimation import compiled
from estimation.extrapolate import trace_some_layers
from estimation.trace import trace
from tests.distributed.compositions import composition


def test_traces_of_few_layers_share_the_plan_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three traces, and of each block one forward and one backward; they tell what the whole trace does."""
    plans: Counter[str] = Counter()
    for name in ("_forward", "_backward"):

        def counted(*arguments: object, name: str = name, plan: object = getattr(compiled, name)) -> object:
            plans[name] += 1
            return plan(*arguments)

        monkeypatch.setattr(compiled, name, counted)
    config = composition("compile=true layers=8 recompute=selective")
    told = trace_some_layers(config, 2, 0, gpu=True)
    assert plans == {"_forward": 1, "_backward": 1}
    whole = trace(config, 2, 0, gpu=True)
    assert plans == {"_forward": 2, "_backward": 2}  # nothing outlives an answer: other settings may differ
    assert told == replace(whole, reserved_bytes=told.reserved_bytes)


def test_every_trace_says_that_a_block_could_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no cut today")

    monkeypatch.setattr("torch._inductor.compile_fx.partition_fn", fail)
    told = trace_some_layers(composition("compile=true layers=8"), 2, 0, gpu=False)
    assert told is not None
    notes = [note for note in told.not_included if note.startswith("compilation")]
    assert notes == ["compilation: a block is traced as it is, for RuntimeError: no cut today"]
