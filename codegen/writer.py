"""A line writer: indentation and blank lines, nothing that knows Python's grammar.

    >>> w = Writer()
    >>> with w.block("for n in range(3):"):
    ...     w.line("print(n)")
    >>> print(w.text(), end="")
    for n in range(3):
        print(n)
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

WIDTH = 120
"""Generated lines are wrapped at their commas beyond this."""


class Writer:
    """Collects lines at a current indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def line(self, text: str = "") -> None:
        """One line at the current indentation."""
        self.lines.append("    " * self._depth + text if text else "")

    def gap(self, comment: str = "") -> None:
        """A blank line (never two, never first), then a comment."""
        if self.lines and self.lines[-1]:
            self.line()
        if comment:
            self.line(f"# {comment}")

    def extend(self, lines: Iterable[str]) -> None:
        """Lines that were written elsewhere, moved to the current indentation."""
        for text in lines:
            self.line(text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head`, then an indented block."""
        self.line(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def call(self, head: str, args: Iterable[str], tail: str = ")") -> None:
        """``head(`` args… ``tail``, on one line where it fits, else wrapped."""
        args = list(args)
        indent = "    " * self._depth
        if len(indent + head + ", ".join(args) + tail) <= WIDTH:
            self.line(head + ", ".join(args) + tail)
            return
        self.line(head)
        row = ""
        for arg in args:
            if row and len(indent) + len(row) + len(arg) + 10 > WIDTH:
                self.line("        " + row.rstrip())
                row = ""
            row += arg + ", "
        self.line("        " + row.rstrip().rstrip(",") + tail)

    def text(self) -> str:
        """Everything written, with a final newline."""
        return "\n".join(self.lines) + "\n"
