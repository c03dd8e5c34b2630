"""End a run on a signal."""

import enum
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from horizon_lm.common.signals import STOP_SIGNALS, ignore_stop_signals, interrupt_once
from horizon_lm.errors import InterruptedRunError

_END_AT_ONCE = signal.SIGINT, signal.SIGTERM
"""Signals whose repetition is a request to end at once. The others come again by themselves, when a terminal closes or a limit has passed."""
_REPEAT_SECONDS = 3.0  # until a signal is repeated whose KeyboardInterrupt Python has dropped, as in destructors
_EXIT_SECONDS = 10.0  # for cleaning up after the second signal, which waits for a device that may hang


class _Phase(enum.Enum):
    """The phases of a run. Comments say what a signal of this process does in each, and -> which phase follows."""

    STARTING = enum.auto()  # raises KeyboardInterrupt -> CUT_OFF
    CUT_OFF = enum.auto()  # raises KeyboardInterrupt, if the first was swallowed
    STEPPING = enum.auto()  # ends the run at the next `check` -> STOPPING
    STOPPING = enum.auto()  # SIGINT, SIGTERM: raises KeyboardInterrupt, once; the others: nothing
    LEAVING = enum.auto()  # nothing: the context ends


# The next phases, by the present one: once a signal has arrived, and once the first step is due.
_AFTER_SIGNAL = {_Phase.STARTING: _Phase.CUT_OFF, _Phase.STEPPING: _Phase.STOPPING}
_WITH_STEPS = {_Phase.STARTING: _Phase.STEPPING, _Phase.CUT_OFF: _Phase.STOPPING}


class Interrupts:
    """Context manager: turn the signals that ask for an end into InterruptedRunError, at once or after the current step.

    `_Phase` says what a signal does. A thread makes sure that the run ends, also if other code has swallowed the KeyboardInterrupt or
    the device hangs. Ignored signals stay ignored (nohup). Python delivers signals to the main thread only; in other threads this
    does nothing.

    Attributes:
        kept: returns a sentence about what the run leaves.
        requested: the name of the signal that has arrived, here or at another rank, or the reason that a part of the run has; empty
            if there is none. Only signals of this process are counted: the first after such a reason cuts nothing off.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}  # the handlers that were there before
        self._process = os.getpid()
        self._phase = _Phase.STARTING
        self._may_raise = True  # KeyboardInterrupt; once, and again if it was swallowed (`_ensure_end`)
        # The signals that have raised KeyboardInterrupt; None when the context ends. A signal handler may use a SimpleQueue.
        self._raised: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._has_ended = threading.Event()  # the context has ended
        self._lock = threading.Lock()  # held while the thread sends a signal
        self.kept: Callable[[], str] = lambda: "Nothing was trained yet."
        self.requested = ""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # None: the handler was not installed from Python, which therefore could not restore it.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
            threading.Thread(target=self._ensure_end, name="horizon-interrupts", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_before_steps, self._phase = self._phase in _WITH_STEPS, _Phase.LEAVING
        self._raised.put(None)  # ends the thread (`_ensure_end`)
        with self._lock:  # the thread sends no signal from here on: it would meet the restored handlers
            self._has_ended.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if not self.requested:
            return
        if interrupt_once in self._previous.values():  # the process is a command, which has nothing left but to end
            ignore_stop_signals()
        if error is None or isinstance(error, InterruptedRunError):
            return
        # Before the first step, it may be any error: libraries turn KeyboardInterrupt into errors of their own.
        if isinstance(error, KeyboardInterrupt) or is_before_steps:
            raise InterruptedRunError(f"interrupted by {self.requested}. {self.kept()}") from None

    def finish_steps(self, kept: Callable[[], str]) -> None:
        """Defer signals to the next `check`; one that has arrived already raises. ``kept`` returns a sentence about what the run leaves."""
        self._phase, self.kept = _WITH_STEPS.get(self._phase, self._phase), kept
        self.check("before the first step")

    def check(self, when: str, kept: str | None = None) -> None:
        """Raise InterruptedRunError if a signal has arrived.

        Args:
            when: the place in the run, for the message.
            kept: what the run leaves; None for this process's own sentence (`self.kept`).
        """
        if self.requested:
            raise InterruptedRunError(
                f"interrupted {when} by {self.requested}. {self.kept() if kept is None else kept}"
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal as the phase says: let the current step end, or raise KeyboardInterrupt."""
        if os.getpid() != self._process:  # a forked child, which the signal ends as if this handler were not installed
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        phase, self._phase = self._phase, _AFTER_SIGNAL.get(self._phase, self._phase)
        if phase is _Phase.LEAVING:
            return
        name = signal.Signals(number).name
        self.requested = self.requested or name  # a part's request stays
        if phase is _Phase.STEPPING:
            _write(f"\n{name}: stopping after this step; interrupt again to stop at once\n")
        elif self._may_raise and (phase is not _Phase.STOPPING or number in _END_AT_ONCE):
            self._may_raise = False  # another KeyboardInterrupt would end the cleaning up
            self._raised.put(signal.Signals(number))
            raise KeyboardInterrupt

    def _ensure_end(self) -> None:
        """Wait for the first KeyboardInterrupt, and make sure that the run ends; this is the body of a thread."""
        number = self._raised.get()
        if number is None:  # the context ended without a KeyboardInterrupt
            return
        if self._phase is not _Phase.CUT_OFF:
            if not self._has_ended.wait(_EXIT_SECONDS):  # the cleaning up may wait for a device that hangs
                os._exit(InterruptedRunError.exit_code)
            return
        # Before the first step, code that must not raise, such as a destructor, may have swallowed the interrupt.
        while not self._has_ended.wait(_REPEAT_SECONDS):
            with self._lock:  # once the handlers are restored, the signal would end the process
                if not self._has_ended.is_set():
                    self._may_raise = True
                    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _write(text: str) -> None:
    """Write to standard error. Not print(), which is not reentrant: the signal may have interrupted one."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something that is no file
        os.write(sys.stderr.fileno(), text.encode())
