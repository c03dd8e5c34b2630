"""The suites: which tests of which project run on streamed models."""

import re
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Test files of one project, and the choice of tests in them."""

    source: str  # the project's folder
    files: tuple[str, ...]
    select: str  # as pytest's -k
    opens: bool = (
        False  # AutoModelForCausalLM in the tests' modules opens streamed models; otherwise trainers stream theirs
    )

    @property
    def images(self) -> bool:
        """True for tests of models of images and text."""
        return self.select == _IMAGES


_TEXT = "not vlm and not vision and not Slow and not liger and not vllm and not DataCollator"
_IMAGES = "(vlm or vision) and not Slow and not liger and not vllm and not DataCollator"
_EXPERIMENTAL = ("cpo", "gkd", "gmpo", "merge_model_callback", "online_dpo", "orpo", "sdft", "sdpo", "tpo")
_CAUSAL = (  # the tests of transformers' Trainer that train a causal language model
    "loss_alignment", "bnb", "neftune", "logging_inf_nan", "persistent_workers", "multiple_peft_adapters", "loss_parity",
    "torch_compile_loss", "training_lm", "lomo", "grokadamw", "schedulefree", "galore", "apollo", "stable_adamw",
    "special_token_alignment",
)  # fmt: skip
_ADAPTERS = (
    "adaption_prompt", "arrow", "boft", "cpt", "helpers", "lora_conversion", "lora_intruders", "lora_variants",
    "low_level_api", "multitask_prompt_tuning", "target_parameters", "trainable_tokens",
)  # fmt: skip


def _trl(name: str, select: str = _TEXT) -> Suite:
    return Suite("trl", (f"tests/test_{name}_trainer.py",), select)


def _experimental(name: str) -> str:
    return f"tests/experimental/test_{name}{'' if name.endswith('callback') else '_trainer'}.py"


SUITES = {
    "trl-sft": _trl("sft"),
    "trl-dpo": _trl("dpo"),
    "trl-kto": _trl("kto"),
    "trl-reward": _trl("reward"),
    "trl-grpo": _trl("grpo"),
    "trl-rloo": _trl("rloo"),
    **{f"trl-{name}-images": _trl(name, _IMAGES) for name in ("sft", "dpo", "kto", "grpo", "rloo")},
    "trl-experimental": Suite("trl", tuple(_experimental(name) for name in _EXPERIMENTAL), _TEXT),
    "trl-experimental-images": Suite("trl", (_experimental("online_dpo"),), _IMAGES),
    "transformers-trainer": Suite(
        "transformers", ("tests/trainer/test_trainer.py",), f"({' or '.join(_CAUSAL)}) and not Optimizer"
    ),
    "peft-decoders": Suite("peft", ("tests/test_decoder_models.py",), "not gpu", opens=True),
    "peft-adapters": Suite("peft", tuple(f"tests/test_{name}.py" for name in _ADAPTERS), "not gpu", opens=True),
}


def drawn(test: str, share: int, also: str = "") -> bool:
    """Tell whether a test is one of the `share` percent, the same ones each time, or matches the pattern `also`."""
    return zlib.crc32(test.encode()) % 100 < share or bool(also and re.search(also, test))
