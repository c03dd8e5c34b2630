"""The errors and warnings of Horizon-LM. Each error carries the exit code of the command line."""

import inspect
import warnings

EXIT_CODES = {
    0: "finished",
    2: "configuration: a setting, a path or a model that cannot be used",
    3: "does not fit: host memory, device memory or disk",
    4: "data: a row or a file that cannot be used",
    5: "non-finite loss or gradient: the weights were left as they were",
    75: "interrupted by a signal or a device fault: the run can be resumed",
}


class HorizonError(Exception):
    """Base class of all errors that Horizon-LM raises deliberately."""

    exit_code = 1
    is_reported = False  # another process of the same run reports it


class ConfigError(HorizonError, ValueError):
    """A setting is unknown, out of range, or contradicts another setting."""

    exit_code = 2


class QuantizedWeightsError(ConfigError):
    """A run would train weights that are quantized."""


class ModelNotSupportedError(HorizonError, ValueError):
    """A model cannot be streamed exactly; the message names the module and the reason."""

    exit_code = 2


class ImagesNotSupportedError(ModelNotSupportedError):
    """A model of images and text computes rows with images in another way than transformers."""


class DoesNotFitError(HorizonError, MemoryError):
    """More bytes are needed than available; the message has both numbers and a remedy."""

    exit_code = 3


class DeviceMemoryError(DoesNotFitError):
    """A step needs more device memory than there is."""


class DataError(HorizonError, ValueError):
    """A file or an example cannot be used for training; the message names the place."""

    exit_code = 4


class TokenError(DataError, IndexError):
    """Token ids or labels do not fit the model or each other."""


class NonFiniteError(HorizonError, ArithmeticError):
    """A loss or gradient is NaN or infinite. The step changed no weight."""

    exit_code = 5


class CheckpointWarning(UserWarning):
    """Tensors of a checkpoint do not belong to the model and are ignored, or do not fit the dtype that they are written in."""


class NonFiniteWarning(RuntimeWarning):
    """A step was skipped because a gradient was NaN or infinite."""


class HeadWarning(UserWarning):
    """A model's loss cannot be computed in chunks, so all logits are computed together."""


class PageLockWarning(RuntimeWarning):
    """Host memory could not be page-locked, so transfers are slower."""


class UnprovenModelWarning(UserWarning):
    """A streamed model was not proven equal to plain autograd."""


class WholeTowerWarning(UserWarning):
    """A block of a tower computes all images of a batch at once, because it cannot be cut between them."""


class SummedLossWarning(UserWarning):
    """Each of several ranks divides its loss by its own targets, while gradients are summed over the ranks."""


class SlowProductsWarning(RuntimeWarning):
    """A CPU computes in a dtype for which it has no instructions."""


class ForeignWriteWarning(UserWarning):
    """Other code wrote weights, so the low halves of their fp32 masters were reset."""


class IgnoredCastWarning(UserWarning):
    """Other code cast weights to a wider dtype, which changes neither the stored weights nor the dtype of computations."""


class IgnoredArgumentWarning(UserWarning):
    """An argument of transformers had no effect: the model was saved rather than lost, or opened in spite of it."""


class InterruptedRunError(HorizonError):
    """The user or the system asked the run to stop."""

    exit_code = 75


class DeviceFaultError(HorizonError):
    """The device failed in a step. Host memory was left whole, and what it holds was saved."""

    exit_code = 75


class StreamingError(HorizonError, RuntimeError):
    """The streamed model was used in a way that would give wrong numbers, for example with a second backward call."""


class MissingLogitsError(StreamingError, AttributeError):
    """Logits were requested from a loss computed in chunks. Also an AttributeError, because other code checks with hasattr."""

    def __init__(self) -> None:
        super().__init__(
            "head='chunked' computes the loss without keeping the logits. Call the model without labels for logits, "
            "horizon_lm.token_logprobs for log-probabilities, or stream with head='whole'."
        )


class MissingQuantStateError(StreamingError, AttributeError):
    """Code of bitsandbytes or PEFT would decode or replace a weight itself. Also an AttributeError, as `MissingLogitsError`."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is quantized, and only the engine reads its codes. Save adapters and merge them with horizon-lm merge, which writes a "
            "decoded model; call param.decode() for the values."
        )


class ScheduleMismatchError(StreamingError):
    """Autograd or the model reached a different operation from the one that the schedule expects next."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"the schedule expects {expected} next, but {got} was reached")
        self.expected, self.got = expected, got


class DisagreementError(StreamingError):
    """The ranks of a training are not at the same place of the program."""


class RankLostError(HorizonError, RuntimeError):
    """Another rank of a training has ended, so this one cannot go on."""

    exit_code = 75


class RecomputeMismatchError(StreamingError):
    """A block's recomputed output differs from its forward output (only with check_recompute=True)."""


class GradientMismatchError(StreamingError):
    """A block's gradient differs from that of plain autograd on this device (only with check_gradients)."""


class PartialUpdateError(StreamingError):
    """An update failed inside a kernel, so some weights are updated and some are not; the model must be reloaded."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


# Packages whose lines do not show a user where a warning comes from: their calls lie between the user's call and `warn`.
_BETWEEN = ("horizon_lm", "torch", "contextlib", "functools")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the line of the caller's code that led here, however many calls of ours or of `_BETWEEN` lie between."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
