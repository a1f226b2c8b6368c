"""Settings: the few things a user decides. Each is an argument, a context manager and an environment variable.

    Settings(strict=True)                  a complete set of settings, for `settings=` of optimize, explain and rewrite
    with attnfuse.settings(strict=True):   what applies inside the block where no argument says otherwise
    ATTNFUSE_STRICT=1                      what applies in the process where neither says otherwise

Invariant: a `Settings` that exists is valid; an unknown name or a bad value is a ValueError that lists what is allowed.

    >>> with settings(fully_masked_rows="zero"):
    ...     current().fully_masked_rows
    'zero'
"""
from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

PREFIX = "ATTNFUSE_"

CHOICES: dict[str, tuple[Any, ...]] = {
    "strict": (False, True),
    "fully_masked_rows": ("as_written", "zero"),
    "executor": ("auto", "torch", "triton"),
    "autotune": (False, True),
}
"""The allowed values of every setting that has a list of them."""

WORDS: dict[str, Any] = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""How an environment variable spells a truth value."""


@dataclass(frozen=True)
class Settings:
    """What the user decides.

    Attributes:
        strict: raise where the analysis fails, instead of keeping the graph as it was, warning and reporting it.
        fully_masked_rows: a row with no allowed key is what the model wrote (``"as_written"``), or zero (``"zero"``).
        executor: ``"triton"`` for generated kernels, ``"torch"`` for the tiled loop in PyTorch, ``"auto"`` for the best on the device.
        autotune: on a GPU, time the few plans that are predicted fastest at the first call of a class of shapes, and keep the winner on disk
            for later processes.
        dump: a folder for every graph before and after each pass, and its report as JSON; None writes nothing.
    """

    strict: bool = False
    fully_masked_rows: Literal["as_written", "zero"] = "as_written"
    executor: Literal["auto", "torch", "triton"] = "auto"
    autotune: bool = False
    dump: str | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check(name, value)

    def replace(self, **changes: Any) -> Settings:
        """A copy with some settings changed; raises ValueError for an unknown name or a bad value."""
        unknown = sorted(set(changes) - set(NAMES))
        if unknown:
            raise ValueError(f"unknown setting {', '.join(map(repr, unknown))}; the settings are {', '.join(NAMES)}")
        if isinstance(changes.get("dump"), Path):
            changes["dump"] = str(changes["dump"])
        return Settings(**{**asdict(self), **changes})


NAMES: tuple[str, ...] = tuple(f.name for f in fields(Settings))
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Settings)}
_VARIABLES: dict[str, str] = {name: PREFIX + name.upper() for name in NAMES}

_ambient: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("attnfuse_settings", default=())


def _check(name: str, value: Any) -> None:
    """Raise ValueError where `value` is not one that the setting may have."""
    allowed = CHOICES.get(name)
    # `is`/type, because 1 == True: a setting given as 1 is more likely a mistake than a truth value.
    if allowed is not None and not any(type(value) is type(a) and value == a for a in allowed):
        raise ValueError(f"setting {name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
    if name == "dump" and not (value is None or isinstance(value, str)):
        raise ValueError(f"setting dump={value!r}: expected the path of a folder, or None")


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings that the environment gives, by name; raises ValueError for a bad value.

    >>> from_environment({"ATTNFUSE_STRICT": "1", "HOME": "/"})
    {'strict': True}
    """
    texts = {name: (os.environ if environ is None else environ).get(PREFIX + name.upper()) for name in NAMES}
    return {name: _meant(name, text) for name, text in texts.items() if text is not None}


@functools.lru_cache(maxsize=256)
def _meant(name: str, text: str) -> Any:
    """What a text in the environment says of a setting; raises ValueError for a bad value."""
    value: Any = WORDS.get(text.strip().lower(), text) if name != "dump" else text or None
    try:
        _check(name, value)
    except ValueError as e:
        raise ValueError(f"{PREFIX + name.upper()}={text!r} in the environment: {e}") from None
    return value


def current() -> Settings:
    """The settings in force: the innermost context manager, then the environment, then the defaults."""
    return Settings(**{name: in_force(name) for name in NAMES})


def in_force(name: str) -> Any:
    """One of the settings in force, for what asks at every call; raises ValueError for a bad value in the environment."""
    text = os.environ.get(_VARIABLES[name])
    found = _DEFAULTS[name] if text is None else _meant(name, text)
    for changed, value in _ambient.get():       # the innermost is the last
        if changed == name:
            found = value
    return found


def resolve(given: Settings | Mapping[str, Any] | None) -> Settings:
    """What a `settings=` argument means: a `Settings` as it is, a mapping on top of `current`, None for `current`."""
    if isinstance(given, Settings):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"settings must be an attnfuse.Settings, a mapping from names to values, or None; not {type(given).__name__}")
    return current().replace(**dict(given or {}))


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a `with` block; blocks nest. Raises ValueError for an unknown name or a bad value."""
    Settings().replace(**changes)
    if isinstance(changes.get("dump"), Path):
        changes["dump"] = str(changes["dump"])
    token = _ambient.set((*_ambient.get(), *changes.items()))
    try:
        yield current()
    finally:
        _ambient.reset(token)
