"""Logits equal Hugging Face transformers' with the same weights, for tiny random models of each family."""

import pytest
import torch

from titan_like.models.decoder import Decoder
from titan_like.models.flavors import ModelConfig

transformers = pytest.importorskip("transformers")

SHAPE = dict(vocab_size=97, dim=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=8, ffn_dim=80, max_seq_len=64)
COMMON = dict(
    vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    intermediate_size=80, max_position_embeddings=64, attn_implementation="eager",
)  # fmt: skip
LLAMA31 = dict(
    rope_type="llama3", rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip


def to_hf_name(name: str) -> str:
    for ours, theirs in (
        ("layers.", "model.layers."), ("attention.wq", "self_attn.q_proj"), ("attention.wk", "self_attn.k_proj"),
        ("attention.wv", "self_attn.v_proj"), ("attention.wo", "self_attn.o_proj"),
        ("attention.q_norm", "self_attn.q_norm"),
        ("attention.k_norm", "self_attn.k_norm"), ("feed_forward.w1", "mlp.gate_proj"),
        ("feed_forward.w2", "mlp.down_proj"),
        ("feed_forward.w3", "mlp.up_proj"), ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("tok_embeddings", "model.embed_tokens"), ("output", "lm_head"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return "model.norm.weight" if name == "norm.weight" else name


def llama(rope: dict, **more):
    return transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5, rope_parameters=rope, **more)


CASES = {
    "llama2": (dict(), lambda: llama(dict(rope_type="default", rope_theta=10_000.0))),
    "llama3.1 scaling": (
        dict(rope_theta=500_000.0, rope_scaling_factor=8.0, rope_original_max_seq_len=16),
        lambda: llama(LLAMA31),
    ),
    "tied": (
        dict(tie_embeddings=True),
        lambda: llama(dict(rope_type="default", rope_theta=10_000.0), tie_word_embeddings=True),
    ),
    "qwen2": (
        dict(qkv_bias=True, norm_eps=1e-6, rope_theta=1e6),
        lambda: transformers.Qwen2Config(
            **COMMON, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6)
        ),
    ),
    "qwen3": (
        dict(qk_norm=True, norm_eps=1e-6, rope_theta=1e6),
        lambda: transformers.Qwen3Config(
            **COMMON, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6)
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    fields, hf_config = CASES[case]
    torch.manual_seed(0)
    ours = Decoder(ModelConfig(**SHAPE, **fields))
    for parameter in ours.parameters():  # also norms and biases, so that none can be ignored
        torch.nn.init.normal_(parameter, std=0.2)
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config()).eval()
    weights = {to_hf_name(name): p.detach() for name, p in ours.state_dict().items()}
    missing = theirs.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}

    tokens = torch.randint(0, 97, (2, 40))
    positions = torch.arange(40).expand(2, 40)
    torch.testing.assert_close(ours(tokens, positions), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
