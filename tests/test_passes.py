"""Detection: every row of the table gives the program it must, or the refusal it must; every rewrite keeps the values."""
from __future__ import annotations

import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.fx import Graph

from attnfuse.passes import assemble, nodes, pipeline
from attnfuse.passes.region import memory_order
from attnfuse.program import show
from attnfuse.report import Report
from attnfuse.settings import Settings
from tests.cases import Case
from tests.cases_models import CASES


def rewrite(fn, settings: Settings | None = None, dynamic: bool | None = None):
    """`fn` compiled with the passes alone (no inner compiler) and the reports of its graphs."""
    reports: list[Report] = []

    def backend(gm, example_inputs):
        out, report = pipeline.run(gm, settings or Settings(strict=True))
        reports.append(report)
        return out.forward

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=dynamic), reports


def doubled(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def tensors(x) -> list[torch.Tensor]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_detection_and_values(case: Case, seed: int) -> None:
    inputs = case.inputs(torch.Generator().manual_seed(seed))
    compiled, reports = rewrite(case.fn)
    with torch.no_grad():
        want = tensors(case.fn(*(x.clone() for x in inputs)))
        got = tensors(compiled(*(x.clone() for x in inputs)))
    sites = [s for r in reports for s in r.sites]
    if case.reason is None:
        assert len(sites) == 1
        assert sites[0].rewritten, sites[0].reason
        spec = sites[0].spec
        names = {n: o.name for n, o in enumerate(spec.operands)}
        assert (show(spec.score, names), show(spec.weight, names)) == (case.score, case.weight)
        assert spec.empty_rows == ("zero" if "fused_call" in case.name else case.rows)
        given = [show(w.weight, {n: o.name for n, o in enumerate(w.operands)}) for w in sites[0].weights]
        assert tuple(given) == case.given
    else:
        assert sites and not any(s.rewritten for s in sites), sites[0].equation
        assert sites[0].reason.reason is case.reason, sites[0].reason
        assert sites[0].reason.node
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
        assert not case.given or a.stride() == b.stride()


@pytest.mark.parametrize("case", [c for c in CASES if c.reason is None and c.train], ids=str)
def test_gradients(case: Case, seed: int) -> None:
    """Gradients of all inputs against the written chain in float64."""
    inputs = case.inputs(torch.Generator().manual_seed(seed))
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    exact = [doubled(x).clone().requires_grad_(x.is_floating_point()) for x in inputs]
    compiled, reports = rewrite(case.fn)
    out, ref = tensors(compiled(*leaves)), tensors(case.fn(*exact))
    assert all(s.rewritten for r in reports for s in r.sites)
    assert [x.requires_grad for x in out] == [x.requires_grad for x in ref]
    upstream = [torch.randn_like(x) for x in ref if x.requires_grad]
    torch.autograd.backward([x for x in out if x.requires_grad], [u.float() for u in upstream])
    torch.autograd.backward([x for x in ref if x.requires_grad], upstream)
    for a, b in zip(leaves, exact, strict=True):
        if b.grad is not None:
            # A mask that is multiplied by -10000 gets gradients of that size, and what cancels beside them is as wrong as they are.
            near = max(5e-5, 1e-6 * b.grad.abs().max().item())
            torch.testing.assert_close(a.grad.double(), b.grad, atol=near, rtol=5e-5)


@pytest.mark.parametrize("sum_first", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_dropout_counts_if_it_comes_behind_the_sum(late: bool, sum_first: bool) -> None:
    """Dropped before the sum, a weight is missing from the normaliser too: that is no softmax."""
    def fn(q, k, v):
        s = q @ k.mT
        e = (s - s.amax(-1, keepdim=True)).exp()
        dropped = torch.nn.functional.dropout(e, 0.25, True)
        total = (e if sum_first else dropped).sum(-1, keepdim=True)
        return (dropped @ v) / total if late else (dropped / total) @ v

    compiled, reports = rewrite(fn)
    compiled(*(torch.randn(2, 5, 4) for _ in range(3)))
    (site,) = [s for r in reports for s in r.sites]
    assert site.rewritten is sum_first
    assert not sum_first or show(site.spec.weight) == "p * dropout(0.25)"


def test_the_table_covers_every_guard() -> None:
    """Each reason that a chain can give has a row here, or its own test below or elsewhere."""
    elsewhere = {"AXIS_ROLES", "INPLACE", "UNKNOWN_OP", "NOT_EXPRESSIBLE", "DEVICE", "VMAP", "DYNAMIC", "METADATA", "FAILED"}
    from attnfuse.refusal import Reason
    assert {c.reason.name for c in CASES if c.reason} | elsewhere >= {r.name for r in Reason}


def test_identical_layers_are_analysed_once() -> None:
    def layers(q, k, v):
        for _ in range(5):
            q = (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v + 1.0
        return q

    compiled, reports = rewrite(layers)
    compiled(*(torch.randn(2, 3, 8, 16) for _ in range(3)))
    assert [s.rewritten for s in reports[0].sites] == [True] * 5
    note = next(p.note for p in reports[0].passes if p.name == "lift")
    assert note == "2 analysed"          # the first reads inputs, the others a sum


def test_one_compilation_serves_a_range_of_lengths() -> None:
    def causal(q, k, v):
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        return (q @ k.transpose(-2, -1) * 0.25).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    compiled, reports = rewrite(causal, dynamic=True)
    for n in (5, 6, 17, 40):
        x = [torch.randn(2, 3, n, 16) for _ in range(3)]
        torch.testing.assert_close(compiled(*x), causal(*x))
    assert len(reports) == 1
    assert "|" not in reports[0].sites[0].equation.split("softmax_j")[1]      # no length was needed, none was fixed


def test_the_input_graph_is_not_changed() -> None:
    seen = []

    def backend(gm, example_inputs):
        before = str(gm.graph)
        out, report = pipeline.run(gm, Settings(strict=True))
        seen.append((before == str(gm.graph), out is not gm, report.rewritten))
        return out.forward

    torch._dynamo.reset()
    torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend=backend)(*(torch.randn(2, 5, 4) for _ in range(3)))
    assert seen == [(True, True, 1)]


def test_inside_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint
    fn = lambda q, k, v: checkpoint(lambda a, b, c: (a @ b.mT).softmax(-1) @ c, q, k, v, use_reentrant=False)
    compiled, reports = rewrite(fn)
    x = [torch.randn(2, 5, 4, requires_grad=True) for _ in range(3)]
    torch.testing.assert_close(compiled(*x), fn(*x))
    assert [s.rewritten for r in reports for s in r.sites] == [True]


def test_under_vmap_is_refused() -> None:
    fn = torch.func.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    compiled, reports = rewrite(fn)
    x = [torch.randn(3, 2, 5, 4) for _ in range(3)]
    torch.testing.assert_close(compiled(*x), fn(*x))
    assert all(s.reason.reason.name == "VMAP" for r in reports for s in r.sites)


def test_autocast_entered_in_the_graph() -> None:
    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (q @ k.mT * 0.5).softmax(-1) @ v

    compiled, reports = rewrite(fn)
    x = [torch.randn(2, 5, 16) for _ in range(3)]
    out, ref = compiled(*x), fn(*x)
    assert [s.rewritten for r in reports for s in r.sites] == [True]
    assert reports[0].sites[0].spec.qk_dtype == "bfloat16" and out.dtype == ref.dtype
    torch.testing.assert_close(out.float(), ref.float(), atol=3e-2, rtol=3e-2)


def test_weights_kept_in_float32_for_the_value_product() -> None:
    fn = lambda q, k, v: ((q @ k.mT).float().softmax(-1) @ v.float()).to(q.dtype)
    compiled, reports = rewrite(fn)
    x = [torch.randn(2, 5, 16).half() for _ in range(3)]
    torch.testing.assert_close(compiled(*x), fn(*x), atol=2e-3, rtol=2e-3)
    assert reports[0].sites[0].spec.pv_dtype == "float32"


def test_a_failing_pass_leaves_the_graph_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(pipeline, "assemble", broken)
    fn = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    x = [torch.randn(2, 5, 16) for _ in range(3)]
    compiled, reports = rewrite(fn, Settings())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(*x), fn(*x))
    assert reports[0].failures and reports[0].sites[0].reason.reason.name == "FAILED"
    assert sum("attnfuse" in str(w.message) for w in said) == 1
    compiled, _ = rewrite(fn, Settings(strict=True))
    with pytest.raises(Exception, match="no"):
        compiled(*x)


@pytest.mark.parametrize("follow, dead", [
    (lambda x: x.view(-1).sum(), True),
    (lambda x: (x + 1,), False),                                     # returned
    (lambda x: x.add_(1.0), False),
    (lambda x: torch._assert(x.sum() > 0, ""), False),
    (lambda x: outside(x), False),                                   # nobody knows what it does
    (lambda x: [x := x + 1 for _ in range(17)], False),              # too long to look through
], ids=["views", "returned", "in_place", "assertion", "unknown", "long"])
def test_what_counts_as_dead_code(follow, dead: bool) -> None:
    def fn(x):
        weights = x.softmax(-1)
        found = follow(weights)
        return found if isinstance(found, tuple) else x

    graph = torch.fx.symbolic_trace(fn).graph
    softmax = next(n for n in graph.nodes if n.target == "softmax")
    assert bool(nodes.dead_end(next(iter(softmax.users)))) is dead


@torch.fx.wrap
def outside(x: torch.Tensor) -> torch.Tensor:
    """A function that is no part of PyTorch."""
    return x


@pytest.mark.parametrize("shape, order", [((2, 4, 7, 16), (0, 1, 2, 3)), ((2, 4, 7, 16), (2, 0, 1, 3)), ((2, 4, 1, 16), (0, 2, 1, 3)),
                                          ((2, 1, 7, 16), (0, 2, 1, 3)), ((1, 4, 7, 16), (1, 0, 2, 3)), ((2, 1, 1, 3), (0, 1, 2, 3))])
def test_memory_order_gives_the_strides_back(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    x = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    found = memory_order(x)
    assert found is not None
    again = torch.empty([shape[d] for d in found]).permute([found.index(d) for d in range(4)])
    assert (x.shape, x.stride()) == (again.shape, again.stride())


def test_a_result_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "memory_order", lambda x: (1, 0, 2))
    compiled, reports = rewrite(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    x = [torch.randn(2, 5, 16) for _ in range(3)]
    compiled(*x)
    assert [s.reason.reason.name for s in reports[0].sites if s.reason] == ["METADATA"]


def test_a_tensor_with_gaps_has_no_memory_order() -> None:
    assert memory_order(torch.empty(2, 4, 7, 16)[..., :8]) is None


def test_a_generated_file_names_the_line_it_was_met_at() -> None:
    from attnfuse.codegen import launch
    from attnfuse.codegen.tiles import known

    compiled, reports = rewrite(lambda q, k, v: (q @ k.mT * 0.3721).softmax(-1) @ v)
    q = torch.randn(2, 3, 16, 16)
    compiled(q, q + 1, q + 2)
    text = launch.source(reports[0].sites[0].spec, (2, 3, 16, 16, 16, 16), [q.to("meta")] * 3, known("cuda", 90))
    assert "from test_passes.py:" in text


def test_meta_tensors_are_refused() -> None:
    fn = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    compiled, reports = rewrite(fn)
    assert compiled(*(torch.empty(2, 5, 4, device="meta") for _ in range(3))).shape == (2, 5, 4)
    assert [s.reason.reason.name for r in reports for s in r.sites] == ["DEVICE"]


def test_a_captured_tensor_of_another_device_is_refused() -> None:
    """A number that lives on another device than the queries, which eager allows: the kernel could not read it."""
    from attnfuse.passes import assemble
    from attnfuse.passes.trace import Value

    here, there = (Value(n, (), torch.float32, torch.device(d)) for n, d in enumerate(("cpu", "cuda")))
    spec = object.__new__(assemble._Spec)
    with pytest.raises(Exception, match="device"):
        assemble._Spec._check_tensors(spec, [here, there], ())


def _changes(call) -> bool | None:
    """Whether a call changes its first argument, tried on integers and on booleans; None where it takes neither."""
    seen = []
    for first in (torch.tensor([5, 7]), torch.tensor([True, False])):
        other = torch.ones_like(first) * 2 if first.dtype != torch.bool else torch.tensor([False, True])
        before = first.clone()
        try:
            call(first, other)
        except Exception:  # it does not take these: nothing to learn
            continue
        seen.append(not torch.equal(first, before))
    return any(seen) if seen else None


def test_operators_that_change_their_argument() -> None:
    """Every operator of two arguments, as a function and as a method, against what it does."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    told: dict[str, tuple[bool, bool]] = {}
    for name in dir(operator):
        changes = _changes(getattr(operator, name)) if not name.startswith("_") and callable(getattr(operator, name)) else None
        if changes is not None:
            told[name] = changes, nodes.mutated(graph.call_function(getattr(operator, name), (x, y))) == [x]
    for name in dir(torch.Tensor):
        dunder = name.startswith("__") and callable(getattr(torch.Tensor, name)) and name not in ("__class__", "__init__", "__new__")
        changes = _changes(getattr(torch.Tensor, name)) if dunder else None
        if changes is not None:
            told[name] = changes, nodes.mutated(graph.call_method(name, (x, y))) == [x]
    assert {"irshift", "and_", "or_", "iand", "__ilshift__", "__and__"} <= set(told)
    assert {n: t for n, t in told.items() if t[0] != t[1]} == {}


def shifted(q, k, v, mask):
    """The mask is changed between its use and the product: the scores hold what it was."""
    scores = (q @ k.mT).masked_fill(mask == 0, -1e9)
    mask >>= 1
    return scores.softmax(-1) @ v


def shifted_by_a_method(q, k, v, mask):
    scores = (q @ k.mT).masked_fill(mask == 0, -1e9)
    mask.__ilshift__(1)
    return scores.softmax(-1) @ v


def shifted_copy(q, k, v, mask):
    """The near miss: a new tensor."""
    scores = (q @ k.mT).masked_fill(mask >> 1 == 0, -1e9)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("fn, rewritten", [(shifted, False), (shifted_by_a_method, False), (shifted_copy, True)])
def test_a_mask_that_is_shifted_in_place(fn, rewritten: bool, seed: int) -> None:
    q, k, v = torch.randn(3, 2, 9, 4, dtype=torch.float64)
    mask = torch.randint(0, 4, (2, 9, 9))
    theirs, mine = mask.clone(), mask.clone()
    compiled, reports = rewrite(fn)
    want, got = fn(q, k, v, theirs), compiled(q, k, v, mine)
    assert [s.rewritten for r in reports for s in r.sites] == [rewritten]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert torch.equal(mine, theirs)


def normalised_keys(training: bool):
    def fn(q, k, v, table):
        """The scores hold the running mean as it was before the batch."""
        scores = q @ k.mT + table[0]
        values = F.batch_norm(v.flatten(0, 1), table[0, :4], table[1, :4], training=training).view_as(v)
        return scores.softmax(-1) @ v + values
    return fn


def normalised_by_the_operator(q, k, v, table):
    """The same by the function below `F.batch_norm`."""
    scores = q @ k.mT + table[0]
    values = torch.batch_norm(v.flatten(0, 1), None, None, table[0, :4], table[1, :4], True, 0.1, 1e-5, False).view_as(v)
    return scores.softmax(-1) @ v + values


def looked_up(max_norm: float | None, lookup):
    def fn(q, k, v, table):
        """The scores hold the table as it was before the lookup scaled it down."""
        scores = q @ k.mT + table
        found = lookup(torch.arange(9).view(1, -1), table, max_norm=max_norm)
        return scores.softmax(-1) @ v, found
    return fn


@pytest.mark.parametrize("fn, rewritten", [
    (normalised_keys(True), False), (normalised_keys(False), True), (normalised_by_the_operator, False),
    (looked_up(0.5, F.embedding), False), (looked_up(None, F.embedding), True),
    (looked_up(0.5, F.embedding_bag), False), (looked_up(None, F.embedding_bag), True)])
def test_what_is_changed_without_saying_so(fn, rewritten: bool, seed: int) -> None:
    """Running statistics in training, and a table whose rows are held to a norm, change between the scores and the product."""
    q, k, v = torch.randn(3, 2, 9, 4, dtype=torch.float64)
    table = torch.rand(9, 9, dtype=torch.float64) + 0.5
    theirs, mine = table.clone(), table.clone()
    compiled, reports = rewrite(fn)
    want, got = fn(q, k, v, theirs), compiled(q, k, v, mine)
    assert [s.rewritten for r in reports for s in r.sites] == [rewritten]
    for a, b in zip(tensors(got), tensors(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class Leaf(torch.nn.Module):
    """What is named `where` goes through a module that `symbolic_trace` does not look into; what it returns is not used."""

    def __init__(self, module: torch.nn.Module, where: str) -> None:
        super().__init__()
        self.module, self.where = module, where

    def forward(self, q, k, v):
        scores = q @ k.mT
        if self.where in ("q", "scores"):
            self.module(q if self.where == "q" else scores)
        weights = scores.softmax(-1)
        if self.where == "weights":
            self.module(weights)
        return weights @ v


@pytest.mark.parametrize("where", ("q", "scores", "weights"))
@pytest.mark.parametrize("module, rewritten", [
    (torch.nn.Dropout(1.0, inplace=True), None), (torch.nn.Hardtanh(0.0, 0.05, inplace=True), False), (torch.nn.SiLU(inplace=True), False),
    (torch.nn.Dropout(1.0), True), (torch.nn.SiLU(), None)], ids=str)
def test_modules_that_work_in_place(module: torch.nn.Module, rewritten: bool | None, where: str, seed: int) -> None:
    """A leaf module with `inplace` changes what it is given, whoever reads its result."""
    import attnfuse

    inputs = [x.contiguous() for x in torch.randn(3, 2, 9, 4, dtype=torch.float64)]
    model = Leaf(module, where)
    graph, report = attnfuse.rewrite(torch.fx.symbolic_trace(model), [x.clone() for x in inputs])
    got, want = graph(*(x.clone() for x in inputs)), model(*(x.clone() for x in inputs))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert rewritten is None or [s.rewritten for s in report.sites] == [rewritten]


def dropped_by_a_flag(weights, v):
    F.dropout(weights, 1.0, True, inplace=True)
    return weights @ v


def dropped_by_name(weights, v):
    torch.dropout_(weights, 1.0, True)
    return weights @ v


def dropped_elsewhere(weights, v):
    """The near miss: a tensor that nothing reads."""
    F.dropout(weights, 1.0, True)
    return weights @ v


def dropped_in_eval(weights, v):
    F.dropout(weights, 1.0, False, inplace=True)
    return weights @ v


@pytest.mark.parametrize("recorded", (False, True))
@pytest.mark.parametrize("fn", (dropped_by_a_flag, dropped_by_name, dropped_elsewhere, dropped_in_eval))
def test_dropout_in_place_drops(fn, recorded: bool, seed: int) -> None:
    """Dropout that changes the weights counts, though the tensor that it returns is not named. With p = 1 nothing is left to chance."""
    exact = [x.requires_grad_(recorded) for x in torch.randn(3, 2, 9, 4, dtype=torch.float64).unbind()]
    whole = lambda q, k, v: fn((q @ k.mT).softmax(-1) * 0.5, v)
    compiled, reports = rewrite(whole)
    inputs = [x.detach().clone().requires_grad_(recorded) for x in exact]
    got, want = compiled(*inputs), whole(*exact)
    assert [s.rewritten for r in reports for s in r.sites] == [True]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    if recorded:
        for a, b in zip(*(torch.autograd.grad(o.sum(), x) for o, x in ((got, inputs), (want, exact))), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def normalised_in_a_body(q, k, v, mean, var):
    """Checkpointing, whose body reads the result and updates running statistics: it does not change the result."""
    out = (q @ k.mT).softmax(-1) @ v
    body = lambda x, m, s: F.batch_norm(x.flatten(0, 1), m, s, training=True)
    return torch.utils.checkpoint.checkpoint(body, out, mean, var, use_reentrant=False)


def statistics_read_before_a_body(q, k, v, mean, var):
    scores = q @ k.mT * mean[0]
    body = lambda x, m, s: F.batch_norm(x.flatten(0, 1), m, s, training=True)
    other = torch.utils.checkpoint.checkpoint(body, v, mean, var, use_reentrant=False)
    return scores.softmax(-1) @ v + other.view_as(v)


@pytest.mark.parametrize("fn, rewritten", [(normalised_in_a_body, True), (statistics_read_before_a_body, False)])
def test_what_a_body_changes(fn, rewritten: bool, seed: int) -> None:
    """Of what a body is given, only what it changes counts as changed."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 9, 4, dtype=torch.float64).unbind())
    mean, var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    compiled, reports = rewrite(fn)
    got, want = compiled(q, k, v, mean.clone(), var.clone()), fn(q, k, v, mean.clone(), var.clone())
    assert [s.rewritten for r in reports for s in r.sites] == [rewritten]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
