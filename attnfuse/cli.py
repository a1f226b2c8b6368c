"""The command line: `attnfuse demo`, `attnfuse explain FILE.py:NAME`, `attnfuse --version`.

Invariant: nothing heavy is imported before it is known what to do, so that --help and --version answer at once.
"""
from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="attnfuse", description="Attention written in plain PyTorch, fused.")
    top.add_argument("--version", action="version", version=f"attnfuse {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="GPT-2 small as written, through inductor, and fused: report, error, time, memory")
    demo.add_argument("--length", type=_length, nargs="+", default=[1024, 4096], metavar="TOKENS", help="default: 1024 4096")
    demo.add_argument("--quick", action="store_true", help="two layers, and inductor left out")
    explain = commands.add_parser("explain", help="what would be rewritten in a model, and why the rest would not")
    explain.add_argument("target", metavar="FILE.py:NAME", help="a function without arguments that returns (model, inputs); "
                         "inputs is a tuple of arguments or a dict of keyword arguments")
    explain.add_argument("--no-run", action="store_true", help="analyse the first graph without running it")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    return top


def _length(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("a length is at least 1")
    return value


def load(target: str) -> Any:
    """The object that ``FILE.py:NAME`` names; raises ValueError where there is none."""
    path, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if path.endswith(".py") and Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{target!r}: expected the path of a Python file, a colon and the name of a function in it")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{path} has no {name!r}")
    return getattr(module, name)


def _explain(arguments: argparse.Namespace) -> int:
    import json

    from .api import explain
    try:
        build = load(arguments.target)
    except ValueError as e:
        print(f"attnfuse: {e}", file=sys.stderr)
        return 2
    model, inputs = build()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    report = explain(model, *args, run=not arguments.no_run, **kwargs)
    print(json.dumps(report.to_dict(), indent=1, ensure_ascii=False) if arguments.json else report)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal must not fail on the sum sign of an equation
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = parser().parse_args(argv)
    if arguments.command == "explain":
        return _explain(arguments)
    from . import demo
    return demo.main(arguments.length, arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
