"""How far a load has come: a callback, or one line on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Report = Callable[[int, int], None]
_QUIET_SECONDS = 1.0  # shorter loads leave the terminal alone


def reporter(progress: bool | Report | None, name: str) -> Report:
    """What to call with (steps done, steps in all).

    `progress`: a callable is called itself; True: a line on stderr; None: the same where stderr is a terminal and the load
    takes more than a second; False: nothing.

    Raises: TypeError for anything else.
    """
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress must be None, a bool or a callable (done, total), got {type(progress).__name__}")
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return lambda done, total: None
    return _Line(name, 0.0 if progress else _QUIET_SECONDS)


class _Line:
    def __init__(self, name: str, quiet: float) -> None:
        self._name, self._loud_from, self._shown = name, time.monotonic() + quiet, False

    def __call__(self, done: int, total: int) -> None:
        if not self._shown and (time.monotonic() < self._loud_from or done == total):
            return
        self._shown = True
        end = "\n" if done == total else ""
        print(f"\rloading {self._name}: {100 * done // total:3d} %", end=end, file=sys.stderr, flush=True)
