"""Which layers run in float8, and what is refused before any process starts."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel
from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

from titan_like.config import Config, ConfigError, load_config
from titan_like.config.checks import cross_checks
from titan_like.launch import check_settings
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import FLAVORS, resolve
from titan_like.parallel.tensor import BLOCK_PLAN
from titan_like.quantize.layers import CUT_BY_COLUMNS, float8_checks, float8_plan, grouped, is_small, linear_layers

ON = ("--float8.enable", "--float8.emulate")
ALL = (*ON, "--float8.filter_fqns=output")  # the filter by size is off
LLAMA = ("--model.name=llama3", "--model.flavor=8B")


def problems(*argv: str, world_size: int = 1) -> list[str]:
    """Of the settings, then of settings and model."""
    try:
        load_config(argv, lambda c: [*cross_checks(c), *float8_checks(shape_of(c), c, world_size)])
    except ConfigError as error:
        return error.problems
    return []


def shape_of(config: Config):
    return resolve(config.model.name, config.model.flavor, config.model.overrides)


def converted(*argv: str) -> set[str]:
    """By their name in a block."""
    config = load_config(argv)
    return {name.split(".", 2)[2] for name in float8_plan(shape_of(config), config).converted}


@pytest.mark.parametrize("family", FLAVORS)
def test_the_layers_are_those_of_the_decoder(family):
    shape = FLAVORS[family]["debug"]
    with torch.device("meta"):
        modules = Decoder(shape).named_modules()
    assert linear_layers(shape) == {name: tuple(m.weight.shape) for name, m in modules if isinstance(m, nn.Linear)}


def test_tensor_parallelism_cuts_them_as_its_plan_does():
    by_columns = {name for name, style in BLOCK_PLAN.items() if isinstance(style, RowwiseParallel)}
    assert by_columns == set(CUT_BY_COLUMNS)
    whole, part = linear_layers(FLAVORS["llama3"]["8B"]), linear_layers(FLAVORS["llama3"]["8B"], tp=4)
    assert (whole["layers.0.attention.wo"], part["layers.0.attention.wo"]) == ((4096, 4096), (4096, 1024))
    assert (whole["layers.0.attention.wk"], part["layers.0.attention.wk"]) == ((1024, 4096), (256, 4096))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_filter_by_size_is_that_of_torchao(recipe):
    takes = _auto_filter_for_recipe(recipe, filter_fqns=[])
    sizes = [512, 1024, 1040, 2048, 2064, 4096, 4112, 8192]
    for rows in sizes:
        for columns in sizes:
            layer = nn.Linear(columns, rows, bias=False, device="meta")
            assert takes(layer, "w") is not is_small(recipe, rows, columns), (rows, columns)


def test_the_default_filter_leaves_the_small_ones_and_the_head():
    # 8B: wk and wv are 1024 x 4096. Rowwise asks for more than 2048 rows as well; wq and wo are 4096 x 4096.
    large = {"attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        assert converted(*LLAMA, *ON, f"--float8.recipe={recipe}") == large
    # Four ranks multiply 1024 x 4096 of wq and 4096 x 1024 of wo.
    four = (*LLAMA, *ON, "--parallelism.tensor_parallel_degree=4")
    assert converted(*four) == large - {"attention.wq"}
    assert converted(*four, "--float8.recipe=rowwise") == {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}


def test_a_name_in_the_filter_stands_for_all_that_hold_it():
    assert converted(*LLAMA, *ON, "--float8.filter_fqns=attention,w2") == {"feed_forward.w1", "feed_forward.w3"}
    config = load_config([*LLAMA, *ON, "--float8.filter_fqns=layers.0."])
    plan = float8_plan(shape_of(config), config)
    assert len(plan.converted) == 31 * 7
    assert {name.split(".")[1] for name in plan.skipped["named in float8.filter_fqns"]} == {"0"}


def test_what_is_converted_is_told_in_a_few_lines():
    """R130: a layer of 24 rows is left as it is, with a line."""
    shape = ("--model.overrides.n_kv_heads=1", "--model.overrides.head_dim=24")  # wq 96, wk and wv 24 rows
    config = load_config([*ALL, *shape])
    assert float8_plan(shape_of(config), config).describe() == [
        "20 of 29 linear layers: layers.*.{attention.wq, attention.wo, feed_forward.w1, feed_forward.w2, "
        "feed_forward.w3} (4 each)",
        "8 not converted (24 x 128 is not a multiple of 16 both ways): layers.*.{attention.wk, attention.wv} (4 each)",
        "1 not converted (the head never is): output",
    ]
    assert grouped(["layers.0.a", "layers.1.a", "layers.1.b"]) == "layers.*.{a} (2 each), layers.*.{b} (1 each)"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ON,
            (
                "would convert no layer of llama3 debug (128 x 128 is too small to gain); ",
                'leave "auto_filter_small_kn" out',
            ),
        ),
        (
            (*ALL, "--model.overrides.dim=120", "--model.overrides.n_heads=5", "--model.overrides.n_kv_heads=5"),
            ("would convert no layer", "120 x 120 is not a multiple of 16", "turn float8.enable off"),
        ),
        ((*ALL, "--float8.filter_fqns=atention"), ('names "atention"', "in the name of no linear layer")),
        (
            (*ALL, "--training.seq_len=100"),
            ("training.local_batch_size (1) x training.seq_len (100) = 100 tokens", "multiple of 16"),
        ),
        (
            (*ALL, "--training.seq_len=48", "--parallelism.context_parallel_degree=2"),
            ("/ parallelism.context_parallel_degree (2) = 24 tokens",),
        ),
        (("--float8.emulate",), ("float8.emulate (true) has no effect with float8.enable (false)",)),
        (
            (*ALL, "--float8.precompute_float8_dynamic_scale_for_fsdp"),
            ("has no effect without float8.enable_fsdp_float8_all_gather",),
        ),
        (
            (*ALL, "--float8.enable_fsdp_float8_all_gather", "--float8.recipe=rowwise"),
            ("float8 rowwise with float8 all-gather is refused", "set float8.recipe to tensorwise"),
        ),
        (("--float8.recipe=blockwise",), ("float8.recipe", "tensorwise")),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(argv, words):
    (problem,) = problems(*argv)
    assert all(word in problem for word in words), problem


def test_settings_alone_and_settings_of_a_model_are_told_together_and_a_reason_once_for_each_kind():
    key = "float8.precompute_float8_dynamic_scale_for_fsdp"
    alone, of_model = problems(*ON, "--float8.filter_fqns=wq,auto_filter_small_kn", f"--{key}")
    assert alone.startswith(f"{key} (true) has no effect without float8.enable_fsdp_float8_all_gather")
    assert of_model == (
        "float8.enable would convert no layer of llama3 debug (64 x 128 is too small to gain; named in "
        'float8.filter_fqns); leave "auto_filter_small_kn" out of float8.filter_fqns or turn float8.enable off'
    )


def test_float8_gathers_even_shards_only():
    gather = (*ALL, "--float8.enable_fsdp_float8_all_gather")
    assert problems(*gather, world_size=4) == []
    (problem,) = problems(*gather, world_size=3)  # 128 and 384 rows; wk and wv have 64
    assert "3 ranks do not divide the 64, 128 rows of" in problem and "feed_forward.w1" not in problem
    assert problems(*gather, world_size=0) == []  # not known yet


def test_weight_gradients_in_bf16_need_no_even_number_of_tokens():
    assert problems(*ALL, "--float8.recipe=rowwise_with_gw_hp", "--training.seq_len=100") == []


def test_the_launcher_asks(tmp_path):
    config = load_config([*ON, f"--job.dump_folder={tmp_path}"])
    assert any("would convert no layer of llama3 debug" in problem for problem in check_settings(config, 1))
