"""``horizon-lm eval``: run lm-eval tasks (https://github.com/EleutherAI/lm-evaluation-harness) on a streamed model."""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from horizon_lm.cli import common
from horizon_lm.cli.outputs import file_to_write
from horizon_lm.common.paths import near_path
from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError, first_line


def load_tasks(names: Sequence[str]) -> list[Any]:
    """Load tasks by their names in lm-eval, or from YAML files.

    Raises:
        ConfigError: lm-eval is not installed, or a task cannot be loaded.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            "eval needs lm-eval, which is not installed: pip install lm_eval, or Horizon-LM with its extra eval"
        ) from error
    wanted = [name.strip() for text in names for name in text.split(",") if name.strip()]
    if not wanted:
        raise ConfigError("--tasks: no task is named; name a task of lm-eval or a YAML file")
    files = [name for name in wanted if name.endswith((".yaml", ".yml"))]
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"--tasks: {name}: no such file{near_path(name)}")
    found: dict[str, Any] = {}
    with _quiet():
        manager = TaskManager(include_defaults=len(files) < len(wanted))
        for name in wanted:
            file = Path(name).resolve()
            # Paths in a task file are relative to its folder.
            with contextlib.chdir(file.parent) if name in files else contextlib.nullcontext():
                try:
                    found |= manager.load(str(file) if name in files else name)["tasks"]
                except Exception as error:  # YAML, Jinja, the hub or the task's own Python
                    where = " (its paths are relative to its folder)" if name in files else ""
                    raise ConfigError(f"--tasks: {name} cannot be loaded{where}: {first_line(error)}") from error
    return list(found.values())


def require_template(tokenizer: Any) -> None:
    """Raise ConfigError if a tokenizer has no chat template, or one that rejects a question."""
    from horizon_lm.runs.training.samples import prompt_inputs

    if tokenizer.chat_template is None:
        raise ConfigError("--apply-chat-template: the tokenizer has no chat template; remove the option")
    prompt_inputs(tokenizer, "?")  # lm-eval would end with whatever the template raises


def evaluate_model(
    model: Any, tokenizer: Any, tasks: list[Any], num_fewshot: int | None, limit: int | None, batch_size: int,
    apply_chat_template: bool, processor: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Run tasks on a streamed model, and return all results, as lm-eval does.

    Args:
        model, tokenizer, tasks: what is run.
        num_fewshot, limit, batch_size, apply_chat_template: the options of the command.
        processor: the processor of images, for tasks that have some; None for others.

    Raises:
        ConfigError: lm-eval rejects the settings.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.hf_vlms import HFMultimodalLM
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from horizon_lm.engine.streamed import engine_of

    class WithImages(HFMultimodalLM):  # type: ignore[misc]
        """lm-eval's model of images and text, which would open the processor with its parts for videos."""

        def _create_tokenizer(self, *_: Any, **__: Any) -> None:
            self.processor, self.tokenizer = processor, processor.tokenizer

    with _quiet():
        if processor is None:
            harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        else:
            harness = WithImages(model, batch_size=batch_size, convert_img_format=True)
        # lm-eval would use the device of the weights, which is the host; logits are computed on the engine's device.
        harness._device = engine_of(model).device.torch_device
        try:
            results = simple_evaluate(
                model=harness, tasks=tasks, num_fewshot=num_fewshot, limit=limit, batch_size=batch_size,
                apply_chat_template=apply_chat_template, log_samples=False,
                # The tasks are loaded. By default lm-eval would read all of its own, which takes 16 seconds.
                task_manager=TaskManager(include_defaults=False),
            )  # fmt: skip
        # For example, more few-shot examples than rows, or an answer as long as the model's context.
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"lm-eval rejects the settings: {first_line(error)}") from error
    assert results is not None
    return dict(results)


def _require_images(tasks: Sequence[Any], model: str, vision: Any) -> None:
    """Raise ConfigError if a model reads no images, or lm-eval does not support a task beside those with images."""
    names = [task.config.task for task in tasks if getattr(task, "MULTIMODAL", False)]
    if vision is None:
        raise ConfigError(
            f"--tasks: {', '.join(names)}: questions have images, and {model} reads only text; name a model of images and text"
        )
    for task in tasks:
        if task.OUTPUT_TYPE != "generate_until":
            raise ConfigError(
                f"--tasks: {task.config.task} compares likelihoods, which lm-eval does not support beside tasks with images; evaluate it by a "
                "command of its own"
            )


def write_results(results: Mapping[str, Any], path: Path) -> None:
    """Write all results as JSON. Raise ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: silence lm-eval's usage hints and its git calls, which fail outside a repository."""
    from lm_eval import evaluator

    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with patch.object(evaluator, "get_git_commit_hash", lambda: None):
            yield
    finally:
        logger.setLevel(before)


@common.exits
def eval(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id.")],
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks", help="A task of lm-eval, or a YAML file with one, whose paths are relative to its folder; may repeat."
        ),
    ],
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question; default: the task's own number.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only the first questions of each task.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Render questions with the chat template.")] = False,
    base: common.Base = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions in one forward pass.")] = 8,
    output: Annotated[Path | None, typer.Option(help="JSON file to write all results to.")] = None,
    device: common.Device = "auto",
    device_memory: common.DeviceMemory = None,
    precision: common.Precision = "bf16",
    gguf_file: common.GgufFile = None,
    trust_remote_code: common.RemoteCode = False,
    allow_unproven_model: common.Unproven = False,
) -> None:  # fmt: skip
    output = None if output is None else file_to_write(output, "the results are JSON", ".json")
    memory = None if device_memory is None else common.read_size("--device-memory", device_memory)
    common.require_gguf(model, base, gguf_file)
    from horizon_lm.engine.opening.model_opening import open_model  # imports torch, which takes seconds

    loaded = load_tasks(tasks)
    request, tokenizer = common.find_model(
        model, base, device, memory, precision, gguf_file, trust_remote_code, allow_unproven_model
    )
    if apply_chat_template:
        require_template(tokenizer)
    has_images = any(getattr(task, "MULTIMODAL", False) for task in loaded)
    vision = common.find_vision(request) if has_images else None
    if has_images:
        _require_images(loaded, model, vision)
    processor = None if vision is None else vision.processor
    streamed = open_model(request).eval()
    results = evaluate_model(
        streamed, tokenizer, loaded, num_fewshot, limit, batch_size, apply_chat_template, processor
    )
    from lm_eval.utils import make_table

    print(visible(make_table(results)))
    if output is not None:
        write_results(results, output)
        print(f"results: {output}")
