"""The tables in docs/ are those of the code."""

import importlib.util
from pathlib import Path

import pytest

from titan_like.config.composition import FEATURES, RULES, Rule, features_of

REPO = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_docs", REPO / "scripts" / "make_docs.py")
assert spec and spec.loader
make_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_docs)


@pytest.mark.parametrize("page", make_docs.PAGES)
def test_the_committed_page_is_the_generated_one(page: str) -> None:
    text = (REPO / "docs" / page).read_text()
    assert make_docs.insert(text, make_docs.PAGES[page]()) == text, "run: python scripts/make_docs.py"


def test_check_tells_a_stale_page_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "a.md"
    page.parent.mkdir()
    page.write_text(f"head\n{make_docs.BEGIN}\nold\n{make_docs.END}\nfoot\n")
    monkeypatch.setattr(make_docs, "REPO", tmp_path)
    monkeypatch.setattr(make_docs, "PAGES", {"a.md": lambda: "new\n"})
    assert make_docs.main(["--check"]) == 1
    assert "docs/a.md is not what the code says" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert make_docs.main([]) == 0
    assert page.read_text() == f"head\n{make_docs.BEGIN}\n\nnew\n\n{make_docs.END}\nfoot\n"
    assert make_docs.main(["--check"]) == 0


def test_the_settings_turn_on_the_feature_that_they_stand_for() -> None:
    assert list(make_docs.SETTINGS) == list(FEATURES)
    assert features_of(make_docs.make_config({})) == set()
    for feature, settings in make_docs.SETTINGS.items():
        assert feature in features_of(make_docs.make_config(settings))
        assert make_docs.broken_rules(make_docs.make_config(settings)) == [], "a feature can be used alone"


def test_cells_of_the_matrix() -> None:
    number = {rule.features: n for n, rule in enumerate(RULES, 1)}
    cell = make_docs.verdict
    assert cell("tensor", "pipeline") == "yes"
    refused = f"refused ({number['pipeline, split backward', 'compile']})"
    assert cell("compile", "pipeline, split backward") == cell("pipeline, split backward", "compile") == refused
    three = f"refused ({number['tensor', 'selective recompute (op)', 'compile']})"
    assert cell("async tensor", "selective recompute (op)") == three, "async tensor brings tensor and compile along"
    assert cell("tensor", "selective recompute (op)") == "yes"
    assert cell("full recompute", "selective recompute (op)") == "-", "two values of one key"
    assert cell("context", "context, alltoall") == "-", "one is a kind of the other"


def test_every_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (Rule(("tensor", "context", "pipeline"), "it is too much"), Rule(("replicate", "compile"), "no"))
    monkeypatch.setattr(make_docs, "RULES", rules)
    text = make_docs.composition_tables()
    assert "- tensor + context + pipeline: refused (1)\n" in text
    assert "1. tensor + context + pipeline: it is too much.\n2. replicate + compile: no.\n" in text


def test_a_pipe_does_not_end_a_cell() -> None:
    assert make_docs.code("a|b") == "`a\\|b`"
