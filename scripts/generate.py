#!/usr/bin/env python3
"""Continue a prompt with a trained model, in one process on CPU or GPU:

python scripts/generate.py --checkpoint outputs/debug/checkpoint --prompt "def main("
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

from titan_like.checkpoint import manager as checkpoint
from titan_like.checkpoint.find import find_checkpoint
from titan_like.checkpoint.storage import Folder
from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.tokenizer import Tokenizer
from titan_like.device import find_device
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import ModelConfig


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        folder, step = find_checkpoint(args.checkpoint)
        record = checkpoint.read_record(folder, step)
        tokenizer = Tokenizer(args.tokenizer or record["tokenizer"] or "")
        ids, end = first_ids(record, tokenizer, args.prompt)
        model = load_model(folder, step, ModelConfig(**record["model"]))
    except TitanError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)
    generator = torch.Generator().manual_seed(args.seed)
    ids = generate(model, ids, args.tokens, args.temperature, args.top_k, generator, tokenizer.vocab_size, end)
    print(tokenizer.decode(ids))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue a prompt with a trained model.")
    parser.add_argument("--checkpoint", required=True, help="a checkpoint folder (newest step) or a step-N, or its URL")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=128, help="at most this many new tokens (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="sample among the k likeliest tokens (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--tokenizer", help="a SentencePiece .model (default: the one that the checkpoint names)")
    args = parser.parse_args(argv)
    if args.tokens < 0 or args.temperature < 0 or args.top_k < 1:
        parser.error("--tokens and --temperature must be at least 0, --top_k at least 1")
    return args


def first_ids(record: dict[str, Any], tokenizer: Tokenizer, prompt: str) -> tuple[list[int], int]:
    """The ids of the prompt, or those that a document begins with, and the id that ends a document (-1: not known): as
    the data were prepared, which the tokenizer's own file need not say.

    Raises:
        ConfigError: the prompt is empty, and nothing says what stands before a document.
    """
    begin, end = record.get("begins_with"), record.get("ends_with")
    end = tokenizer.eos_id if end is None else end
    ids = ([] if begin is None else [begin]) + tokenizer.encode(prompt)
    if not ids and end < 0:
        raise ConfigError(
            f"neither the data's manifest nor {tokenizer.path} says which id begins or ends a document; give a --prompt"
        )
    return ids or [end], end  # after a document's end, one begins


def load_model(folder: Folder, step: int, config: ModelConfig) -> Decoder:
    device = find_device()
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    model.tie_weights()
    checkpoint.load(folder, step, checkpoint.model_tensors(model), rng=False)
    return model.eval()


@torch.no_grad()
def generate(
    model: Decoder,
    ids: list[int],
    count: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    vocab_size: int,
    end: int,
) -> list[int]:
    """`ids` and up to `count` sampled tokens, fewer if `end` comes.

    Recomputes the whole sequence for each token, which small models can afford.
    """
    device = next(model.parameters()).device
    for _ in range(count):
        window = ids[-model.config.max_seq_len :]
        tokens = torch.tensor([window], device=device)
        positions = torch.arange(len(window), device=device)[None]
        logits = model(tokens, positions)[0, -1, :vocab_size]  # a model's vocabulary may be padded
        following = _sample(logits.float().cpu(), temperature, top_k, generator)
        if following == end:
            break
        ids = [*ids, following]
    return ids


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:  # logits: (V,)
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.topk(min(top_k, len(logits)))
    chosen = torch.multinomial(torch.softmax(values / temperature, 0), 1, generator=generator)
    return int(candidates[chosen])


if __name__ == "__main__":
    main()
