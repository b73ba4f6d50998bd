#!/usr/bin/env python3
"""Write the tables in docs/ that follow from the code: python scripts/make_docs.py [--check]

docs/configuration.md lists the keys of titan_like/config/schema.py, docs/composability.md what the rules of
titan_like/config/composition.py allow. Only the text between the two markers of each file is replaced.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titan_like.config.composition import FEATURES, RULES, Rule, refusals
from titan_like.config.describe import SECTIONS, as_text, describe
from titan_like.config.schema import Config

REPO = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: written by scripts/make_docs.py -->", "<!-- end -->"

Settings = dict[str, Any]  # dotted key -> value
BASE: Settings = {"training.mixed_precision_param": "float32"}  # the one feature that is on by default
SETTINGS: dict[str, Settings] = {  # what turns each of FEATURES on, with what it cannot be without
    "replicate": {"parallelism.data_parallel_replicate_degree": 2},
    "shard (FSDP2)": {"parallelism.data_parallel_shard_degree": 2},
    "reshard always": {"parallelism.fsdp_reshard_after_forward": "always"},
    "tensor": {"parallelism.tensor_parallel_degree": 2},
    "context": {"parallelism.context_parallel_degree": 2},
    "context, alltoall": {
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_rotate_method": "alltoall",
    },
    "pipeline": {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "1F1B"},
    "pipeline, split backward": {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
    },
    "accumulation": {"training.global_batch_size": 8},
    "document masks": {"data.reset_attention_mask": True},
    "tied embeddings": {"model.overrides": {"tie_embeddings": True}},
    "full recompute": {"activation_checkpoint.mode": "full"},
    "selective recompute (op)": {"activation_checkpoint.mode": "selective"},
    "compile": {"compile.enable": True},
    "chunked loss": {"training.loss_chunks": 4},
    "z-loss": {"training.z_loss": 1e-4},
    "async tensor": {
        "parallelism.enable_async_tensor_parallel": True,
        "parallelism.tensor_parallel_degree": 2,
        "compile.enable": True,
    },
    "float8 tensorwise": {"float8.enable": True, "float8.recipe": "tensorwise"},
    "float8 rowwise": {"float8.enable": True, "float8.recipe": "rowwise"},
    "float8 all-gather": {"float8.enable": True, "float8.enable_fsdp_float8_all_gather": True},
    "bfloat16": {"training.mixed_precision_param": "bfloat16"},
}


def main(argv: Sequence[str]) -> int:
    """Write the files; with --check only tell which ones differ, and return 1 if any does."""
    is_check, stale = "--check" in argv, False
    for name, make in PAGES.items():
        path = REPO / "docs" / name
        text = path.read_text()
        new = insert(text, make())
        if new != text and is_check:
            print(
                f"{path.relative_to(REPO)} is not what the code says; run: python scripts/make_docs.py", file=sys.stderr
            )
            stale = True
        elif new != text:
            path.write_text(new)
            print(f"wrote {path.relative_to(REPO)}")
    return int(stale)


def insert(text: str, generated: str) -> str:
    """`text` with what lies between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def key_tables() -> str:
    """One table per section of the schema."""
    parts = []
    for section, model in SECTIONS.items():
        rows = [
            f"| `{name}` | {escape(describe(info))} | {code(as_text(info.default))} | {escape(str(info.description))} |"
            for name, info in model.model_fields.items()
        ]
        doc = " ".join((model.__doc__ or "").split())
        head = f"## [{section}]\n\n{doc}\n\n| key | allowed | default | meaning |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def composition_tables() -> str:
    """What each feature is, the matrix of pairs, the reasons, and the rules that are not about two."""
    names = list(FEATURES)
    numbers = {name: number for number, name in enumerate(names, 1)}
    features = [f"| {numbers[n]} | {n} | {'<br>'.join(map(shown, SETTINGS[n].items()))} |" for n in names]
    matrix = [f"| **{numbers[row]}** {row} | {' | '.join(verdict(row, column) for column in names)} |" for row in names]
    reasons = [f"{number}. {combination(rule)}: {rule.reason}." for number, rule in enumerate(RULES, 1)]
    others = [f"- {combination(r)}: refused ({n})" for n, r in enumerate(RULES, 1) if r.without or len(r.features) != 2]
    return "\n".join(
        [
            "## The features", "", "| | feature | for instance |", "|---|---|---|", *features, "",
            "## Two at a time", "",
            f"| | {' | '.join(str(numbers[n]) for n in names)} |", "|---" * (len(names) + 1) + "|", *matrix, "",
            "## Other rules", "",
            "What holds no refused pair and none of these is allowed, however many features it mixes:", "", *others, "",
            "## The reasons", "", *reasons, "",
        ]
    )  # fmt: skip


def verdict(first: str, second: str) -> str:
    """A cell: "yes", "refused (n)", or "-" where one is a kind of the other or both are values of one key."""
    merged = {**SETTINGS[first], **SETTINGS[second]}
    is_both = all(merged[key] == value for part in (first, second) for key, value in SETTINGS[part].items())
    if not is_both or first == second or related(first, second):
        return "-"
    broken = broken_rules(make_config(merged))
    return f"refused ({', '.join(map(str, broken))})" if broken else "yes"


def related(first: str, second: str) -> bool:
    """Whether one feature cannot be on without the other."""
    a, b = SETTINGS[first].items(), SETTINGS[second].items()
    return a <= b or b <= a


def make_config(settings: Settings) -> Config:
    tree: dict[str, Settings] = {}
    for key, value in {**BASE, **settings}.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def broken_rules(config: Config) -> list[int]:
    """Numbers, from 1, of the rules that the config check refuses `config` for."""
    said = refusals(config)
    return [number for number, rule in enumerate(RULES, 1) if any(rule.reason in text for text in said)]


def combination(rule: Rule) -> str:
    without = f", without {' and '.join(rule.without)}" if rule.without else ""
    return f"{' + '.join(rule.features)}{without}"


def shown(setting: tuple[str, Any]) -> str:
    key, value = setting
    return code(f"{key} = {as_text(value)}")


def code(text: str) -> str:
    return f"`{escape(text)}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {"configuration.md": key_tables, "composability.md": composition_tables}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
