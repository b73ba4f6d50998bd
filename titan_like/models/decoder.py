"""The decoder of all dense families (Llama 2 and 3, Qwen 2 and 3): single-device code.

Parallelism is applied from outside (parallel/apply.py). Shapes: B batch, S sequence, D model, N query heads,
K key/value heads, H head size, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_like.models.documents import Bounds, Documents, attend_causally, attend_within_documents, document_bounds
from titan_like.models.flavors import ModelConfig


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Angular frequencies, fp32 (H/2,); Llama 3.1 stretches the slow ones (arXiv:2407.21783, section 3.4.1)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling_factor == 1.0:
        return frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_max_seq_len * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, unchanged; 0: slow, divided by the factor
    return keep * frequencies + (1 - keep) * frequencies / config.rope_scaling_factor


def rotate(
    x: Tensor,  # (B, S, N, H)
    cos: Tensor,  # (B, S, 1, H/2), fp32
    sin: Tensor,  # (B, S, 1, H/2), fp32
) -> Tensor:
    """Rotary embedding on halves, the layout of Hugging Face checkpoints. Computes in fp32, returns x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class CausalAttention(nn.Module):
    """softmax(q k / sqrt(H)) v, causal. A module of its own so that context parallelism can replace it."""

    def forward(
        self,
        q: Tensor,  # (B, N, S, H)
        k: Tensor,  # (B, K, S, H)
        v: Tensor,  # (B, K, S, H)
        mask: Bounds | None,  # see models/documents.py; None: a row is one document
    ) -> Tensor:  # (B, N, S, H)
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        if mask is None:
            return attend_causally(q, k, v)
        return attend_within_documents(q, k, v, *mask)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, K, S, H) -> (B, heads, S, H): each key/value head serves heads / K query heads."""
    groups = heads // x.shape[1]
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def document_mask(
    starts: Tensor,  # (B, S) int64: the index in the row of the first token of each token's document
    query_index: Tensor,  # (S,) int64: the index in the row of each query
    key_index: Tensor,  # (T,) int64: the index in the row of each key
) -> Tensor:  # (B, 1, S, T) bool
    """Block-diagonal causal mask: a query sees the keys from its document's start up to itself."""
    seen = (key_index <= query_index[:, None]) & (key_index >= starts[..., None])
    return seen[:, None]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, optional QK-norm and q/k/v biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, queries, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, keys, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, keys, bias=config.qkv_bias)
        self.wo = nn.Linear(queries, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.inner: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Bounds | Tensor | None) -> Tensor:  # x: (B, S, D)
        # -1, not n_heads: under tensor parallelism each rank holds a part of the heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.inner(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Bounds | Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Head(nn.Linear):
    """The table of the vocabulary: makes logits, or the loss of labels without ever making all logits.

    Attributes:
        loss: (hidden, table, labels, factors) -> loss, see loss.py; parallel/apply.py sets it.
    """

    loss: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None, factors: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(x)
        assert self.loss is not None, "a decoder that was not built by parallel/apply.py knows no loss"
        return self.loss(x, self.weight, labels, factors)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, or a pipeline stage's part of them.

    `layers` is a ModuleDict so that names survive the split into stages.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: Head | None = Head(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share one table between embedding and head, where the config says so and both are here.

        To be repeated after anything that replaces parameters, such as `to_empty`.
        """
        if self.config.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def keep_stage(self, layers: range, *, first: bool, last: bool) -> None:
        """Drop all but one pipeline stage's part: the embedding lies in the first, norm and head in the last."""
        self.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        if not first:
            self.tok_embeddings = None
        if not last:
            self.norm = self.output = None

    def attention_mask(self, documents: Documents) -> Bounds | Tensor:
        """What keeps documents apart in every block. Context parallelism replaces this, and the attention with it."""
        return document_bounds(documents)

    def forward(
        self,
        x: Tensor,  # tokens (B, S) int64 in the first stage, else hidden states (B, S, D)
        positions: Tensor,  # (B, S) int64: the rotary position of each token
        documents: Documents | None = None,  # of rows of (B, S); None: a row is one document
        labels: Tensor | None = None,  # (B, S) int64: the last stage returns their loss instead of logits
        factors: Tensor | None = None,  # broadcasts to (B, S): of the labels' losses; None: 1
    ) -> Tensor:  # logits (B, S, V) or loss () in the last stage, else hidden states (B, S, D)
        angles = positions[..., None, None] * rope_frequencies(self.config, positions.device)
        cos, sin = angles.cos(), angles.sin()
        mask = None if documents is None else self.attention_mask(documents)
        h = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            h = layer(h, cos, sin, mask)
        if self.norm is None or self.output is None:
            return h
        return self.output(self.norm(h), labels=labels, factors=factors)


def canonical_name(name: str, config: ModelConfig) -> str:
    """The name that a parameter has in checkpoints and for its initial value: a tied table has one."""
    return "tok_embeddings.weight" if config.tie_embeddings and name == "output.weight" else name


def init_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation of the normal that the parameter `name` starts from; None: a constant (see `init_constant`).

    Projections back into the residual stream start smaller by sqrt(2 x layers), as in GPT-2.
    """
    if name.endswith("norm.weight") or name.endswith("bias"):
        return None
    if name.endswith(("wo.weight", "w2.weight")):
        return config.init_std / math.sqrt(2 * config.n_layers)
    return config.init_std


def init_constant(name: str) -> float:
    """Start value of norm weights (1) and biases (0)."""
    return 0.0 if name.endswith("bias") else 1.0
