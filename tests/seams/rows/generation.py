"""Generating text."""

from functools import partial
from typing import Any

import torch

from tests.e2e import tiny as tiny_model
from tests.seams.seam import Case, row
from tests.seams.tiny import tiny
from tests.support import tiny_models

SECTION = "Generation"
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "opt", "falcon", "gpt_neo", "gpt_bigcode",
    "hunyuan_v1_dense", "rembert", "xglm",
)  # fmt: skip
_EACH = {family: Case(partial(tiny, family)) for family in FAMILIES}


def _generate(model: Any, **settings: Any) -> list[list[int]]:
    model.eval()
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False} | settings
    return model.generate(**settings).tolist()


@row("W7.left-padding", SECTION, "`generate` from prompts that are padded on the left", cases=_EACH)
def left_padding(model: Any) -> Any:
    batch = tiny_models.batch(padding="left")
    ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
    return _generate(model, input_ids=ids, attention_mask=batch["attention_mask"])


@row("W7.without-a-mask", SECTION, "`generate` from prompts with a padding token, without a mask", cases=_EACH)
def without_a_mask(model: Any) -> Any:
    ids = tiny_models.batch(padding="none")["input_ids"]
    ids[0, :3] = 0
    return _generate(model, input_ids=ids)


@row(
    "W7.micro-batches",
    SECTION,
    "`generate` with `device_micro_batch_size`",
    cases={
        f"{family}-{rows}-{padding}": Case(
            partial(tiny, family), {"device_micro_batch_size": rows}, {"padding": padding}
        )
        for family in ("llama", "gpt2", "gemma3_text")
        for rows in (1, 2)
        for padding in ("left", "none")
    },
)
def micro_batches(model: Any, padding: str) -> Any:
    batch = tiny_models.batch(padding=padding)
    return _generate(model, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


@row("W7.sampling", SECTION, "`generate` with sampling, beams, penalties: the same draws as a plain model",
     cases={
         "sampling": Case(arguments={"do_sample": True, "temperature": 1.3, "top_k": 20}),
         "beams": Case(arguments={"num_beams": 3}),
         "returned": Case(arguments={"do_sample": True, "num_return_sequences": 2}),
         "penalty": Case(arguments={"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
         "no-cache": Case(arguments={"use_cache": False}),
         "static-cache": Case(arguments={"cache_implementation": "static"}),
     })  # fmt: skip
def sampling(model: Any, **settings: Any) -> Any:
    ids = tiny_models.batch(rows=2, padding="none")["input_ids"]
    return _generate(model, input_ids=ids, **settings)


@row("W7.scores", SECTION, "`generate` with scores and hidden states in its output")
def scores(model: Any) -> Any:
    ids = tiny_models.batch(rows=2, padding="none")["input_ids"]
    output = model.eval().generate(
        ids, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        output_hidden_states=True,
    )  # fmt: skip
    return [output.sequences, list(output.scores), [list(states) for states in output.hidden_states]]


@row("W7.after-training", SECTION, "`generate` between steps, in training mode, and continue training")
def after_training(model: Any) -> Any:
    from tests.seams.use import adamw, gradients, train

    optimizer = adamw(model)
    train(model, optimizer)
    ids = tiny_models.batch(rows=2, padding="none")["input_ids"]
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return [tokens, gradients(model)]


@row("generate.embeds", SECTION, "`generate` from embeddings instead of tokens")
def from_embeddings(model: Any) -> Any:
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    return _generate(model, inputs_embeds=hidden)


@row("generation.pipeline", SECTION, "`pipeline('text-generation', model=model, tokenizer=...)`, greedy and with sampling",
     cases={"": Case(partial(tiny_model.build_model, 373))})  # fmt: skip
def text_pipeline(model: Any) -> Any:
    from transformers import pipeline

    pipe = pipeline("text-generation", model=model, tokenizer=tiny_model.build_tokenizer())
    greedy = pipe("What does the keeper do?", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    torch.manual_seed(0)
    chat = [[{"role": "user", "content": "Who counts the stars?"}]]
    return [greedy, pipe(chat, max_new_tokens=6, do_sample=True)[0][0]["generated_text"][-1]["content"]]
