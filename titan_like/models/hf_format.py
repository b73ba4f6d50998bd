"""The dense families in Hugging Face's words: names of parameters, fields of config.json. Imports no torch.

Supported are model_type llama (Llama 2, 3 and what shares their code), qwen2 and qwen3. Both sides keep the rotary
dimensions as two halves, so no row of a weight changes its place.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from titan_like import __version__
from titan_like.config.errors import ConfigError
from titan_like.models.flavors import FLAVORS, ModelConfig

TABLES = {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}  # (V, D)
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
FIELDS = {  # of config.json -> of ModelConfig
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}
ROPE_FIELDS = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_seq_len",
}
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}  # where config.json is silent


class Family(NamedTuple):
    """What a model_type fixes: fields of ModelConfig, and fields of config.json that have one value here."""

    architecture: str
    qk_norm: bool
    qkv_bias: bool
    constants: dict[str, Any]

    def fits(self, config: ModelConfig) -> bool:
        return (config.qk_norm, config.qkv_bias) == (self.qk_norm, self.qkv_bias)


_FULL = {"use_sliding_window": False, "sliding_window": None}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", False, False, {"attention_bias": False, "mlp_bias": False}),
    "qwen2": Family("Qwen2ForCausalLM", False, True, _FULL),
    "qwen3": Family("Qwen3ForCausalLM", True, False, {"attention_bias": False, **_FULL}),
}
ONLY = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
IGNORED = {  # without influence on the logits, or read elsewhere
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache",
    "pretraining_tp", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "use_sliding_window", "layer_types",
}  # fmt: skip
MARK = "titan_like"  # the field of config.json that tells which version has exported it
TRAINING_ONLY = {"max_seq_len", "init_std", "vocab_size"}  # fields that a run may set otherwise, see `check_start`


def hf_name(name: str) -> str:
    """layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name in TABLES:
        return TABLES[name]
    if name == "norm.weight":
        return "model.norm.weight"
    module, _, kind = name.rpartition(".")
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{BLOCK[inner]}.{kind}"


def to_hf_config(config: ModelConfig, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, in the form that transformers 4.51 and later read.

    Args:
        dtype: of the stored weights, such as "bfloat16".
        token_ids: values of bos_token_id, eos_token_id and pad_token_id; null where missing.
    Raises:
        ConfigError: no family has this shape.
    """
    fitting = [kind for kind, family in FAMILIES.items() if family.fits(config)]
    if not fitting:
        raise ConfigError("no Hugging Face family has both qk_norm and qkv_bias; such a model cannot be exported")
    kind = fitting[0]
    scaling = {theirs: getattr(config, ours) for theirs, ours in ROPE_FIELDS.items()}
    return {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **scaling} if config.rope_scaling_factor != 1 else None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **FAMILIES[kind].constants,
        **{key: token_ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "torch_dtype": dtype,
        "use_cache": True,
        MARK: __version__,
    }


def made_here(folder: Path) -> bool:
    """Whether the folder's config.json was written by this program."""
    try:
        return MARK in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_hf_config(folder: Path) -> ModelConfig:
    """The shape that `folder`/config.json describes.

    Raises:
        ConfigError: the file is missing or damaged, or describes what this decoder does not compute; all of it at once.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a Hugging Face model folder") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; copy it again") from error
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{path}: model_type is {kind!r}; supported are {', '.join(FAMILIES)}")
    fields, problems = _shape(raw, kind)
    problems += _unsupported(raw, kind)
    try:
        config = ModelConfig(**fields) if not problems else None
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    if problems or config is None:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    return config


def _shape(raw: dict[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    known = {**DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    if kind == "llama":
        known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    dim, heads = known.get("hidden_size"), known.get("num_attention_heads")
    if kind == "qwen3":
        known.setdefault("head_dim", 128)
    elif isinstance(dim, int) and isinstance(heads, int) and heads > 0:
        known.setdefault("head_dim", dim // heads)
    missing = [theirs for theirs in FIELDS if theirs not in known]
    problems = [f"{', '.join(missing)} missing; copy the file again"] if missing else []
    rope, rope_problems = _rope(known)
    fields = {ours: known.get(theirs) for theirs, ours in FIELDS.items()}
    fields |= {**rope, "qk_norm": FAMILIES[kind].qk_norm, "qkv_bias": FAMILIES[kind].qkv_bias}
    return fields, problems + rope_problems


def _rope(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """rope_theta and rope_scaling of transformers 4, or rope_parameters of 5."""
    rope = {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **raw.get("rope_scaling", {}),
        **raw.get("rope_parameters", {}),
    }
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    theta, partial = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", 1)
    wanted = set(ROPE_FIELDS) if kind == "llama3" else set()
    if kind not in ("default", "llama3") or set(rope) != wanted or partial != 1:
        shown = {"rope_type": kind, **rope, **({"partial_rotary_factor": partial} if partial != 1 else {})}
        return {}, [f'rope scaling is {shown}; supported are none and "llama3" with {", ".join(ROPE_FIELDS)}']
    return {"rope_theta": theta, **{ROPE_FIELDS[key]: value for key, value in rope.items()}}, []


def _unsupported(raw: dict[str, Any], kind: str) -> list[str]:
    """Fields that would change the logits; unknown ones might, unless they are null, false or empty."""
    biased = {"attention_bias"} if FAMILIES[kind].qkv_bias else set()  # Qwen2 has q/k/v biases whatever it says
    problems = [
        f"{key} is {raw[key]!r}; only {value!r} is supported"
        for key, value in ONLY.items()
        if raw.get(key) is not None and raw[key] != value and key not in biased
    ]
    window = raw.get("sliding_window")
    if raw.get("use_sliding_window", window is not None) and window is not None:
        problems.append(f"sliding_window is {window}; only full attention is supported")
    if other := {*(raw.get("layer_types") or [])} - {"full_attention"}:
        problems.append(f"layer_types has {', '.join(sorted(other))}; only full_attention is supported")
    unknown = [key for key in raw if key not in {*FIELDS, *ONLY, *IGNORED, MARK} and raw[key]]
    if unknown:
        problems.append(f"unknown fields {', '.join(unknown)}; remove those that do not change the model's logits")
    return problems


def check_start(folder: Path, wanted: ModelConfig) -> list[str]:
    """Whether training of a model of shape `wanted` can start from `folder`: one sentence per reason against it.

    The run's vocabulary may be larger (the rows that the folder has not keep their initial values) and its sequences
    shorter.
    """
    try:
        found = read_hf_config(folder)
    except ConfigError as error:
        return error.problems
    compared = {*ModelConfig.model_fields} - TRAINING_ONLY
    if found.rope_scaling_factor == wanted.rope_scaling_factor == 1:
        compared -= {ours for ours in ROPE_FIELDS.values()}
    different = [
        key for key in ModelConfig.model_fields if key in compared and getattr(found, key) != getattr(wanted, key)
    ]
    different += [key for key in ("vocab_size",) if found.vocab_size > wanted.vocab_size]
    different += [key for key in ("max_seq_len",) if found.max_seq_len < wanted.max_seq_len]
    if not different:
        return []
    shown = ", ".join(f"{key} {getattr(found, key)} instead of {getattr(wanted, key)}" for key in different)
    return [f"model.hf_path {folder} holds another model: {shown}; set {describe(found)}"]


def as_settings(config: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """`[model]` name, flavor and overrides that give this shape: those with the fewest overrides."""
    candidates = [
        (name, flavor, {key: value for key, value in config.model_dump().items() if value != getattr(shape, key)})
        for name, flavors in FLAVORS.items()
        for flavor, shape in flavors.items()
    ]
    return min(candidates, key=lambda candidate: len(candidate[2]))


def describe(config: ModelConfig) -> str:
    """The same as options of the command line."""
    name, flavor, overrides = as_settings(config)
    settings = [f"--model.name {name}", f"--model.flavor {flavor}"]
    settings += [f"--model.overrides.{key} {json.dumps(value)}" for key, value in overrides.items()]
    return " ".join(settings)
