"""``horizon-lm generate``: answer a prompt with a streamed model."""

import sys
from typing import Annotated, Any

import typer

from horizon_lm.cli import common
from horizon_lm.errors import ConfigError


@common.exits
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.")],
    image: Annotated[
        list[str] | None, typer.Option(help="File of an image, for models that read images; once for each image.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt, for models with a chat template.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens in the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    base: common.Base = None,
    device: common.Device = "auto",
    device_memory: common.DeviceMemory = None,
    precision: common.Precision = "bf16",
    gguf_file: common.GgufFile = None,
    trust_remote_code: common.RemoteCode = False,
    allow_unproven_model: common.Unproven = False,
) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens: {max_new_tokens}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature: {temperature}: must be 0 or more")
    memory = None if device_memory is None else common.read_size("--device-memory", device_memory)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("PROMPT is empty")
    common.require_gguf(model, base, gguf_file)
    from horizon_lm.engine.opening.model_opening import open_model  # imports torch, which takes seconds
    from horizon_lm.runs.training.samples import prompt_inputs

    request, tokenizer = common.find_model(
        model, base, device, memory, precision, gguf_file, trust_remote_code, allow_unproven_model
    )
    if image:
        inputs = _with_images(request, tokenizer, text, image, system)
    else:
        found = prompt_inputs(tokenizer, text, system)
        inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
    _answer(open_model(request).eval(), tokenizer, inputs, max_new_tokens, temperature, seed)


def _with_images(request: Any, tokenizer: Any, text: str, images: list[str], system: str | None) -> Any:
    """Return the inputs of a prompt with images; raise ConfigError if the model does not read images."""
    from horizon_lm.runs.training.image_prompts import prompt_with_images

    vision = common.find_vision(request)
    if vision is None:
        raise ConfigError(f"--image: {request.name} reads only text; remove it, or name a model of images and text")
    return prompt_with_images(tokenizer, vision, text, images, system)


def _answer(model: Any, tokenizer: Any, inputs: Any, max_new_tokens: int, temperature: float, seed: int) -> None:
    """Generate an answer and print it token by token."""
    import torch
    from transformers import TextStreamer

    from horizon_lm.common.visible import visible
    from horizon_lm.engine.streamed import forward_of
    from horizon_lm.model.generation import Generation, generation_settings
    from horizon_lm.runs.training.samples import padding_id

    class VisibleStreamer(TextStreamer):  # type: ignore[misc]
        """Print an answer with control characters as their escapes."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(visible(text), stream_end)

    prompt_length = inputs["input_ids"].shape[1]
    # The last token of the answer is not read again, so the cache does not hold it.
    cache = Generation(rows=1, prompt=prompt_length, length=prompt_length + max_new_tokens - 1)
    print(forward_of(model).generation.describe(cache), file=sys.stderr, flush=True)
    torch.manual_seed(seed)
    with generation_settings(model, max_new_tokens, padding_id(tokenizer), temperature):
        model.generate(**inputs, streamer=VisibleStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
