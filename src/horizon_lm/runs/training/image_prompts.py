"""Put the images of a user into a prompt, as those of a row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.data.conversations import Conversation, RowError
from horizon_lm.runs.data.image_files import ImageBytes, decode
from horizon_lm.runs.data.row_images import place_in_messages, place_in_text
from horizon_lm.runs.data.template_contents import TemplateContents
from horizon_lm.runs.data.vision import Vision
from horizon_lm.runs.training.samples import prompt_messages, require_system


def prompt_with_images(
    tokenizer: Any, vision: Vision, prompt: str, files: Sequence[str], system: str | None = None
) -> dict[str, Any]:
    """Return the inputs of the model for a prompt with images, rendered with the chat template if the tokenizer has one.

    Args:
        tokenizer: the tokenizer of the model.
        vision: its processor of images.
        prompt: the message of the user. Images stand at ``<image>``, or before the text if it has none.
        files: the files of the images, in their order.
        system: the system prompt, or None.

    Raises:
        ConfigError: an image cannot be read, the prompt has another number of placeholders, or as `samples.prompt_inputs`.
    """
    try:
        pixels = [vision.scaled(decode(ImageBytes(_read(file), file))) for file in files]
        text = _rendered(tokenizer, vision, prompt, files, system)
        expanded = vision.expand(text, pixels)
    except RowError as error:
        raise ConfigError(f"--image: {error}") from error
    tokens = tokenizer(expanded.text, add_special_tokens=tokenizer.chat_template is None, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask, **vision.inputs([pixels], ids, mask)}


def _read(file: str) -> bytes:
    """Return the content of a file; raise ConfigError if it cannot be read."""
    try:
        return Path(file).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--image: {file!r} cannot be read ({first_line(error)})") from error


def _rendered(tokenizer: Any, vision: Vision, prompt: str, files: Sequence[str], system: str | None) -> str:
    """Return the text of a prompt, with the token of the processor at the place of each image.

    Raises:
        ConfigError: as `samples.prompt_inputs`.
        RowError: the prompt has another number of placeholders than images.
    """
    row, messages = {"images": [*files]}, prompt_messages(tokenizer, prompt, system)
    if tokenizer.chat_template is None:
        text, _ = place_in_text(row, prompt if "<image>" in prompt else "<image>" * len(files) + prompt)
        return TemplateContents(tokenizer, {}, vision).place_in_text(text)
    messages, references = place_in_messages(row, messages)
    contents = TemplateContents(tokenizer, {}, vision).of(Conversation(messages, images=references))
    try:
        text = str(tokenizer.apply_chat_template(contents, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program and may raise any exception
        raise ConfigError(f"the chat template rejects the prompt: {first_line(error)}") from error
    require_system(system, text)
    return text
