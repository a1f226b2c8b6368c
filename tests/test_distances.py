"""Tables by distance: what is put in one and what is not, its elements and gradients, who shares it, and that kernels read it.

What runs in Triton's interpreter does so in a process of its own, as in test_codegen_numbers.py.
"""
from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnfuse
from attnfuse import distances, dynamo, ops, origin, tilemap, tuning
from attnfuse.codegen import launch, launch_backward, offline, plan_backward, predict
from attnfuse.codegen.backward import emit
from attnfuse.codegen.task import task
from attnfuse.codegen.tiles import DEVICES, known
from attnfuse.ranges import analyse
from attnfuse.reference import reference
from bench.flex_forms import bucket
from tests.distance_cases import INLINE, TABULATED, with_tables
from tests.interpreted import run_in_interpreter
from tests.oracle import truth
from tests.sass import misread_descriptors
from tests.specs import CASES, Case, Shape, with_map

INSIDE = launch.interpreting()
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter, in a process of its own")
outside = pytest.mark.skipif(INSIDE, reason="needs no interpreter")
BY_NAME = {case.name: case for case in TABULATED}
LENGTH, HEADS, WIDTH = 320, 2, 16


@outside
def test_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path)


# ---- what is put in a table

@outside
@pytest.mark.parametrize("case", TABULATED, ids=lambda c: c.name)
def test_the_attention_stays_what_it_was(case: Case, seed: int) -> None:
    spec = case.spec("float64")
    found = distances.tabulated(spec)
    assert found is not None and [t.dtype for t in found.tables] == ["float64"] * (2 if case.name == "two" else 1)
    assert all(distances.Table.from_json(t.to_json()) == t for t in found.tables)
    assert (analyse(found.spec).bounds, tilemap.mapped(found.spec) is None) == (analyse(spec).bounds, tilemap.mapped(spec) is None)
    for n, shape in enumerate((Shape(), Shape((1, 2), 20, 37), Shape((2, 2), 41, 12), Shape((1, 2), 1, 9), Shape((1, 2), 9, 1))):
        operands, sizes = case.inputs(shape, torch.float64, seed + n)
        seeds = torch.tensor([seed]) if spec.dropouts else None
        short, read = with_tables(spec, operands, sizes)
        # Only what the products read, masks and the tables is left.
        assert {o.name for o in short.operands} <= {"q", "k", "v", "padding"} | {o.name for o in short.operands if o.name.endswith("by_distance")}
        torch.testing.assert_close(reference(short, read, sizes, seeds), reference(spec, operands, sizes, seeds), rtol=1e-12, atol=1e-12, equal_nan=True)


@outside
@pytest.mark.parametrize("case", INLINE, ids=lambda c: c.name)
def test_what_gets_no_table(case: Case) -> None:
    assert distances.tabulated(case.spec()) is None


@outside
def test_a_table_may_not_bring_a_bound() -> None:
    """What is read is taken to be of ordinary size, which an exponential is not: with a table the pairs above a fill of -1e9 would be left out."""
    spec = next(c for c in INLINE if c.name == "what_may_outweigh_a_fill").spec()
    assert not analyse(spec).bounds and distances._outermost(spec.score)


@outside
def test_a_table_may_not_hide_a_mask() -> None:
    """What is read may be so low that the fill beside it is not: less an exponential it is."""
    spec = next(c for c in INLINE if c.name == "what_lets_a_fill_be_low").spec()
    assert analyse(spec).bounds and distances._outermost(spec.score)


@outside
@pytest.mark.parametrize("name", ("t5_causal_added", "t5_padding", "t5_window"))
def test_a_mask_stays_a_mask(name: str) -> None:
    spec = BY_NAME[name].spec()
    found = distances.tabulated(spec)
    assert found is not None and analyse(spec).bounds == analyse(found.spec).bounds != ()
    assert [str(x) for x in analyse(found.spec).bounds][0] == "j <= i"


@outside
def test_a_table_of_two_layers_is_one() -> None:
    """Whatever the numbers of their operands."""
    first, other = BY_NAME["t5"].spec(), BY_NAME["t5_padding"].spec()
    a, b = distances.tabulated(first), distances.tabulated(other)
    assert a is not None and b is not None and a.tables == b.tables and a.sources != b.sources


# ---- the op

def whole(case: Case, shape: Shape, seed: int) -> tuple[distances.Table, list[Tensor], list[int]]:
    """A table of a case, what it reads and its sizes, in float64."""
    spec = case.spec("float64")
    operands, sizes = case.inputs(shape, torch.float64, seed)
    found = distances.tabulated(spec)
    assert found is not None
    named = dict(zip(spec.size_names, sizes, strict=True))
    return found.tables[0], [operands[n] for n in found.sources[0]], [named[n] for n in found.tables[0].size_names]


@outside
@pytest.mark.parametrize("case", [c for c in TABULATED if c.captured], ids=lambda c: c.name)
def test_gradients_of_the_op(case: Case, seed: int) -> None:
    table, operands, sizes = whole(case, Shape((2, 3), 11, 7), seed)
    leaves = [t.double().requires_grad_(True) if t.is_floating_point() else t for t in operands]
    wanted = [t for t in leaves if t.requires_grad]
    table = replace(table, operands=tuple(replace(o, dtype=str(t.dtype).removeprefix("torch.")) for o, t in zip(table.operands, leaves)))
    made = lambda *given: torch.ops.attnfuse.distance_table(torch.empty(0), [next(rest) if t.requires_grad else t for t in leaves], sizes,  # noqa: E731
                                                            table.to_json()) if (rest := iter(given)) else None
    assert torch.autograd.gradcheck(made, wanted)


@outside
def test_the_op_is_sound(seed: int) -> None:
    table, operands, sizes = whole(BY_NAME["t5"], Shape(), seed)
    text = table.to_json()
    torch.library.opcheck(torch.ops.attnfuse.distance_table.default, (torch.randn(3), [operands[0].requires_grad_(True)], sizes, text))
    grad = torch.randn(distances.shape(table, sizes), dtype=torch.float64)
    torch.library.opcheck(torch.ops.attnfuse.distance_table_backward.default, (grad, [operands[0].detach()], sizes, text, [True]))
    assert torch.ops.attnfuse.distance_table_backward(grad, operands, sizes, text, [False]) == []


class Copies(TorchDispatchMode):
    """Raises where a number is brought from the host to a tensor's device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten.lift_fresh.default, torch.ops.aten.scalar_tensor.default), func
        return func(*args, **(kwargs or {}))


@outside
@pytest.mark.parametrize("name", ("t5", "logarithmic", "through_a_list"))
def test_nothing_is_copied_from_the_host(name: str, seed: int) -> None:
    """A CUDA graph may not capture it."""
    case = BY_NAME[name]
    spec, (operands, sizes) = case.spec(), case.inputs(Shape(), torch.float32, seed)
    found = distances.tabulated(spec)
    assert found is not None
    named, (table,), read = dict(zip(spec.size_names, sizes, strict=True)), found.tables, [operands[n] for n in found.sources[0]]
    own = [named[n] for n in table.size_names]
    with Copies():
        made = distances.build(table, read, own, torch.device("cpu"))
        distances.gradients(table, made, read, own, [t.is_floating_point() for t in read])


@outside
def test_derivatives_that_there_are_none_of(seed: int) -> None:
    table, operands, sizes = whole(BY_NAME["logarithmic"], Shape(), seed)
    leaves = [t.double().requires_grad_(True) for t in operands]
    made = torch.ops.attnfuse.distance_table(torch.empty(0), leaves, sizes, table.to_json())
    (grad, *_) = torch.autograd.grad(made.square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: torch.ops.attnfuse.distance_table(torch.empty(0), [x, leaves[1].detach()], sizes, table.to_json()),
                       (operands[0],), (operands[0],))


@outside
def test_samples_of_vmap(seed: int) -> None:
    table, (values,), sizes = whole(BY_NAME["t5"], Shape(), seed)
    several = torch.stack([values, 2 * values, values + 1])
    made = lambda x: torch.ops.attnfuse.distance_table(torch.empty(0), [x], sizes, table.to_json())
    grad = torch.randn(distances.shape(table, sizes), dtype=torch.float64)
    slope = lambda x: torch.ops.attnfuse.distance_table_backward(grad, [x], sizes, table.to_json(), [True])[0]
    for one in (made, slope):
        torch.testing.assert_close(torch.vmap(one)(several), torch.stack([one(x) for x in several]))


# ---- models

class Layers(nn.Module):
    """Attentions with one bias by distance, as T5 has it; the bias's table may be a buffer that is changed between the layers."""

    def __init__(self, layers: int = 2, change: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 3 * HEADS * WIDTH) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(HEADS * WIDTH, 32) for _ in range(layers))
        self.table = nn.Buffer(torch.randn(32, HEADS)) if change else nn.Parameter(torch.randn(32, HEADS))
        self.change, self.causal = change, causal

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        for n, (projection, out) in enumerate(zip(self.projections, self.out, strict=True)):
            if self.change and n:
                self.table.mul_(0.5)
            bias = F.embedding(bucket(at - at[:, None]), self.table).permute(2, 0, 1)
            q, k, v = (y.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for y in projection(x).chunk(3, -1))
            scores = q @ k.mT + bias
            if self.causal:
                scores = scores.masked_fill(at > at[:, None], torch.finfo(x.dtype).min)
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operations of our own that graphs call, in order."""
    found: list[str] = []
    analyse_ = dynamo.analyse

    def seen(gm, settings):
        out, report = analyse_(gm, settings)
        found.extend(str(n.target).split(".")[1] for n in out.graph.nodes if n.op == "call_function" and str(n.target).startswith("attnfuse."))
        return out, report

    monkeypatch.setattr(dynamo, "analyse", seen)
    yield found


def compare(model: nn.Module, inner: str = "eager") -> attnfuse.Report:
    """Result and gradients of an optimised model against float64 eager."""
    x, exact = torch.randn(2, LENGTH, 32), copy.deepcopy(model).double()
    want = exact(x.double())
    want.square().sum().backward()
    fused = attnfuse.optimize(copy.deepcopy(model), inner=inner)  # type: ignore[arg-type]
    got = fused(x)
    got.square().sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(fused.named_parameters(), exact.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm(), name
    report = attnfuse.last_report(fused)
    assert report is not None
    return report


@outside
@pytest.mark.parametrize("causal", (False, True))
def test_layers_share_a_table(causal: bool, calls: list[str], seed: int) -> None:
    report = compare(Layers(3, causal=causal))
    assert calls == ["distance_table", *["attention"] * 3]
    assert "from a table by distance, [2, 639] (5.11 KB)" in str(report) and "at every score" not in str(report)
    (site, *_) = report.sites
    assert site.called is not None and site.spec is not None and site.called[0] != site.spec
    assert [x[1:] for x in site.tables] == [((2, 639), 4 * 2 * 639)] and site.called[1][-1] == 4 * 2 * 639 and not site.reads
    assert site.to_dict()["tables"][0][1:] == [[2, 639], 4 * 2 * 639]
    # What was asked for a meaning holds for its call, and its file names the model's line.
    tuning.ask([site.called[0]])
    assert tuning.asked(site.called[0]) and origin.of(site.called[0]) == origin.of(site.spec) is not None


@outside
def test_a_table_that_changes_is_made_again(calls: list[str], seed: int) -> None:
    model, x = Layers(2, change=True), torch.randn(2, LENGTH, 32)
    with torch.no_grad():                           # with gradients the first layer is left as it is: its table is needed as it was
        want = copy.deepcopy(model).double()(x.double())
        got = attnfuse.optimize(model, inner="eager")(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert calls == ["distance_table", "attention", "distance_table", "attention"]


@outside
@pytest.mark.parametrize("how", (torch.no_grad, torch.inference_mode))
def test_a_table_without_gradient_stays_where_it_was_made(how, calls: list[str], seed: int) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(q.shape[-2])
        attend = lambda: (q @ k.mT + F.embedding(bucket(at - at[:, None]), table).permute(2, 0, 1)).softmax(-1) @ v
        with how():
            looked_at = attend() * 2
        return attend(), looked_at

    q, k, v = torch.randn(3, 2, HEADS, LENGTH, WIDTH)
    table = torch.randn(32, HEADS, requires_grad=True)
    wide = table.detach().double().requires_grad_(True)
    (want,) = torch.autograd.grad(written(q.double(), k.double(), v.double(), wide)[0].square().sum(), wide)
    (got,) = torch.autograd.grad(torch.compile(written, backend="attnfuse", options={"strict": True})(q, k, v, table)[0].square().sum(), table)
    assert calls == ["distance_table", "attention", "distance_table", "attention"]
    assert (got.double() - want).norm() <= 1e-4 * want.norm()


@outside
def test_few_tokens_get_none(calls: list[str]) -> None:
    with torch.no_grad():
        attnfuse.optimize(Layers().eval(), inner="eager")(torch.randn(1, distances.LEAST - 1, 32))
    assert calls == ["attention", "attention"]


@outside
def test_lengths_may_change(calls: list[str], seed: int) -> None:
    model = Layers().eval()
    fused = attnfuse.optimize(copy.deepcopy(model), inner="eager", dynamic=True)
    for length in (300, 270, 401, 30):
        x = torch.randn(2, length, 32)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert calls == ["distance_table", "attention", "attention"]


@outside
def test_a_table_of_what_reads_nothing_has_no_gradient(calls: list[str], seed: int) -> None:
    """It is made beside the queries, and is none of theirs."""
    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[-2])
        return (q @ k.mT - ((at - at[:, None]).abs() + 1).log()).softmax(-1) @ v

    q, k, v = (x.requires_grad_(True) for x in torch.randn(3, 2, HEADS, LENGTH, WIDTH).unbind())
    needs: list[list[bool]] = []
    backward = ops.walker.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.walker, "backward", lambda *args: needs.append(list(args[-1])) or backward(*args))
        torch.compile(written, backend="attnfuse", options={"strict": True})(q, k, v).square().sum().backward()
    assert calls == ["distance_table", "attention"] and needs == [[True, True, True, False]]


@outside
def test_weights_that_are_wanted_read_the_table_too(calls: list[str], seed: int) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(q.shape[-2])
        p = (q @ k.mT + F.embedding(bucket(at - at[:, None]), table).permute(2, 0, 1)).softmax(-1)
        return p @ v, p

    inputs = [*torch.randn(3, 2, HEADS, LENGTH, WIDTH), torch.randn(32, HEADS)]
    got = torch.compile(written, backend="attnfuse", options={"strict": True})(*inputs)
    assert calls == ["distance_table", "attention", "weights"]
    for a, b in zip(got, written(*(x.double() for x in inputs)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


# ---- kernels

@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that short sequences have diagonals of several lengths."""
    candidates = launch_backward.candidates
    monkeypatch.setattr(launch_backward, "_runs", {})
    monkeypatch.setattr(launch_backward, "candidates", lambda *args: tuple(replace(p, block_m=16, block_n=16) for p in candidates(*args)))
    monkeypatch.setattr(launch_backward, "roomier_plans", lambda *_: ())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, scratch = launch._allocate, launch_backward.empty
    monkeypatch.setattr(launch, "_allocate", lambda *args: tuple(t.fill_(12345.0) for t in allocate(*args)))
    monkeypatch.setattr(launch_backward, "empty", lambda *args: scratch(*args).fill_(77))


def check(case: Case, shape: Shape, dtype: torch.dtype, seed: int, mapped: bool = False) -> None:
    """Result and gradients of the kernels against float64, that of the table among them; `mapped`: by a map of the mask's tiles."""
    operands, sizes = case.inputs(shape, dtype, seed)
    spec, operands = with_tables(case.spec(str(dtype).removeprefix("torch.")), operands, sizes)
    if mapped:
        spec, operands = with_map(spec, operands, sizes)
        assert spec.tiles is not None
    drop = torch.tensor([seed]) if spec.dropouts else None
    needs = [t.is_floating_point() for t in operands]
    out, stats = launch.forward(spec, operands, sizes, drop)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    grads = launch.backward(spec, grad_out, operands, out, stats, sizes, drop, needs)
    exact = reference(spec, operands, sizes, drop, dtype=torch.float64)
    half = dtype == torch.float16
    distance = lambda a, b: (a.double() - b).nan_to_num().norm() / max(b.nan_to_num().norm(), 1e-1 * grad_out.double().norm())
    assert distance(out, exact) <= (2e-3 if half else 3e-6) and torch.equal(out.isnan(), exact.isnan())
    for got, want in zip(grads, truth(spec, operands, sizes, drop, grad_out, needs), strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert distance(got, want) <= (5e-3 if half else 1e-5) and torch.equal(got.isnan(), want.isnan())


@interpreted
@pytest.mark.parametrize("case", TABULATED, ids=lambda c: c.name)
def test_kernels_read_the_table(case: Case, seed: int, small: None) -> None:
    """The gradient of the table comes from the kernel of block diagonals."""
    check(case, Shape((2, 2), 37, 53, 20, 16), torch.float16, seed)
    check(case, Shape((1, 2), 53, 21, 8, 24), torch.float32, seed + 1)


@interpreted
@pytest.mark.parametrize("name", ("t5_padding", "t5_padding_inf"))
def test_kernels_read_the_table_beside_a_map(name: str, seed: int) -> None:
    check(BY_NAME[name], Shape((2, 1), 130, 150, 8, 8), torch.float32, seed, mapped=True)


@interpreted
def test_memory_is_linear(seed: int, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer of the backward pass has an element for every score."""
    made: list[int] = []
    scratch = launch_backward.empty
    monkeypatch.setattr(launch_backward, "empty", lambda *args: made.append(math.prod(args[0])) or scratch(*args))
    check(BY_NAME["t5_causal"], Shape((2, 1), 160, 160, 8, 8), torch.float32, seed)
    assert 19 * 16 * 16 in made and max(made) < 160 * 160


def kinds(case: Case, shape: Shape) -> list[str]:
    """What the kernels own that sum the gradients of captured reads."""
    spec = case.spec()
    operands, sizes = case.inputs(shape, torch.float32, 0)
    needs = [n > 2 and t.is_floating_point() for n, t in enumerate(operands)]
    return [job.kind for job in task(spec, operands, dict(zip(spec.size_names, sizes, strict=True)), needs).jobs if job.captured]


@outside
def test_whose_gradient_is_summed_along_diagonals() -> None:
    inline = {case.name: case for case in INLINE}
    wrapping = next(c for c in CASES if c.name == "wrapping_index")
    for case in (BY_NAME["t5"], BY_NAME["t5_for_all_heads"], BY_NAME["clipped"], inline["a_plain_read"], wrapping):
        assert kinds(case, Shape()) == kinds(case, Shape((1, 1))) == ["diagonals"], case.name
    for name in ("of_a_sum", "of_twice_the_key"):
        assert kinds(inline[name], Shape()) == ["tiles"] and kinds(inline[name], Shape((1, 2))) == ["queries"], name
    assert kinds(inline["of_the_query_too"], Shape()) == ["tiles"] and kinds(inline["of_positions_that_are_given"], Shape()) == ["queries"]
    # A place that is read from a list of all distances is by distance too; for its sum it would have to be read again.
    assert kinds(BY_NAME["through_a_list"], Shape()) == ["tiles"]


@outside
def test_diagonals_are_of_squares() -> None:
    case = BY_NAME["t5"]
    spec, (operands, sizes) = case.spec(), case.inputs(Shape(), torch.float32, 0)
    named = dict(zip(spec.size_names, sizes, strict=True))
    (job,) = (j for j in task(spec, operands, named, [False] * 3 + [True]).jobs if j.kind == "diagonals")
    for target in DEVICES.values():
        for dtype, depth in (("float32", 64), ("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256)):
            request = predict.assumed(case.spec(dtype), named | {"d": depth, "e": depth, "i": 1024, "j": 1024}, target)
            plans = plan_backward.candidates(case.spec(dtype), request, target, job)
            assert all(p.block_m == p.block_n for p in plans)
    with pytest.raises(ValueError, match="no block diagonals"):
        emit(spec, replace(plans[0], block_m=2 * plans[0].block_n), job)


@outside
@pytest.mark.parametrize("dtype, depth, target", [("bfloat16", 64, ("cuda", 90)), ("bfloat16", 128, ("cuda", 90)), ("float16", 64, ("cuda", 80))])
def test_resources_of_the_kernel_of_diagonals(dtype: str, depth: int, target: offline.Target) -> None:
    case = BY_NAME["t5_causal"]
    operands, sizes = case.inputs(Shape((2, 4), 1024, 1024, depth, depth), getattr(torch, dtype), 0)
    spec, operands = with_tables(case.spec(dtype), operands, sizes)
    needs = [n > 2 for n in range(len(operands))]
    found = task(spec, operands, dict(zip(spec.size_names, sizes, strict=True)), needs)
    (job,) = (j for j in found.jobs if j.kind == "diagonals")
    report = offline.compile_backward(spec, sizes, [t.to("meta") for t in operands], target, job)
    assert report.shared <= report.plan.shared + 512 <= known(*target).shared and (report.spills or 0) <= 64
    if target == ("cuda", 90):
        assert report.cubin and not misread_descriptors(offline.cuobjdump(report.cubin, "--dump-sass"))
