"""One family of errors. Each carries the process exit code that the command line returns for it."""

EXIT_CODES = {
    0: "finished",
    2: "configuration: a setting, a path or a model that cannot be used",
    3: "does not fit: host memory, device memory or disk",
    4: "data: a row or a file that cannot be used",
    5: "non-finite loss or gradient: the weights were left as they were",
    75: "interrupted: what was written before is intact",
}


class HorizonError(Exception):
    """Base of every error that Horizon-LM raises on purpose."""

    exit_code = 1


class ConfigError(HorizonError, ValueError):
    """A setting that is unknown, out of range, or contradicts another one."""

    exit_code = 2


class ModelNotSupportedError(HorizonError, ValueError):
    """A model that cannot be streamed exactly; the message names the module and the reason."""

    exit_code = 2


class DoesNotFitError(HorizonError, MemoryError):
    """More bytes are needed than there are; the message has both numbers and a remedy."""

    exit_code = 3


class DataError(HorizonError, ValueError):
    """A file or a row that cannot be trained on; the message has the place."""

    exit_code = 4


class TokenError(DataError, IndexError):
    """Token ids or labels that do not fit the model or each other."""


class NonFiniteError(HorizonError, ArithmeticError):
    """A loss or gradient that is NaN or infinite. No weight was changed by the step that raised it."""

    exit_code = 5


class CheckpointWarning(UserWarning):
    """Tensors of a checkpoint are no part of the model, and are left out."""


class NonFiniteWarning(RuntimeWarning):
    """A step was left out because a gradient was NaN or infinite."""


class HeadWarning(UserWarning):
    """A model's loss cannot be computed in chunks, so that all its logits are made at once."""


class PageLockWarning(RuntimeWarning):
    """Host memory could not be page-locked, so that copies of it are slower."""


class UnprovenModelWarning(UserWarning):
    """A model is streamed that was not found equal to plain autograd."""


class ForeignWriteWarning(UserWarning):
    """Weights were written by other code, and what the store keeps beside them was reset."""


class InterruptedRunError(HorizonError):
    """The user or the system asked the run to stop."""

    exit_code = 75


class StreamingError(HorizonError, RuntimeError):
    """The streamed model was used in a way that would give wrong numbers (for example a second backward)."""


class MissingLogitsError(StreamingError, AttributeError):
    """Logits of a loss that was computed in chunks were looked at. Also an AttributeError: others ask with hasattr."""

    def __init__(self) -> None:
        super().__init__(
            "a loss with head='chunked' is computed without logits as a whole. Call the model without labels for logits, "
            "horizon_lm.token_logprobs for log-probabilities, or stream with head='whole'."
        )


class ScheduleMismatchError(StreamingError):
    """Autograd or the model's forward reached an operation other than the one the schedule expects next."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"the schedule expects {expected} next, but {got} was reached")
        self.expected, self.got = expected, got


class RecomputeMismatchError(StreamingError):
    """A block's recomputed output differs from its forward output (only with check_recompute=True)."""


class GradientMismatchError(StreamingError):
    """A block's gradient differs from that of plain autograd on this device (only with check_gradients)."""


class PartialUpdateError(StreamingError):
    """An update failed inside a kernel: some weights are new, some old, and the model must be loaded again."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the rest of its page."""
    return next(iter(str(error).splitlines()), type(error).__name__)
