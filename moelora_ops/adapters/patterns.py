"""rank_pattern and alpha_pattern: regular expressions from a file, looked up like PEFT does, in bounded time."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import AdapterError

try:
    from re import _parser as _re_parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _re_parser

# A key as most tools write it: a module's name or path, whose dots stand for themselves.
_PLAIN = re.compile(r"\^?[A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+)*\$?")
_MAX_KEY = 1000  # characters
# Steps that one match may need when it fails late, estimated: 10 ns each. What an adapter needs is below 1e6.
_MAX_STEPS = 1e8
_MAX_SECONDS = 20.0  # of all matches of one adapter together
_LONGEST = {"digits": 9, "part": 40, "all": 120}  # of a path: what a repeated class of characters can cover


class Patterns:
    """Values by regular expression: the first key, in the order of the file, that matches the path or what follows one of its
    dots. Dots between plain names stand for themselves, which lets 20,000 of them be looked up at once.

    Raises: AdapterError naming the field for keys that are no regular expressions or could take forever.
    """

    def __init__(self, field: str, values: Mapping[str, Any]) -> None:
        self._field, self._keys, self._values = field, list(values), list(values.values())
        self._plain: dict[str, int] = {}  # what matches the end of a path, literally -> place of its key
        self._others: list[tuple[int, re.Pattern[str]]] = []
        self._seconds, self._warned = 0.0, False
        self._known: dict[str, Any] = {}
        for place, key in enumerate(values):
            if _PLAIN.fullmatch(key) and not key.startswith("^"):
                self._plain.setdefault(key.replace("\\", "").removesuffix("$"), place)
            else:
                self._others.append((place, _compiled(field, key)))

    def get(self, path: str, default: Any) -> Any:
        """The value for the module or parameter at `path`."""
        if not self._values:
            return default
        if path not in self._known:
            self._known[path] = self._place(path)
        place = self._known[path]
        return default if place is None else self._values[place]

    def _place(self, path: str) -> int | None:
        ends = [path, *(path[i + 1 :] for i, letter in enumerate(path) if letter == ".")]
        places = {self._plain[end] for end in ends if end in self._plain}
        began = time.monotonic()
        for place, pattern in self._others:
            if pattern.match(path):
                places.add(place)
            if self._seconds + time.monotonic() - began > _MAX_SECONDS:
                raise AdapterError(
                    f"adapter_config field {self._field} must be quick to look up, got regular expressions that took more than "
                    f"{_MAX_SECONDS:.0f} s: write them without repetitions"
                )
        self._seconds += time.monotonic() - began
        if not self._warned and len({self._values[place] for place in places}) > 1:
            self._warned = True
            first, second = (self._keys[place][:80] for place in sorted(places)[:2])
            warnings.warn(
                f"adapter_config field {self._field} has keys with different values for {path}: the first counts, {first!r}, "
                f"as in PEFT, not {second!r}; but PEFT sorts them when it saves, so training may have used the other",
                stacklevel=2,
            )
        return min(places, default=None)


def _compiled(field: str, key: str) -> re.Pattern[str]:
    def refuse(why: object) -> AdapterError:
        return AdapterError(f"adapter_config field {field} must have regular expressions as keys, got {key[:80]!r}: {why}")

    if len(key) > _MAX_KEY:
        raise refuse(f"{len(key)} characters, more than {_MAX_KEY}")
    # PEFT's rule: at the start of the path or after a dot, up to the end. Flags such as (?i) are an error inside of it.
    wrapped = rf"(?:.*\.)?(?:{key})$"
    try:
        pattern = re.compile(wrapped)
        steps = _steps(_re_parser.parse(key))
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse(error) from error
    if steps > _MAX_STEPS:
        raise refuse("its repetitions could take forever: write it with fewer, and with none inside another")
    return pattern


def _steps(tree: Any) -> float:
    """About how many ways there are to match, all of which are tried when the end does not fit; infinite for repetitions in
    repetitions."""
    total, same = 1.0, 0
    for op, value in tree:
        kind = str(op)
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, body = value
            if _steps(body) > 1 and most > 1:
                return float("inf")
            same += most > least + 1
            total *= min(int(most) - int(least) + 1, _reach(body)) * _steps(body) / max(same, 1)
        elif kind == "BRANCH":
            total *= sum(_steps(branch) for branch in value[1])
        elif kind == "SUBPATTERN":
            total *= _steps(value[3])
        elif kind in ("ASSERT", "ASSERT_NOT"):
            total *= _steps(value[1])
        elif kind == "ATOMIC_GROUP":
            total *= _steps(value)
        elif kind == "GROUPREF_EXISTS":
            total *= _steps(value[1]) + (_steps(value[2]) if value[2] else 1)
    return total


def _reach(body: Any) -> int:
    """How many times a repeated expression can fit into a path."""
    if len(body) != 1:
        return _LONGEST["all"]
    op, value = str(body[0][0]), body[0][1]
    if op == "IN" and all(_is_digits(*item) for item in value):
        return _LONGEST["digits"]
    crosses_dots = op == "ANY" or (op == "IN" and any(str(k) == "NEGATE" or "NOT" in str(v) for k, v in value))
    crosses_dots |= op == "NOT_LITERAL" and value != ord(".")
    return _LONGEST["all" if crosses_dots else "part"]


def _is_digits(kind: Any, item: Any) -> bool:
    if str(kind) == "RANGE":
        return bool(ord("0") <= item[0] <= item[1] <= ord("9"))
    return (str(kind), str(item)) == ("CATEGORY", "CATEGORY_DIGIT")
