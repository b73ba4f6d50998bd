"""config.json both ways; what this decoder does not compute is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from titan_like.config.errors import ConfigError
from titan_like.models import hf_format
from titan_like.models.flavors import FLAVORS, ModelConfig

SMALL: dict[str, Any] = dict(
    vocab_size=50, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=40, max_seq_len=64, init_std=0.01
)
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "initializer_range": 0.01, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def folder(tmp_path: Path, content: Any) -> Path:
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_names() -> None:
    assert hf_format.hf_name("tok_embeddings.weight") == "model.embed_tokens.weight"
    assert hf_format.hf_name("layers.11.attention.wk.bias") == "model.layers.11.self_attn.k_proj.bias"
    assert hf_format.hf_name("layers.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert hf_format.hf_name("norm.weight") == "model.norm.weight"
    assert hf_format.hf_name("output.weight") == "lm_head.weight"


def test_every_field_is_mapped() -> None:
    """A new field of ModelConfig must get its place here, or exports would lose it."""
    mapped = {*hf_format.FIELDS.values(), *hf_format.ROPE_FIELDS.values(), "rope_theta", "qk_norm", "qkv_bias"}
    assert mapped == set(ModelConfig.model_fields)


@pytest.mark.parametrize(("name", "flavor"), [(name, flavor) for name in FLAVORS for flavor in FLAVORS[name]])
def test_there_and_back(name: str, flavor: str, tmp_path: Path) -> None:
    config = FLAVORS[name][flavor]
    assert hf_format.read_hf_config(folder(tmp_path, hf_format.to_hf_config(config, "float32", {}))) == config


def test_fields_by_hand(tmp_path: Path) -> None:
    """R215: theta, eps, a head size that is not dim / heads."""
    read = hf_format.read_hf_config(folder(tmp_path, LLAMA))
    assert read == ModelConfig(**SMALL, norm_eps=1e-5, rope_theta=1e6)
    written = hf_format.to_hf_config(read, "bfloat16", {"eos_token_id": [2, 7]})
    assert {key: written[key] for key in LLAMA} == LLAMA
    assert (written["torch_dtype"], written["eos_token_id"], written["pad_token_id"]) == ("bfloat16", [2, 7], None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_rope_scaling(rope: dict[str, Any], tmp_path: Path) -> None:
    read = hf_format.read_hf_config(folder(tmp_path, {**LLAMA, **rope}))
    assert (read.rope_theta, read.rope_scaling_factor, read.rope_original_max_seq_len) == (5e5, 8.0, 16)


def test_what_older_files_leave_out(tmp_path: Path) -> None:
    absent = (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "initializer_range",
    )
    old = {key: value for key, value in LLAMA.items() if key not in absent}
    read = hf_format.read_hf_config(folder(tmp_path, old))
    assert (read.n_kv_heads, read.head_dim, read.norm_eps, read.rope_theta) == (4, 8, 1e-6, 1e4)
    assert (read.tie_embeddings, read.init_std) == (False, 0.02)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window is 4096; only full attention is supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "supported are none and \"llama3\""),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "unknown fields quantization_config"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are llama, qwen2, qwen3"),
        ({"num_attention_heads": 5}, "not a multiple of n_kv_heads"),
        ({"vocab_size": None}, "vocab_size missing"),
        ({"hidden_size": "32"}, "dim: "),
    ],
)  # fmt: skip
def test_refused(field: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        hf_format.read_hf_config(folder(tmp_path, {**LLAMA, **field}))
    assert message in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


def test_all_problems_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        hf_format.read_hf_config(folder(tmp_path, {**LLAMA, "sliding_window": 8, "mlp_bias": True, "odd": 1}))
    assert len(caught.value.problems) == 3


def test_harmless_fields(tmp_path: Path) -> None:
    more = {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "odd": None,
        "also": False,
        "pad_token_id": 3,
        "dtype": "x",
    }
    hf_format.read_hf_config(folder(tmp_path, {**LLAMA, **more}))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is damaged"):
        hf_format.read_hf_config(folder(tmp_path, content))
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere/config.json"):
        hf_format.read_hf_config(tmp_path / "nowhere")


def test_no_family_has_both() -> None:
    with pytest.raises(ConfigError, match="both qk_norm and qkv_bias"):
        hf_format.to_hf_config(ModelConfig(**SMALL, qk_norm=True, qkv_bias=True), "float32", {})


def test_start_of_a_training(tmp_path: Path) -> None:
    found = hf_format.read_hf_config(folder(tmp_path, LLAMA))
    assert hf_format.check_start(tmp_path, found) == []
    larger = {"vocab_size": 64, "max_seq_len": 32, "init_std": 0.5, "rope_high_freq_factor": 2.0}  # no scaling: unused
    assert hf_format.check_start(tmp_path, found.model_copy(update=larger)) == []
    other = found.model_copy(update={"n_layers": 3, "vocab_size": 40, "max_seq_len": 128})
    (problem,) = hf_format.check_start(tmp_path, other)
    assert "n_layers 2 instead of 3, vocab_size 50 instead of 40, max_seq_len 64 instead of 128" in problem
    assert "--model.overrides.n_layers 2" in problem
    assert "cannot read" in hf_format.check_start(tmp_path / "nowhere", found)[0]


def test_settings_of_a_shape() -> None:
    assert hf_format.describe(FLAVORS["qwen3"]["8B"]) == "--model.name qwen3 --model.flavor 8B"
    tied = FLAVORS["llama3"]["8B"].model_copy(update={"tie_embeddings": True})
    assert hf_format.describe(tied) == "--model.name llama3 --model.flavor 8B --model.overrides.tie_embeddings true"
