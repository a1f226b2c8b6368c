"""The command line: `attnfuse demo`, `attnfuse explain FILE.py:NAME`, `attnfuse plan`, `attnfuse roofline`, `attnfuse --version`.

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
    explain.add_argument("--plot", metavar="FILE", help="draw the roofline of what was rewritten (needs matplotlib)")
    explain.add_argument("--device", help="the GPU of the picture, such as h100; default: the one that is there, else an H100")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    plan = commands.add_parser("plan", help="the kernels that would be generated for a shape on a GPU: tiles, memory, traffic, time, and why")
    _shape_arguments(plan)
    plan.add_argument("--keys", type=_length, help="default: as many as queries")
    plan.add_argument("--kv-heads", type=_length, help="key and value heads, shared by groups of query heads; default: as many as those")
    plan.add_argument("--value-dim", type=_length, help="default: the head dimension")
    plan.add_argument("--causal", action="store_true")
    plan.add_argument("--dropout", type=float, default=0.0, metavar="P")
    plan.add_argument("--backward", action="store_true", help="the backward kernels too")
    roofline = commands.add_parser("roofline", help="attention as separate kernels beside a fused one: traffic, intensity, least time")
    _shape_arguments(roofline)
    roofline.add_argument("--elementwise", type=_length, default=1, metavar="K", help="kernels on the scores, the softmax among them; default: 1")
    roofline.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    return top


def _shape_arguments(command: argparse.ArgumentParser) -> None:
    """What both commands that take no model need to know."""
    command.add_argument("--head-dim", type=_length, required=True)
    command.add_argument("--seq", type=_length, required=True, help="tokens")
    command.add_argument("--heads", type=_length, default=32, help="default: 32")
    command.add_argument("--batch", type=_length, default=1, help="default: 1")
    command.add_argument("--dtype", default="bf16", help="bf16 (the default), fp16, or for plans fp32")
    command.add_argument("--device", default="h100", help="a card such as a100, h100, b200, mi300x, or 'sm_90 with 227 KB'; default: h100")


def _length(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {value}")
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
    made = build() if callable(build) else None
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], (tuple, list, dict)):
        print(f"attnfuse: {arguments.target!r}: expected a function without arguments that returns (model, inputs), inputs being a tuple of "
              "arguments or a dict of keyword arguments", file=sys.stderr)
        return 2
    model, inputs = made
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    report = explain(model, *args, run=not arguments.no_run, **kwargs)
    print(json.dumps(report.to_dict(), indent=1, ensure_ascii=False) if arguments.json else report)
    try:
        if arguments.plot:
            report.plot(arguments.plot, device=arguments.device)
    except (ValueError, ImportError, OSError) as e:
        print(f"attnfuse: {e}", file=sys.stderr)
        return 2
    return 0


def _without_a_model(arguments: argparse.Namespace) -> int:
    """`plan` and `roofline`."""
    from .planning import Shape, plan_text, roofline_text
    own = {n: getattr(arguments, n) for n in ("keys", "kv_heads", "value_dim", "causal", "dropout") if arguments.command == "plan"}
    try:
        shape = Shape(arguments.head_dim, arguments.seq, arguments.heads, arguments.batch, **own)
        if arguments.command == "plan":
            print(plan_text(shape, arguments.dtype, arguments.device, arguments.backward))
        else:
            print(roofline_text(shape, arguments.device, arguments.dtype, arguments.elementwise, arguments.plot))
    except (ValueError, ImportError, OSError) as e:
        print(f"attnfuse: {e}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal must not fail on the sum sign of an equation
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = parser().parse_args(argv)
    if arguments.command == "explain":
        return _explain(arguments)
    if arguments.command in ("plan", "roofline"):
        return _without_a_model(arguments)
    from . import demo
    return demo.main(arguments.length, arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
