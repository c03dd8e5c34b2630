"""A small LLaVA with random weights for `picture_task.py`, trained and decoded by transformers and torch; the order of rows is a run's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from picture_rows import SIDE, read_rows
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    get_scheduler,
)

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.runs.data.loader import Sampler

PATCH = 24  # pixels of a side
WIDTH = 128
# Images, the question and its answer follow each other without roles, as where LLaVA trains its projector.
TEMPLATE = (
    "{% for message in messages %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>' if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)


def save_model(folder: Path, tokenizer_folder: Path, seed: int) -> Path:
    """Write a tower of CLIP, a projector and a llama, a tokenizer with a token for images, and their processor."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    # Backgrounds are near zero with these means, so that what is drawn on them is most of a patch.
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[0.85] * 3,
        image_std=[0.25] * 3,
    )
    LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
            "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": WIDTH,
        },
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True, "initializer_range": 0.08,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=(SIDE // PATCH) ** 2, tie_word_embeddings=True,
        vision_feature_select_strategy="default", vision_feature_layer=-1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(run: dict[str, Any], steps: int) -> Iterator[float]:
    """Train as a run file says, and yield the losses of the first steps."""
    processor, model = open_model(Path(run["model_name_or_path"]))
    model.train()
    rows = read_rows(Path(run["datasets"][0]))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run["learning_rate"], betas=(0.9, run["adam_beta2"]), weight_decay=0.0
    )
    scheduler = get_scheduler(run["lr_scheduler_type"], optimizer, run["warmup_steps"], run["max_steps"])
    order = Sampler((len(rows),), run["per_device_train_batch_size"], run["seed"], (1.0,))
    for step in range(steps):
        loss = model(**training_inputs(processor, [rows[number] for number in order.rows(step)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield loss.item()


def open_model(folder: Path) -> tuple[Any, Any]:
    """Return the processor and the model of a folder."""
    return AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    )


def training_inputs(processor: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the inputs of the model for some rows, with labels at the captions and the tokens that end them."""
    texts = [processor.apply_chat_template(messages(row)) for row in rows]
    pictures = [row["picture"] for row in rows]
    inputs = dict(processor(text=texts, images=pictures, return_tensors="pt", padding=True, padding_side="right"))
    lengths = prompt_inputs(processor, rows)["attention_mask"].sum(1, keepdim=True)
    trained = (torch.arange(inputs["input_ids"].shape[1]) >= lengths) & (inputs["attention_mask"] == 1)
    return inputs | {"labels": inputs["input_ids"].masked_fill(~trained, IGNORE_INDEX)}


def prompt_inputs(processor: Any, rows: list[dict[str, Any]]) -> Any:
    """Return the inputs of the model for the questions of some rows, which are equally long."""
    texts = [processor.apply_chat_template(messages(row)[:1], add_generation_prompt=True) for row in rows]
    return processor(text=texts, images=[row["picture"] for row in rows], return_tensors="pt")


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row in parts."""
    question, answer = (message["content"] for message in row["messages"])
    asked = [{"type": "image"}, {"type": "text", "text": question.removeprefix("<image>")}]
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


@torch.no_grad()
def captions_of(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Return the captions that a model gives the pictures of some rows, decoded greedily."""
    processor, model = open_model(folder)
    captions: list[str] = []
    for first in range(0, len(rows), 100):
        inputs = prompt_inputs(processor, rows[first : first + 100])
        tokens = model.eval().generate(**inputs, max_new_tokens=10, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        captions += processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return captions
