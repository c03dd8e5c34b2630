"""The config of a model in a GGUF file, as llama.cpp computes with the file's metadata."""

from types import SimpleNamespace
from typing import Any

from horizon_lm.common.gguf_header import GgufHeader
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.config_limits import require_sane_sizes
from horizon_lm.model.gguf_architectures import ARCHITECTURES, NUMBERS, Architecture
from horizon_lm.model.gguf_keys import Keys, rejected
from horizon_lm.model.gguf_other_architectures import OTHER_ARCHITECTURES
from horizon_lm.model.gguf_rotary import read_rotary

_HEAD = "output.weight"
_TOKENS = "tokenizer.ggml.tokens"
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of(header: GgufHeader) -> Any:
    """Return the Hugging Face config of a file.

    Raises:
        ConfigError: the file has no model of a known architecture, a key of its metadata is missing or not supported, or a size is absurd.
    """
    require_sane_sizes({name.rpartition(".")[2]: value for name, value in header.metadata.items()}, header.path)
    try:
        _require_whole_model(header)
        model_type, architecture = architecture_of(header)
        keys = Keys(header, architecture.name)
        values = _settings(keys, architecture, header)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:  # of values of another type than they should have
        raise ConfigError(
            f"gguf_file: {header.path} cannot be read ({first_line(error)}); download it again"
        ) from error
    keys.require_all_used()
    return _build(model_type, values, header)


def _settings(keys: Keys, architecture: Architecture, header: GgufHeader) -> dict[str, Any]:
    """Return the settings of a file's model."""
    values = _number_settings(keys, architecture, header)
    values |= _attention(keys, architecture, header, values)
    values = {  # what the file has itself, in place of what llama.cpp assumes
        **architecture.assumed(SimpleNamespace(**values)),
        **{key: tensor in header.tensors for key, tensor in architecture.of_tensors.items()},
        **values,
    }
    values.setdefault("tie_word_embeddings", _HEAD not in header.tensors)
    for name, value in architecture.switches.items():
        if keys.take(name, value) != value:
            raise keys.rejected(name)
    return values | {key: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in _TOKEN_IDS.items()}


def architecture_of(header: GgufHeader) -> tuple[str, Architecture]:
    """Return the model type of a file and its architecture; raise ConfigError if it is not known."""
    name = header.metadata.get("general.architecture")
    every = ARCHITECTURES | OTHER_ARCHITECTURES
    found = [(kind, each) for kind, each in every.items() if each.name == name]
    if not found:
        known = ", ".join(sorted({architecture.name for architecture in every.values()}))
        raise ConfigError(
            f"gguf_file: {header.path}: general.architecture: {name} is not supported; files of {known} are opened"
        )
    # Mixtures may share their name with models that have no experts.
    has_experts = bool(header.metadata.get(f"{name}.expert_count"))
    fitting = [(kind, each) for kind, each in found if ("expert_count" in each.numbers.values()) == has_experts]
    return (fitting or found)[0]


def _require_whole_model(header: GgufHeader) -> None:
    """Raise ConfigError if a file is a part of a model, or something else than a model."""
    metadata = header.metadata
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(
            f"gguf_file: {header.path} is part {metadata.get('split.no', 0) + 1} of {metadata['split.count']} of a model; join all parts "
            "first: llama-gguf-split --merge FIRST_PART OUT"
        )
    if (kind := metadata.get("general.type", "model")) != "model":
        raise rejected(header.path, "general.type", kind)
    if adapter := next((name for name in metadata if name.startswith(("adapter.", "xielu."))), None):
        raise rejected(header.path, adapter, metadata[adapter])


def _number_settings(keys: Keys, architecture: Architecture, header: GgufHeader) -> dict[str, Any]:
    """Return the settings that a file has as numbers, and those that `Architecture.read` derives from its metadata.

    Raises:
        ConfigError: a number is missing, or llama.cpp would not compute with it as it is written.
    """
    defaults = {"num_key_value_heads": keys.single("attention.head_count"), **architecture.absent}
    found = dict(architecture.read(keys))
    if tokens := header.metadata.get(_TOKENS):  # which count, whatever `vocab_size` is
        found["vocab_size"] = len(tokens)
        keys.take("vocab_size")  # which counts as used
    for key, name in {**NUMBERS, **architecture.numbers}.items():
        if key in found:
            continue
        found[key] = keys.single(name, defaults[key]) if key in defaults else keys.require(name)
        if isinstance(found[key], str):
            raise keys.rejected(name)
        if name.endswith("scale") and found[key] <= 0.0:
            raise keys.rejected(name)  # llama.cpp takes a scale of 0 for a missing one
        if name.endswith("_softcapping") and found[key] == 0.0:
            if defaults[key] is not None:
                raise keys.rejected(name)  # llama.cpp divides by it, or does not, depending on its kernel
            found[key] = None
    return found


def _attention(keys: Keys, architecture: Architecture, header: GgufHeader, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of heads, of rotary embeddings and of windows, given the ``numbers`` from `_number_settings`.

    Raises:
        ConfigError: heads of two sizes, or a scaling or a window that transformers cannot compute in this architecture.
    """
    num_heads = numbers["num_attention_heads"]
    usual_head_dim = numbers["hidden_size"] // num_heads if num_heads else 0
    head_dim = keys.single("attention.key_length", usual_head_dim)
    found: dict[str, Any] = {"head_dim": head_dim}
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if keys.single(name, head_dim) != head_dim:
            raise keys.rejected(name)
    if architecture.has_rotary:
        context = numbers["max_position_embeddings"]
        read = read_rotary(keys, header, head_dim, context, architecture.partial_rotary, architecture.factors)
        if architecture.only_longrope and read["rope_type"] in ("linear", "yarn"):
            names = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
            raise keys.rejected(next(name for name in names if keys.take(name) is not None))
        found["rope_parameters"] = read | numbers.get("rope_parameters", {})
    if "sliding_window" in numbers:
        found["sliding_window"] = numbers["sliding_window"] or None
        if not numbers["sliding_window"] and architecture.absent["sliding_window"]:
            raise keys.rejected("attention.sliding_window")  # a window of 0, in which a token does not even see itself
    if architecture.window_pattern is not None:
        found |= _window_settings(keys, architecture.window_pattern, architecture.window_theta, {**numbers, **found})
    return found


def _window_settings(keys: Keys, pattern: int, own_theta: float | None, values: dict[str, Any]) -> dict[str, Any]:
    """Return the types of layers, their window, and the rotary parameters of each type if windows have an ``own_theta``."""
    rotary = values["rope_parameters"]
    found: dict[str, Any] = {
        "layer_types": _layer_types(keys, pattern, values),
        # Without windows, transformers needs the size of one all the same.
        "sliding_window": values["sliding_window"] or values["max_position_embeddings"],
    }
    theta = keys.take("rope.freq_base_swa", rotary["rope_theta"] if own_theta is None else own_theta)
    if own_theta is not None:
        of_windows = {"rope_type": "default", "rope_theta": theta}
        found["rope_parameters"] = {"full_attention": rotary, "sliding_attention": of_windows}
    elif theta != rotary["rope_theta"]:
        raise keys.rejected("rope.freq_base_swa")
    return found


def _layer_types(keys: Keys, pattern: int, values: dict[str, Any]) -> list[str]:
    """Return the type of each layer of a model with windows in some of its layers.

    Args:
        keys: the metadata, whose pattern may be a list with a flag for each layer, or a number as in `Architecture.window_pattern`.
        pattern: the number that llama.cpp assumes if the file has no pattern.
        values: the settings of the model.
    """
    name, num_layers = "attention.sliding_window_pattern", values["num_hidden_layers"]
    given = keys.take(name, pattern)
    if isinstance(given, list):
        in_window = given
    else:
        # The last of every so many layers has full attention; with 0, none has.
        in_window = [given == 0 or layer % given < given - 1 for layer in range(num_layers)]
    if len(in_window) != num_layers:
        raise keys.rejected(name)
    window = values["sliding_window"]
    return ["sliding_attention" if window and each else "full_attention" for each in in_window]


def _build(model_type: str, values: dict[str, Any], header: GgufHeader) -> Any:
    """Return the config of a type with these settings; raise ConfigError if transformers cannot build it."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *kind.attribute_map}
    usual_head_dim = values["hidden_size"] // max(values["num_attention_heads"], 1)
    try:
        return kind(
            **{
                key: value
                for key, value in values.items()
                # Models read `head_dim` if a config has it, even if the config does not declare it.
                if key in known or (key == "head_dim" and value != usual_head_dim)
            }
        )
    except Exception as error:  # the checks of transformers raise anything
        raise ConfigError(
            f"gguf_file: {header.path}: transformers has no {model_type} with these settings ({first_line(error)})"
        ) from error
