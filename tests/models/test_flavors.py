"""Model shapes against the published ones, and what a wrong one is answered."""

import subprocess
import sys

import pytest
import torch

from titan_like.config.errors import ConfigError
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import FLAVORS, flops_per_token, parameter_count, resolve

# From the model cards and safetensors indices on Hugging Face; tied tables counted once.
PUBLISHED = {
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
}
ALL = [(name, flavor) for name, flavors in FLAVORS.items() for flavor in flavors]


def problems(name: str, flavor: str, **overrides: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(name, flavor, overrides)
    return caught.value.problems


@pytest.mark.parametrize(("name", "flavor"), ALL)
def test_parameter_counts_are_those_published_and_those_of_the_module(name: str, flavor: str) -> None:
    config = resolve(name, flavor)
    with torch.device("meta"):
        model = Decoder(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    if flavor != "debug":
        assert parameter_count(config) == PUBLISHED[name, flavor]


def test_every_published_flavor_is_there() -> None:
    assert set(PUBLISHED) == {(name, flavor) for name, flavor in ALL if flavor != "debug"}


def test_flops_per_token_by_hand() -> None:
    """R153: a function of model and sequence alone, so no mesh can change it."""
    # one layer, dim 8, 2 heads of 4, 1 kv head, ffn 16, vocabulary 32:
    # wq 8x8 + wk 8x4 + wv 8x4 + wo 8x8 = 192; three 8x16 = 384; norms 3 x 8 = 24; the head 8x32 = 256: 856 multiply.
    # attention over S = 10 tokens: scores and values, 2 FLOPs each, times 3 for the backward pass: 12 x 8 x 10 = 960.
    shape = dict(vocab_size=32, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16)
    untied = resolve("llama3", "debug", shape)
    tied = resolve("llama3", "debug", {**shape, "tie_embeddings": True})
    assert parameter_count(untied) == 856 + 256 and parameter_count(tied) == 856
    assert flops_per_token(untied, 10) == flops_per_token(tied, 10) == 6 * 856 + 960
    assert flops_per_token(untied, 20) == 6 * 856 + 2 * 960


def test_overrides_replace_fields_and_the_head_size_follows_the_width() -> None:
    config = resolve("llama3", "debug", {"dim": 256, "rope_theta": 1})
    assert (config.dim, config.head_dim, config.n_layers, config.rope_theta) == (256, 64, 4, 1.0)
    assert resolve("llama3", "debug", {"n_heads": 8}).head_dim == 16
    assert resolve("llama3", "debug", {"dim": 256, "head_dim": 8}).head_dim == 8
    assert resolve("qwen3", "0.6B", {"dim": 512}).head_dim == 128  # Qwen3 keeps it whatever the width


def test_wrong_names_are_answered_with_the_known_ones() -> None:
    assert problems("lama3", "8B") == ['model.name is "lama3"; known families are llama2, llama3, qwen2, qwen3']
    assert problems("llama3", "8b") == [
        'model.flavor is "8b"; llama3 has debug, 1B, 3B, 8B, 70B, 405B: did you mean "8B"? '
        "Other shapes: set model.overrides"
    ]
    assert problems("llama3", "8B", n_layer=2) == [
        "model.overrides has the unknown field n_layer; did you mean n_layers?"
    ]
    assert problems("llama3", "8B", zzz=2)[0].startswith(
        "model.overrides has the unknown field zzz; fields are vocab_size, dim,"
    )


def test_wrong_values_are_all_named() -> None:
    found = problems("llama3", "debug", n_layers=0, norm_eps=-1.0, qk_norm=3)
    assert [sentence.split(":")[0] for sentence in found] == [
        "model.overrides.n_layers is 0",
        "model.overrides.norm_eps is -1.0",
        "model.overrides.qk_norm is 3",
    ]
    assert problems("llama3", "debug", n_heads=4, n_kv_heads=3) == [
        "model.overrides: n_heads (4) is not a multiple of n_kv_heads (3)"
    ]


def test_flavors_import_no_torch() -> None:
    code = "import sys, titan_like.models.flavors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
