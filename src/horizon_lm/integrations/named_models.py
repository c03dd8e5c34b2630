"""Open the model that a trainer is given by its name, as the trainer would: with its own arguments, but streamed.

The trainer reads ``args.model_init_kwargs`` and ``quantization_config`` itself, draws random weights after it has set the seed, and then
loads the model by a function of its module, which is replaced.
"""

from collections.abc import Callable
from typing import Any

import torch

from horizon_lm.engine.opening.loading import from_pretrained

CREATE_MODEL = "create_model_from_path"  # by which TRL's trainers load a model
AUTO_MODEL = "AutoModelForCausalLM"  # by which some of its experimental trainers do

Opener = Callable[..., Any]
"""Opens a model by its name, class and arguments of transformers, and returns it streamed."""


def replaced_loaders(open_trained: Opener) -> dict[str, Callable[[Any], Any]]:
    """Return functions that replace the loaders in the modules of a trainer, by the names of these; each is made of the original.

    Args:
        open_trained: opens the trained model.
    """

    def replace_function(_original: Any) -> Any:
        def create_model(name: str, architecture: Any = None, **kwargs: Any) -> Any:
            if "precision" not in kwargs:
                kwargs.setdefault("dtype", "float32")  # TRL's default
            return open_trained(name, architecture, **kwargs)

        return create_model

    def replace_class(original: Any) -> Any:
        class StreamedAutoModel(original):  # type: ignore[misc]
            @classmethod
            def from_pretrained(cls, name: str, **kwargs: Any) -> Any:
                return open_trained(name, original, **kwargs)

        return StreamedAutoModel

    return {CREATE_MODEL: replace_function, AUTO_MODEL: replace_class}


def open_named(name: str, device: str, model_class: Any, **kwargs: Any) -> Any:
    """Return the streamed model of a folder or hub id, in the precision of the dtype that transformers would load it in.

    Args:
        name: the folder or hub id.
        device: as in `horizon_lm.from_pretrained`.
        model_class: the class of transformers that opens it; None for the one of its folder.
        kwargs: arguments of transformers' ``from_pretrained``, or of `horizon_lm.from_pretrained`.
    """
    if kwargs.get("dtype", kwargs.get("torch_dtype", "auto")) in (None, "auto") and "precision" not in kwargs:
        kwargs["dtype"] = _dtype_of_folder(name, kwargs)
    # As TRL's default does, it lets one of several GPUs train the model.
    return from_pretrained(name, device, model_class=model_class, **{"device_map": "auto"} | kwargs)


def device_of(arguments: Any) -> str:
    """Return the device of the arguments of a trainer, or of an accelerator, as `horizon_lm.from_pretrained` takes it; auto for None."""
    device = getattr(arguments, "device", "auto")
    return "cpu" if getattr(device, "type", None) == "cpu" else str(device)  # accelerate numbers CPUs


def _dtype_of_folder(name: str, kwargs: dict[str, Any]) -> Any:
    """Return the dtype that a model was saved with, and bfloat16 for float16, whose range needs a loss that is scaled."""
    from transformers import AutoConfig

    known = ("trust_remote_code", "revision", "cache_dir", "token", "subfolder", "local_files_only")
    config = AutoConfig.from_pretrained(name, **{key: kwargs[key] for key in known if key in kwargs})
    dtype = getattr(config, "dtype", None) or torch.float32
    return torch.bfloat16 if dtype == torch.float16 else dtype
