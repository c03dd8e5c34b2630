"""A tiny model with random weights and a tokenizer trained on a few sentences; nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_WITH_MARKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
_TEXT = (
    "The dome of the observatory opens at dusk, and the keeper counts the stars one by one.",
    "What does the keeper do when the rain comes? The keeper closes the dome and waits for the wind.",
    "system user assistant: you are a helpful keeper who answers in a few short words.",
)


def build_tokenizer(chat_template: str | None = CHATML) -> Any:
    """Return a byte-level BPE tokenizer whose padding token is its end-of-turn token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = chat_template
    return fast


def build_model(num_tokens: int, seed: int = 0) -> Any:
    """Return a two-block llama with random weights."""
    config = LlamaConfig(
        vocab_size=num_tokens, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def save_model(folder: Path, chat_template: str | None = CHATML) -> Path:
    """Write a Hugging Face folder with model and tokenizer."""
    tokenizer = build_tokenizer(chat_template)
    build_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def alpaca_rows(count: int = 12) -> list[dict[str, str]]:
    """Return short, distinct rows."""
    return [
        {
            "instruction": f"What does the keeper do on night {n}?",
            "input": "",
            "output": f"Counts {n} stars, then waits.",
        }
        for n in range(count)
    ]
