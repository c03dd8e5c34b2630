"""The folder of a model: the files that it is read from, and the remedies if it cannot be read."""

from pathlib import Path

from horizon_lm.common.paths import near_path, require_inside, require_own_files, require_regular
from horizon_lm.errors import ConfigError

PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer*", "*.model", "*.py")
TEMPLATES = "additional_chat_templates"  # the folder of a tokenizer's templates beside the default one
_ALSO_READ = ("*.gguf", TEMPLATES, f"{TEMPLATES}/*")  # in a local folder
_OF_TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "*.tiktoken", "tekken.json", "merges.txt", "*.py")  # one of these
WEIGHTS = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the files that may have a folder's weights: as for transformers, one file is before an index of several."""
    single = folder / WEIGHTS
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def code_remedy(error: Exception) -> str:
    """Return the remedy for a model whose code transformers may not run; empty for other errors."""
    if "trust_remote_code" not in str(error):
        return ""
    return "; if you trust the code, allow it with trust_remote_code: true (--trust-remote-code)"


def gguf_remedy(folder: Path) -> str:
    """Return the remedy for a folder that has its model in a GGUF file alone, which must be named; empty for others."""
    files = sorted(folder.glob("*.gguf"))
    if not files or (folder / "config.json").exists():
        return ""
    name = files[0].name
    return f"; read it from {name} with gguf_file: {name} (--gguf-file {name})"


def require_tokenizer_files(folder: Path) -> None:
    """Raise ConfigError if a folder has no file from which a tokenizer could be made."""
    if not any(path.suffix != ".gguf" for pattern in _OF_TOKENIZERS for path in folder.glob(pattern)):
        remedy = gguf_remedy(folder) or "; copy tokenizer.json and tokenizer_config.json into it"
        raise ConfigError(f"{folder} has no tokenizer that can be read (there are no files of one){remedy}")


def no_model_remedy(folder: Path) -> str:
    """Return the remedy for a folder without a model's config: it may hold adapters, a GGUF file, or the folder of a model."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "; it holds adapters: name their base, and this folder with adapter_name_or_path"
    if remedy := gguf_remedy(folder):
        return remedy
    inner = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    if len(inner) == 1:
        return f"; did you mean {inner[0].parent}?"
    return "; name the folder of a model, or download it again"


def require_model_files(folder: Path) -> None:
    """Raise ConfigError if a file that a model may be read from leads out of its folder, or is a pipe or a device."""
    require_own_files(folder, (*PATTERNS, *_ALSO_READ))


def gguf_path(folder: Path, gguf_file: str) -> Path:
    """Return the path of a GGUF file; raise ConfigError if it is missing or outside the folder."""
    path = folder / gguf_file
    require_regular(path)
    if not path.is_file():
        raise ConfigError(f"gguf_file: {path} is missing{near_path(path)}")
    require_inside(path, folder)
    return path
