"""Make inputs for tiny models: text with one padded row, and prompts."""

import torch

from tests.census.shrink import NUM_PLAIN_TOKENS

LENGTHS = {"reformer": 16, "big_bird": 16}  # types whose rows must fill whole attention blocks
TOKEN_TYPES = {  # models that need the positions of text tokens in training
    "gemma3": "token_type_ids", "shieldgemma2": "token_type_ids", "paligemma": "token_type_ids",
    "molmo2": "mm_token_type_ids",
}  # fmt: skip


def text_batch(model_type: str, rows: int = 3, seed: int = 1, padding: str = "right") -> dict[str, torch.Tensor]:
    """Return random tokens; the first row is padded, and padding has no label."""
    length = LENGTHS.get(model_type, 11)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, NUM_PLAIN_TOKENS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[0, -4:] = 0
    elif padding == "left":
        mask[0, :4] = 0
    ids = ids.masked_fill(mask == 0, 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if model_type in TOKEN_TYPES:
        batch[TOKEN_TYPES[model_type]] = torch.zeros_like(ids)
    return batch


def prompts(model_type: str, seed: int = 2) -> dict[str, torch.Tensor]:
    """Return prompts; the first is padded on the left."""
    batch = text_batch(model_type, seed=seed, padding="left")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}
