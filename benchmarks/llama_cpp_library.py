"""llama.cpp through its C functions (https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h)."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CONTEXT = 256


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("num_sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    )


class _Params(ctypes.Structure):
    """Parameters of a model or a context: larger than any version's, because only the first fields are used."""

    _fields_ = (("numbers", ctypes.c_uint32 * 256),)


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class LlamaCpp:
    """Functions of llama.cpp (https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h)."""

    def __init__(self, library: Path) -> None:
        self._lib, self._log = ctypes.CDLL(str(library)), _Log(lambda level, text, data: None)
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(self._lib, name).restype = _Params
        for name, argument in (
            ("llama_model_load_from_file", ctypes.c_char_p),
            ("llama_init_from_model", ctypes.c_void_p),
        ):
            function = getattr(self._lib, name)
            function.argtypes, function.restype = [argument, _Params], ctypes.c_void_p
        self._lib.llama_model_get_vocab.argtypes, self._lib.llama_model_get_vocab.restype = (
            [ctypes.c_void_p],
            ctypes.c_void_p,
        )
        self._lib.llama_batch_init.restype = _Batch
        self._lib.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        self._lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
        self._lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        self._lib.llama_model_free.argtypes = self._lib.llama_free.argtypes = [ctypes.c_void_p]
        self._lib.llama_tokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32,
            ctypes.c_bool, ctypes.c_bool,
        ]  # fmt: skip
        self._lib.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._lib.llama_vocab_is_eog.restype = ctypes.c_bool
        self._lib.llama_log_set(self._log, None)
        self._lib.llama_backend_init()

    @contextmanager
    def opened(self, file: Path) -> Iterator[int]:
        """Context manager: open a model."""
        model = self._lib.llama_model_load_from_file(str(file).encode(), self._lib.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp does not open {file}")
        yield model
        self._lib.llama_model_free(model)

    def logits(self, model: int, ids: list[int], vocab_size: int) -> torch.Tensor:
        """Return the logits of a text, shape (T, V)."""
        params = self._lib.llama_context_default_params()
        params.numbers[:3] = [CONTEXT, CONTEXT, CONTEXT]  # context, logical and physical batch
        context, batch = self._lib.llama_init_from_model(model, params), self._lib.llama_batch_init(len(ids), 0, 1)
        if not context:
            raise RuntimeError("llama.cpp makes no context for the model")
        self._lib.llama_set_n_threads(context, 1, 1)  # tiny models are slower with more
        batch.num_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.position[index], batch.num_sequences[index] = token, index, 1
            batch.sequence[index][0], batch.wanted[index] = 0, 1
        if self._lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp does not compute the model")
        rows = [self._lib.llama_get_logits_ith(context, index)[:vocab_size] for index in range(len(ids))]
        self._lib.llama_free(context)
        return torch.tensor(rows)

    def tokens(self, model: int, text: str) -> list[int]:
        """Return the tokens of a text, with those that are added."""
        buffer, encoded = (ctypes.c_int32 * 4096)(), text.encode()
        vocab = self._lib.llama_model_get_vocab(model)
        return buffer[: self._lib.llama_tokenize(vocab, encoded, len(encoded), buffer, 4096, True, True)]

    def ends_answer(self, model: int, token: int) -> bool:
        """Return whether an answer ends at a token."""
        return bool(self._lib.llama_vocab_is_eog(self._lib.llama_model_get_vocab(model), token))
