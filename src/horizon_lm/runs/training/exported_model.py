"""The folder of a trained model: write it, upload it, and say how to use it."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.disk import Replacement
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.adapter_config import ADAPTER_CONFIG, convert_weights, share_weights
from horizon_lm.model.generation import write_generation_config
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.vision import Vision
from horizon_lm.runs.training.output_folder import output_folder
from horizon_lm.runs.training.run import Run, RunResult
from horizon_lm.runs.training.run_dir import RunDir


def write_model(
    run_dir: RunDir, model: Any, tokenizer: Any, target: Path, dtype: str | None, vision: Vision | None = None
) -> str:
    """Write a model. The folder gets its name once it is complete and durable; only then is an old one of the run deleted.

    All ranks call this, because each has a part of the weights. The folder is written by the first one: what libraries write on
    the others, such as PEFT's adapters, is discarded.

    Args:
        run_dir: the folder of the run.
        model, tokenizer: the contents of the folder.
        target: the folder.
        dtype: the name of the dtype of the weights; None for the model's own.
        vision: the processor of images, whose files are copied; None for a model of text.

    Returns:
        A line about files that are not of the run and had the name of the folder; empty if there are none.

    Raises:
        OSError: the folder cannot be written to. It is raised on all ranks. Nothing of it is left.
    """
    ranks = run_dir.ranks
    new = Replacement(run_dir.disk, run_dir.own_path(target), partial(run_dir.is_unchanged, target))
    try:
        with ranks.failing_with_first("the folder of the model"):
            new.begin()
            run_dir.disk.make_folder(new.part)
        with ranks.failing_with_first("the export"):
            model.save_pretrained(new.part, dtype=getattr(torch, dtype) if dtype else None)
            if dtype:
                convert_weights(new.part, dtype)
            share_weights(new.part)
            if ranks.is_first:
                if (new.part / ADAPTER_CONFIG).is_file():  # PEFT writes none
                    write_generation_config(model.generation_config, new.part)
                tokenizer.save_pretrained(new.part)
                if vision is not None:
                    vision.copy_files(new.part)
                new.publish()
            else:
                new.discard()
    except BaseException:
        new.discard()
        raise
    return "" if new.kept is None else f"{target} is not of this run, and is now {new.kept}"


def require_login() -> None:
    """Raise ConfigError before training if the model could not be uploaded afterwards."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # network or token
        raise ConfigError(
            f"push_to_hub: the hub cannot be used ({first_line(error)}); log in with hf auth login, or remove push_to_hub"
        ) from error


def push(config: RunConfig, folder: Path) -> str:
    """Upload the model in a folder, which stays. Return a line with its address, or about the failure."""
    from huggingface_hub import HfApi

    name = config.hub_model_id or output_folder(config).resolve().name
    try:
        api = HfApi()
        repo = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Trained with Horizon-LM")
    except Exception as error:  # network, permissions or hub; not worth failing a finished run
        return f"push_to_hub: the model was not uploaded ({first_line(error)}); it is in {folder}"
    return f"the trained model is at {repo}"


def final_message(config: RunConfig, run: Run, result: RunResult, warning: str) -> str:
    """Return the last lines of a run: early stop, skipped steps, and how to use the model, as commands that run as they are.

    Args:
        config: settings of the run.
        run: the run.
        result: its result.
        warning: lines to add, each with its line break.
    """
    steps_done, num_steps, num_skipped = result.num_steps, run.intervals.num_steps, result.num_skipped
    early = f"stopped by a callback after step {steps_done} of {num_steps}\n" if steps_done < num_steps else ""
    skipped = ""
    if num_skipped:
        skipped = f"steps skipped because their gradient was not finite: {num_skipped} of {steps_done}"
        skipped += "; the model is unchanged\n" if num_skipped == steps_done else "\n"
    folder, merge = shlex.quote(str(result.model_dir)), ""
    trust = " --trust-remote-code" if config.trust_remote_code else ""
    unproven = " --allow-unproven-model" if config.allow_unproven_model else ""
    if (result.model_dir / ADAPTER_CONFIG).is_file():
        merge = f"Merge the adapters into their base, for a model of its own:\n  horizon-lm merge {folder} OUT{trust}\n"
    task, inputs, image = _example(run)
    arguments = f'"{task}", {json.dumps(str(result.model_dir))}{", trust_remote_code=True" if trust else ""}'
    return (
        f"{early}{skipped}{warning}\nThe trained model is in {result.model_dir}. Try it:\n"
        f'  horizon-lm generate {folder} "..."{image}{trust}{unproven}\n'
        f"{merge}Look at the run:\n  horizon-lm report {shlex.quote(str(result.output_dir))}\n"
        f"Use it in Python:\n  from transformers import pipeline\n  print(pipeline({arguments})({inputs}))"
    )


def _example(run: Run) -> tuple[str, str, str]:
    """Return the task of a run in transformers, an example of the inputs of its pipeline, and options for ``generate``."""
    has_template = run.tokenizer.chat_template is not None
    if run.vision is None or not run.data.training.packed.has_images:
        return "text-generation", '[{"role": "user", "content": "..."}]' if has_template else '"..."', ""
    contents = '[{"type": "image", "path": "FILE"}, {"type": "text", "text": "..."}]'
    messages = f'text=[{{"role": "user", "content": {contents}}}]'
    text = f'"FILE", text={json.dumps(f"{run.vision.processor.image_token} ...")}'
    return "image-text-to-text", messages if has_template else text, " --image FILE"
