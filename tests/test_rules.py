"""Every lifting rule is run on the examples of its own docstring: the program of an element, evaluated everywhere, is the tensor."""
from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnfuse.algebra import Algebra
from attnfuse.passes import manual
from attnfuse.passes.lift import Lift
from attnfuse.passes.pointwise import POINTWISE
from attnfuse.passes.trace import record
from attnfuse.passes.views import VIEWS
from attnfuse.program import Env, axis, evaluate

RULES = {**VIEWS, **POINTWISE}
WHOLE_CHAIN = {"_softmax", "_product", "_dropout", "_sum", "_max", "_any", "_logsumexp"}
"""Rules that mean something only inside a chain: tests/cases.py has rows for each."""


def samples() -> dict[str, torch.Tensor]:
    """The tensors that examples are written with: floats x and y, bools m, small integers n, of shape (3, 4); rows b (floats) and k (integers)."""
    return {"x": torch.randn(3, 4), "y": torch.randn(3, 4), "m": torch.rand(3, 4) > 0.5, "n": torch.randint(0, 3, (3, 4)),
            "b": torch.randn(4), "k": torch.randint(0, 4, (4,))}


def examples() -> list[tuple[str, object]]:
    found = []
    for rule in dict.fromkeys(RULES.values()):
        for text in re.findall(r"`([^`]+)`", rule.__doc__ or ""):
            found.append((text, rule))
    return found


COMPOSITE = ("x.transpose(0, 1)", "x.t()", "x.mT", "x.split(2, 1)[1]", "x.chunk(2, 1)[0]", "x.unbind(1)[2]", "x.unflatten(1, (2, 2))", "1 - x", "x.tril()",
             "x.triu(1)", "m.logical_not()", "torch.zeros(3, 4)", "torch.ones_like(x)", "torch.eye(3, 4)", "x.movedim(0, 1)", "x.swapaxes(0, 1)",
             "x.repeat_interleave(2, 1)", "x.tile(2, 2)", "x.roll(1, 1)", "torch.stack([x, y], 1)", "torch.outer(b, b)", "x.broadcast_to(2, 3, 4)",
             "x.diff(dim=1)", "x.new_full((3, 4), 2)", "x.square()", "x.masked_fill(m, 0.0) + n", "torch.nn.functional.relu(x)",
             "(x + 1).addcmul(x, y)", "x.lerp(y, 0.3)", "torch.ones(5, 5).cumsum(0)", "torch.meshgrid(b, b, indexing='ij')[1]", "x.select_scatter(b, 0, 1)")
"""Operations without a rule of their own, which PyTorch takes apart into those that have one."""


def test_every_rule_has_an_example() -> None:
    bare = [r.__name__ for r in dict.fromkeys(RULES.values()) if "`" not in (r.__doc__ or "")]
    assert set(bare) == WHOLE_CHAIN
    assert manual.bound                                # imported for its rules


@pytest.mark.parametrize("text, rule", [*examples(), *((t, None) for t in COMPOSITE)], ids=lambda v: v if isinstance(v, str) else "")
def test_example(text: str, rule: object) -> None:
    seed = int(torch.randint(0, 2 ** 31, (1,)))
    print("seed", seed)
    torch.manual_seed(seed)
    given = samples()
    want = eval(text, {"torch": torch, **given})
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in given.values()]
    rec, values, (out,) = record(lambda *t: [eval(text, {"torch": torch, **dict(zip(given, t, strict=True))})], fake, mode)
    assert rule is None or any(RULES.get(v.call.target) is rule for v in rec.values if v.call), "the example does not reach its rule"
    for value, node in zip(values, given, strict=True):
        value.nodes.append(node)                       # whatever stands for a node of the graph
    axes = {f"x{k}": torch.arange(n).view([-1 if k == d else 1 for d in range(want.dim())]) for k, n in enumerate(want.shape)}
    lift = Lift(Algebra({f"x{k}": s for k, s in enumerate(out.shape)}))
    program = lift.simplify(lift.at(out, tuple(axis(name) for name in axes)))
    tensors = {v.number: t for v, t in zip(values, given.values(), strict=True)}
    read = lambda operand, index: tensors[operand][index] if index else tensors[operand]
    got = evaluate(program, Env(axes, {}, read, torch.float32, torch.device("cpu"))).expand(want.shape)
    torch.testing.assert_close(got.to(want.dtype), want, equal_nan=True)
