"""No step compiles a decoder: each kernel that it launches was launched when the model was opened."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import horizon_lm
from horizon_lm.device import cuda_link
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.memory.kernels import decoding
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.quantized_folders import save_published
from tests.support.thinned_cases import thinned

KERNELS = ("decode_4bit", "decode_mxfp4", "decode_fp8", "decode_int4")
CASES = [
    ("gpt_oss", "mxfp4", {}),
    ("gpt_oss", "mxfp4", {"expert_tile": 2}),
    ("llama", "4bit", {}),
    ("llama", "4bit", {"compute_dtype": torch.float32}),
    ("qwen3_moe", "fp8", {}),
    ("deepseek_v3", "int4", {}),
]


def _variant(argument: Any) -> Any:
    """Return what Triton compiles a kernel for: of a tensor or a number, only some properties."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return argument


class Launches:
    """Stand-ins for the kernels that compute nothing and note what is launched, by thread."""

    BLOCK = 1024

    def __init__(self) -> None:
        self.ROUNDED_TO = {dtype: str(dtype) for dtype in (None, torch.float32, torch.bfloat16, torch.float16)}
        self.seen: dict[tuple[Any, ...], str] = {}

    def __getattr__(self, name: str) -> Any:
        assert name in KERNELS
        return _Kernel(name, self.seen)


class _Kernel:
    def __init__(self, name: str, seen: dict[tuple[Any, ...], str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            key = (self._name, *map(_variant, arguments), *sorted(constants.items()))
            self._seen.setdefault(key, threading.current_thread().name)

        return launch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "kind", "options"), thinned(CASES, every=2), ids=str)
def test_kernels_are_launched_when_a_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, options: dict[str, Any]
) -> None:
    folder = save_published(family, kind, tmp_path / "model")
    options = options | ({"load_in_4bit": True} if kind == "4bit" else {})
    launches = Launches()
    monkeypatch.setattr(decoding, "has_triton", lambda: True)
    monkeypatch.setattr(decoding, "_kernels", lambda: launches)
    monkeypatch.setattr(cuda_link, "_PACKED_BYTES", 1000)  # cut into parts, the last of them smaller
    with emulated_gpu():
        model = horizon_lm.from_pretrained(
            folder, CudaDevice(), precision="bf16", attn_implementation="eager", compile=False, **options
        )
        opened = dict(launches.seen)
        with torch.no_grad():
            model(**tiny_models.batch(padding="none"))
        horizon_lm.synchronize(model)
    assert opened
    later = {key: thread for key, thread in launches.seen.items() if key not in opened}
    assert not later
