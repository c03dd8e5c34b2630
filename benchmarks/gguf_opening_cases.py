"""Cases of gguf_opening.py: models, the files that are made of them, and the names that llama.cpp knows."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_llama_cpp import CASES, EXPERTS, GEMMA, LINEAR, LLAMA3, ORIGINAL, byte_level, save_model

from horizon_lm.runs.data.gguf_tokenizer import SPLIT_BY_PRE
from horizon_lm.tools.gguf.export import FILE, export_gguf

# llama.cpp's converter knows tokenizers by their hash, and no tiny ones: it is told the name of the way to split.
CONVERT = """
import sys
folder, model, out = sys.argv[1:]
sys.path[:0] = [folder, folder + "/gguf-py"]
import convert_hf_to_gguf as program
from conversion.base import TextModel
find = program.get_model_class
def model_class(*args, **kwargs):
    found = find(*args, **kwargs)
    found.set_vocab, found.no_mtp = TextModel._set_vocab_gpt2, True
    return found
program.get_model_class = model_class
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert", model, "--outfile", out, "--outtype", "f32"]
program.main()
"""
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0} | ORIGINAL
LINEAR_ATTENTION = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
LONG_PHI = "phi3, longrope, three quarters of a head"
EXPORTED: dict[str, tuple[str, dict[str, Any]]] = CASES | {
    "llama, one key head, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama, all key heads, llama3": ("llama", {"num_key_value_heads": 4, "rope_parameters": LLAMA3 | ORIGINAL, "head_dim": 64}),
    "mistral, yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "mixtral, llama3": ("mixtral", EXPERTS | {"rope_parameters": LLAMA3 | ORIGINAL}),
    "granite, llama3": ("granite", {"attention_multiplier": 0.5, "rope_parameters": LLAMA3 | ORIGINAL}),
    "qwen2, linear": ("qwen2", {"rope_parameters": LINEAR}),
    "qwen3, narrow heads, yarn": ("qwen3", {"head_dim": 8, "rope_parameters": YARN}),
    "gemma2, softcaps": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text, a softcap": ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "final_logit_softcapping": 3.0}),
    "phi3, half of a head": ("phi3", {"sliding_window": None, "rope_parameters": HALF}),
}  # fmt: skip
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    name: CASES[name]
    for name in (
        "llama", "llama, llama3 scaling", "llama, yarn", "llama, linear", "granite", "olmo2", "smollm3", "mixtral", "qwen2",
        "qwen2, yarn", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", LONG_PHI,
    )
} | {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "falcon": ("falcon", {"num_kv_heads": 1, "multi_query": True}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256}),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "mamba": ("mamba", {"state_size": 8, "expand": 2, "time_step_rank": 8, "intermediate_size": 128}),
    "nemotron, half of a head": ("nemotron", {"rope_parameters": HALF}),
    "qwen3_5_text": ("qwen3_5_text", LINEAR_ATTENTION),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", LINEAR_ATTENTION | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "stablelm, biases, half of a head": ("stablelm", {"use_qkv_bias": True, "rope_parameters": HALF}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
}  # fmt: skip
# Models with parts that are not read of all architectures: each file is opened as it is, or rejected by what it has.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, another decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, several key heads": ("falcon", {"num_kv_heads": 4, "multi_query": False}),
    "gpt2, narrow feed-forward layers": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256, "n_inner": 96},
    ),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral, a window": ("mistral", {"sliding_window": 16}),
    "nemotron, biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 16}),
    "phi3, a window": ("phi3", {"sliding_window": 16}),
    "qwen2, a window": ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2, a window": ("starcoder2", {"sliding_window": 16, "use_bias": True}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False}),
}
# Keys that are changed together; all keys are also changed alone.
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 3.0}),
    ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.5}),
    ("llama", {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 3.0}),
    ("llama", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 3.0}),
    ("llama", {"llama.rope.scaling.factor": 3.0, "llama.rope.scale_linear": 5.0}),
    ("llama", {"llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 5.0}),
    ("llama", {"llama.rope.scaling.factor": 3.0, "llama.rope.freq_base": 777.0}),
    ("llama", {"llama.attention.key_length": None, "llama.attention.value_length": None, "llama.rope.dimension_count": None}),
    ("llama", {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}),
    ("llama", {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]}),
    ("llama", {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1}),
    ("llama", {"llama.attention.head_count": 8, "llama.attention.head_count_kv": 4, "llama.attention.key_length": None,
               "llama.attention.value_length": None, "llama.rope.dimension_count": None}),
    ("llama, yarn", {"llama.rope.scaling.factor": 1.0, "llama.rope.scaling.attn_factor": 0.5}),
    ("llama, yarn", {"llama.rope.scaling.original_context_length": None, "llama.context_length": 90}),
    ("llama, yarn", {"llama.rope.scaling.yarn_beta_fast": 32.0, "llama.rope.scaling.yarn_beta_slow": 1.0}),
    ("llama, yarn", {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.yarn_beta_slow": 2.0}),
    ("llama, llama3 scaling", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}),
    ("llama, llama3 scaling", {"llama.rope.freq_base": 777.0}),
    ("mixtral", {"llama.expert_count": 0, "llama.expert_used_count": 0}),
    ("mixtral", {"llama.expert_count": 3, "llama.expert_used_count": 2}),
    ("mixtral", {"llama.expert_count": None, "llama.expert_used_count": None}),
    ("qwen2_moe", {"qwen2moe.expert_group_count": 2, "qwen2moe.expert_group_used_count": 1}),
    ("qwen3_moe", {"qwen3moe.expert_gating_func": 2, "qwen3moe.expert_weights_norm": True}),
    ("gemma2", {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": 3.0}),
    ("gemma2", {"gemma2.attn_logit_softcapping": 0.0, "gemma2.final_logit_softcapping": 0.0}),
    ("gemma2", {"gemma2.attention.sliding_window": 5, "gemma2.rope.freq_base_swa": 10_000.0}),
    ("gemma2", {"gemma2.attention.sliding_window": 5, "gemma2.attention.sliding_window_pattern": 3}),
    ("gemma3_text", {"gemma3.attention.sliding_window": None, "gemma3.rope.freq_base_swa": 777.0}),
    ("gemma3_text", {"gemma3.attention.sliding_window": 5, "gemma3.attention.sliding_window_pattern": 2}),
    ("gemma3_text", {"gemma3.attention.sliding_window": 5, "gemma3.attention.sliding_window_pattern": [True, False] * 3 + [True]}),
    ("gemma3_text", {"gemma3.rope.scaling.factor": 2.0, "gemma3.rope.scaling.type": "yarn"}),
    ("gemma3_text", {"gemma3.rope.scaling.factor": 2.0, "gemma3.rope.freq_base_swa": 777.0}),
    ("granite", {"granite.residual_scale": 0.5, "granite.attention.scale": 0.1, "granite.embedding_scale": 3.0}),
    ("granite", {"granite.residual_scale": None, "granite.attention.scale": None, "granite.embedding_scale": None}),
    ("granite", {"granite.rope.scaling.finetuned": True, "granite.rope.scaling.factor": 2.0}),
    ("olmo2", {"olmo2.attention.sliding_window": 8, "olmo2.attention.sliding_window_pattern": 2}),
    ("phi3", {"phi3.attention.sliding_window": 9, "phi3.rope.dimension_count": 8}),
    ("phi3", {"phi3.rope.scaling.type": "yarn", "phi3.rope.scaling.factor": 4.0}),
    (LONG_PHI, {"phi3.rope.scaling.attn_factor": 1.3, "phi3.rope.scaling.original_context_length": 64}),
    (LONG_PHI, {"phi3.rope.scaling.attn_factor": None}),
    (LONG_PHI, {"phi3.context_length": 24}),
]  # fmt: skip
# Keys of files that Horizon-LM is not shown, so that it computes another model: the grid has to say so.
CONTROLS = [
    ("llama", "rope.freq_base"), ("llama", "rope.scaling.factor"), ("llama", "rope.scale_linear"), ("llama", "attention.head_count_kv"),
    ("llama", "attention.causal"), ("llama, yarn", "rope.scaling.type"), ("llama, yarn", "rope.scaling.original_context_length"),
    ("llama, yarn", "rope.scaling.attn_factor"), ("gemma2", "attn_logit_softcapping"), ("gemma2", "final_logit_softcapping"),
    ("gemma2", "attention.sliding_window"), ("gemma2", "rope.freq_base_swa"), ("gemma3_text", "rope.freq_base_swa"),
    ("gemma3_text", "attention.sliding_window_pattern"), ("gemma3_text", "attention.sliding_window"),
    ("granite", "rope.scaling.finetuned"),
]  # fmt: skip
# Whether tokens are added before and after a text, one for each way to split it in turn.
AROUND = [(True, False), (False, True), (True, True), (False, False)]


class Files:
    """Models and their files, made when they are first asked for."""

    def __init__(self, folder: Path, converter: Path, text: str) -> None:
        self.folder, self._converter, self._tokenizer = folder, converter, byte_level(SPLIT_BY_PRE["gpt-2"], text)

    def _model(self, name: str, model_type: str, settings: Mapping[str, Any]) -> Path:
        model = self.folder / name.replace(" ", "_") / "model"
        if not model.exists():
            save_model(model, model_type, dict(settings))
            self._tokenizer.save_pretrained(model)
        return model

    def exported(self, name: str) -> tuple[Path, Path]:
        """Return the folder of a model, and the file that the export writes of it."""
        model = self._model(name, *EXPORTED[name])
        if not (model.parent / "out").exists():
            export_gguf(model, model.parent / "out")
        return model, model.parent / "out" / FILE

    def converted(self, name: str) -> tuple[Path, Path]:
        """Return the folder of a model, and the file that llama.cpp's converter writes of it."""
        model_type, settings = (CONVERTED | VARIANTS)[name]
        # With more rows than tokens, because transformers adds some to tokenizers of Qwen. The converter cuts those of Gemma 3.
        rows = 1002 if model_type == "gemma3_text" else 1100
        model = self._model(f"{name}, converted", model_type, settings | {"vocab_size": rows})
        if (model.parent / FILE).exists():
            return model, model.parent / FILE
        command = [sys.executable, "-c", CONVERT, str(self._converter), str(model), str(model.parent / FILE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-600:]}")
        return model, model.parent / FILE

    def of(self, name: str) -> Path:
        """Return the file of a case, which the export writes if it can."""
        return self.exported(name)[1] if name in EXPORTED else self.converted(name)[1]


class Names:
    """Names that the source of llama.cpp has: of architectures, keys of their metadata, keys of tokenizers, and ways to split text."""

    def __init__(self, source: Path) -> None:
        arch = (source / "src" / "llama-arch.cpp").read_text("utf-8")
        vocab = (source / "src" / "llama-vocab.cpp").read_text("utf-8")
        self.architectures = re.findall(r'LLM_ARCH_\w+, +"([^"]+)"', arch)
        self.keys = re.findall(r'LLM_KV_\w+, +"%s\.([^"]+)"', arch)
        self.tokenizer_keys = re.findall(r'LLM_KV_\w+, +"(tokenizer\.[^"]+)"', arch)
        self.splits = sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', vocab)))
