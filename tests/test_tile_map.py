"""Maps of tiles: what a mask is made of, what the map says, who gets one, and that kernels follow it.

What runs in Triton's interpreter does so in a process of its own, as in test_codegen_numbers.py.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attnfuse
from attnfuse import ops, origin, tilemap, tuning, walker
from attnfuse.codegen import launch, launch_backward, offline, tile_map
from attnfuse.codegen.jobs import Job
from attnfuse.codegen.tiles import DEVICES
from attnfuse.program import Expr, add, apply, axis, const, load, mul, walk, where
from attnfuse.reference import reference
from attnfuse.spec import AttentionSpec
from attnfuse.passes import tiles
from tests.interpreted import run_in_interpreter
from tests.oracle import truth
from tests.specs import BY_NAME, CASES, CAUSAL, INF, MIN, SCALED, Captured, Case, Shape, padding, with_map

INSIDE = launch.interpreting()
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter, in a process of its own")
outside = pytest.mark.skipif(INSIDE, reason="needs no interpreter")
b0, b1, i, j = (axis(n) for n in ("b0", "b1", "i", "j"))
MAPPED = [case for case in CASES if tilemap.mapped(case.spec()) is not None]
BLOCKS = Captured("blocks", "bool", 4, lambda s, g: blocks(s, g))
SPARSE = Case("sparse", where(load(3, (b0, b1, i, j), "bool"), SCALED, const(INF)), captured=(BLOCKS,))
"""A dense mask given as a tensor: squares that are empty, full and ragged, in every head others."""

DENSE = Case("dense", add(SCALED, load(3, (b0, i, j), "float")), captured=(Captured("mask", None, 3, lambda s, g: squares(s, g)),))
"""The same as a float that is added: 0, or -inf, or the least there is, with a few ordinary numbers."""
ONES = Case("ones", add(SCALED, mul(apply("sub", const(1.0), load(3, (b0, j), "float")), const(MIN))),
            captured=(Captured("mask", None, 2, lambda s, g: (torch.rand(s["b0"], s["j"], generator=g) > 0.3).float()),))
"""A padding mask of ones and zeros that is a float."""


def squares(sizes: dict[str, int], g: torch.Generator) -> Tensor:
    """A float mask [b0, i, j] of which squares are empty, full and ragged."""
    mask = torch.where(blocks(sizes | {"b1": 1}, g)[:, 0], 0.0, -math.inf if torch.rand((), generator=g) < 0.5 else -1e30)
    mask[:, :1, :20] = torch.randn(min(20, sizes["j"]), generator=g)
    return mask


def blocks(sizes: dict[str, int], g: torch.Generator) -> Tensor:
    """Squares of 32, each empty, full or half full; no row is empty."""
    shape = [sizes[a] for a in ("b0", "b1")] + [-(-sizes[a] // 32) for a in ("i", "j")]
    share = torch.randint(0, 3, shape, generator=g).div(2).repeat_interleave(32, -1).repeat_interleave(32, -2)[..., :sizes["i"], :sizes["j"]]
    out = torch.rand(share.shape, generator=g) < share
    out[..., 0] = True
    return out


@outside
def test_in_the_interpreter(tmp_path: Path) -> None:
    run_in_interpreter(__file__, tmp_path, "-W", "ignore")


# ---- what a mask is made of

def test_masks_that_ranges_bound_need_no_map() -> None:
    for name in ("plain", "causal_inf", "causal_min", "window", "band", "bottom_right", "alibi_causal", "softcap", "bias", "dropout"):
        assert tilemap.mapped(BY_NAME[name].spec()) is None, name
    assert {c.name for c in MAPPED} >= {"causal_padding_min", "padding", "segments", "prefix", "integer_mask", "two_fills", "sinks_min"}


@pytest.mark.parametrize("score", [
    where(padding, SCALED, const(-1e4)),                                        # counts beside a live key
    add(SCALED, where(padding, const(0.0), const(-100.0))),
    where(apply("lt", const(0.0), SCALED), SCALED, const(INF)),                 # known only with the scores
    mul(where(padding, const(1.0), const(0.0)), SCALED),                        # no mask at all
    where(apply("eq", b0, const(0)), SCALED, const(INF)),                       # says nothing of a tile
    add(SCALED, mul(where(padding, const(0.0), const(1.0)), const(1e9))),       # the wrong sign
    add(SCALED, load(3, (b1, j), "float")),                                     # every head its own: a bias
    add(SCALED, load(3, (b0, apply("sub", i, j)), "float")),                    # by distance: a bias
    mul(SCALED, load(3, (i, j), "float")),                                      # a factor may have any sign
])
def test_what_is_no_mask(score: Expr) -> None:
    kind = "float32" if any(x.op == "load" and x.kind == "float" for x in walk(score)) else "bool"
    assert tilemap.mapped(Case("none", score, captured=(replace(BY_NAME["padding"].captured[0], dtype=kind),)).spec()) is None


@pytest.mark.parametrize("case", (DENSE, ONES), ids=lambda c: c.name)
def test_float_masks(case: Case) -> None:
    """Full tiles do not read them, so where a gradient of theirs is wanted there is no such kernel."""
    found = tilemap.mapped(case.spec())
    assert found is not None and found.floats == (3,) and found.dense == (case is DENSE) and found.inside == SCALED
    operands, sizes = case.inputs(Shape((1, 2), 70, 70), torch.float32, 0)
    spec, operands = with_map(case.spec(), operands, sizes)
    out, stats = torch.zeros(1, 2, 70, 16), torch.zeros(1, 2, 70, 2)
    with pytest.raises(launch.Unsupported, match="a mask that full tiles do not read"):
        launch.backward(spec, out, operands, out, stats, sizes, None, [False, False, False, True, False, False])


def test_full_tiles_have_lost_the_mask() -> None:
    for case, inside in (("causal_padding_min", SCALED), ("segments", SCALED), ("two_fills", SCALED), ("integer_mask", SCALED)):
        found = tilemap.mapped(BY_NAME[case].spec())
        assert found is not None and str(found.inside) == str(inside)


def test_an_integer_that_is_neither_is_neither() -> None:
    """(1 - mask) · MIN with a mask of 2 raises the score: such a tile is not full, and not empty."""
    found = tilemap.mapped(BY_NAME["integer_mask"].spec())
    assert found is not None
    mask = torch.ones(1, 192, dtype=torch.int64)
    mask[0, 70], mask[0, 128:] = 2, 0
    rows, _ = tilemap.build(found.mask, [mask], (1, 64, 192), torch.device("cpu"))
    assert rows.flatten().tolist() == [1, 2, 0, 1, 2]


def test_equal_masks_of_different_attentions_are_equal() -> None:
    """The operands are numbered by the mask alone; a mask survives JSON."""
    first = BY_NAME["padding"].spec()
    second = replace(BY_NAME["bias"].spec(), operands=(*BY_NAME["bias"].spec().operands, first.operands[3]),
                     score=where(load(4, (b0, j), "bool"), BY_NAME["bias"].spec().score, const(MIN)))
    a, b = tilemap.mapped(first), tilemap.mapped(second)
    assert a is not None and b is not None and a.mask == b.mask and (a.sources, b.sources) == ((3,), (4,))
    assert tilemap.Mask.from_json(a.mask.to_json()) == a.mask and a.mask.to_json() == b.mask.to_json()


def expected(case: Case, shape: Shape, seed: int) -> tuple[list[Tensor], tilemap.Mask, tuple[int, ...], Tensor]:
    """The mask's operands, mask, sizes, and which scores are alive, by the reference of the whole spec: a weight that is not 0."""
    spec = case.spec()
    operands, sizes = case.inputs(shape, torch.float32, seed)
    found = tilemap.mapped(spec)
    assert found is not None
    named = dict(zip(spec.size_names, sizes, strict=True))
    unit = replace(spec, extra_terms=(), weight=Expr("weight"))
    operands[2] = torch.eye(named["j"]).expand(*operands[2].shape[:2], -1, -1).contiguous()      # then the result is the weights
    weights = reference(unit, operands, [named["j"] if n == "e" else named[n] for n in spec.size_names], dtype=torch.float64)
    return [operands[n] for n in found.sources], found.mask, tuple(named[n] for n in found.mask.size_names), weights


@pytest.mark.parametrize("case", [BY_NAME["causal_padding_inf"], BY_NAME["segments"], BY_NAME["padding"], SPARSE, DENSE], ids=lambda c: c.name)
def test_the_map_says_what_the_weights_show(case: Case, seed: int) -> None:
    """Tile by tile: empty ones have no weight, full ones only weights; each tile is listed once."""
    operands, mask, sizes, weights = expected(case, Shape((2, 3), 200, 150), seed)
    rows, columns = tilemap.build(mask, operands, sizes, torch.device("cpu"))
    shown = weights.nan_to_num() > 0
    batch = {"b0": 2, "b1": 3}
    whole = lambda x: x.view([batch[b] if b in mask.batch else 1 for b in batch] + list(x.shape[-2:])).expand(2, 3, -1, -1)
    for lists, pairs, length in ((whole(rows), shown, 150), (whole(columns), shown.mT, 200)):
        for x in range(2):
            for y in range(3):
                for n, row in enumerate(lists[x, y].tolist()):
                    full, alive, order = row[0], row[1], row[2:]
                    assert sorted(order) == list(range(-(-length // 64)))
                    for place, tile in enumerate(order):
                        square = pairs[x, y, n * 64:n * 64 + 64, tile * 64:tile * 64 + 64]
                        if place < full:
                            assert square.all() and tile * 64 + 64 <= length
                        elif place >= alive:
                            assert not square.any()
                        elif tile * 64 + 64 <= length:
                            assert not square.all()


def test_what_is_known_of_an_attention_holds_for_it_with_a_map(seed: int) -> None:
    """Its place in the model, whether its kernels are to be timed, and what the walker makes of it."""
    plain = BY_NAME["segments"].spec()
    operands, sizes = BY_NAME["segments"].inputs(Shape((1, 2), 70, 90), torch.float32, seed)
    spec, with_lists = with_map(plain, operands, sizes)
    assert spec != plain and tilemap.without(spec) == plain
    assert not tuning.asked(spec)
    tuning.ask([plain])
    origin.note(plain, "layers.0", "model.py:18")
    try:
        assert tuning.asked(spec) and origin.of(spec) == "model.py:18 (layers.0)"
    finally:
        tuning._asked.discard(plain)
        origin._places.pop(plain.digest())
    (out, stats), (want, _) = (walker.forward(s, o, sizes) for s, o in ((spec, with_lists), (plain, operands)))
    assert torch.equal(out.nan_to_num(), want.nan_to_num())
    needs = [t.is_floating_point() for t in with_lists]
    grads = [walker.backward(s, torch.ones_like(out), o, out, stats, sizes, None, needs[:len(o)]) for s, o in ((spec, with_lists), (plain, operands))]
    assert len(grads[0]) == len(with_lists) and all(a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*grads))


# ---- who gets a map

class Layers(nn.Module):
    """Attentions with one padding mask, causal; the mask may be changed between the layers."""

    def __init__(self, layers: int = 2, change: bool = False) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        self.change = change

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        keep = keep.clone()
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for n, projection in enumerate(self.projections):
            q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in projection(x).chunk(3, -1))
            if self.change and n:
                keep[:, :100] = False
            scores = (q @ k.mT / 4).masked_fill(~(causal & keep[:, None, None, :]), torch.finfo(x.dtype).min)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps on the CPU too, where the interpreter's kernels follow them."""
    monkeypatch.setattr(tiles, "DEVICES", frozenset({"cpu", "cuda"}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """What graphs call: (op, how many operands)."""
    found: list[tuple[str, int]] = []
    from attnfuse import dynamo

    analyse = dynamo.analyse

    def seen(gm, settings):
        out, report = analyse(gm, settings)
        for node in out.graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("attnfuse."):
                found.append((str(node.target).split(".")[1], len(node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[1])))
        return out, report

    monkeypatch.setattr(dynamo, "analyse", seen)
    yield found


def padded(length: int = 300) -> tuple[Tensor, Tensor]:
    """Activations and which tokens count: the first sequence ends early, the second begins late."""
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[0, length // 2:], keep[1, :length // 3] = False, False
    return torch.randn(2, length, 32), keep


@outside
def test_layers_share_a_map(everywhere: None, calls: list[tuple[str, int]], seed: int) -> None:
    model, (x, keep) = Layers().eval(), padded()
    want = model.double()(x.double(), keep)
    with torch.no_grad():
        got = attnfuse.optimize(model.float(), inner="eager")(x, keep)
    assert calls == [("tile_map", 1), ("attention", 6), ("attention", 6)]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@outside
def test_a_mask_that_changes_has_two_maps(everywhere: None, calls: list[tuple[str, int]], seed: int) -> None:
    model, (x, keep) = Layers(change=True).eval(), padded()
    with torch.no_grad():
        want = model.double()(x.double(), keep)
        got = attnfuse.optimize(model.float(), inner="eager")(x, keep)
    assert [c for c in calls if c[0] == "tile_map"] == [("tile_map", 1)] * 2
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@outside
def test_a_map_of_inference_mode_stays_there(everywhere: None, calls: list[tuple[str, int]], seed: int) -> None:
    """No gradient may keep a tensor that was made under inference mode: behind it the mask gets a map of its own."""
    def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        attend = lambda: (q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v
        with torch.inference_mode():
            looked_at = attend() * 2
        return attend(), looked_at

    q, k, v = torch.randn(3, 2, 2, 300, 16)
    mask = torch.rand(300, 300) > 0.5
    q.requires_grad_(True)
    wide = q.detach().double().requires_grad_(True)
    (want,) = torch.autograd.grad(written(wide, k.double(), v.double(), mask)[0].square().sum(), wide)
    (got,) = torch.autograd.grad(torch.compile(written, backend="attnfuse", options={"strict": True})(q, k, v, mask)[0].square().sum(), q)
    assert [c[0] for c in calls] == ["tile_map", "attention", "tile_map", "attention"]
    assert (got.double() - want).norm() <= 1e-4 * want.norm()


@outside
@pytest.mark.parametrize("length, settings", [(100, {}), (300, {"executor": "torch"})])
def test_who_gets_none(length: int, settings: dict[str, str], everywhere: None, calls: list[tuple[str, int]]) -> None:
    with torch.no_grad():
        attnfuse.optimize(Layers().eval(), inner="eager", settings=attnfuse.Settings(**settings))(*padded(length))  # type: ignore[arg-type]
    assert [c[0] for c in calls] == ["attention", "attention"]


@outside
@pytest.mark.parametrize("learned", (False, True))
def test_a_float_that_learns_is_no_mask(learned: bool, everywhere: None, calls: list[tuple[str, int]], seed: int) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    q, k, v = torch.randn(3, 2, 2, 300, 16)
    mask = torch.full((300, 300), -math.inf).triu(1).requires_grad_(learned)
    q.requires_grad_(True)
    torch.compile(written, backend="attnfuse")(q, k, v, mask)
    assert [c[0] for c in calls] == ["attention"] if learned else ["tile_map", "attention"]


@outside
def test_the_cpu_gets_none(calls: list[tuple[str, int]]) -> None:
    with torch.no_grad():
        attnfuse.optimize(Layers().eval(), inner="eager")(*padded())
    assert [c[0] for c in calls] == ["attention", "attention"]


@outside
def test_lengths_may_change(everywhere: None, calls: list[tuple[str, int]], seed: int) -> None:
    model = Layers().eval()
    fused = attnfuse.optimize(Layers().eval(), inner="eager", dynamic=True)
    fused.load_state_dict(model.state_dict())
    for length in (300, 270, 401):
        x, keep = padded(length)
        with torch.no_grad():
            torch.testing.assert_close(fused(x, keep), model(x, keep), rtol=1e-4, atol=1e-5)
    assert [c[0] for c in calls] == ["tile_map", "attention", "attention"]


@outside
def test_the_op_is_sound() -> None:
    found = tilemap.mapped(BY_NAME["causal_padding_min"].spec())
    assert found is not None
    torch.library.opcheck(torch.ops.attnfuse.tile_map.default, (torch.randn(3), [torch.rand(2, 300) > 0.5], [2, 300, 300], found.mask.to_json()))


# ---- kernels

@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, scratch = launch._allocate, launch_backward.empty
    monkeypatch.setattr(launch, "_allocate", lambda *args: tuple(t.fill_(12345.0) for t in allocate(*args)))
    monkeypatch.setattr(launch_backward, "empty", lambda *args: scratch(*args).fill_(77))


@interpreted
@pytest.mark.parametrize("case", [*MAPPED, SPARSE, DENSE, ONES], ids=lambda c: c.name)
def test_the_kernels_make_the_same_map(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_map, "CHUNK", 2)                                   # so that lists have several chunks
    monkeypatch.setattr(tile_map, "_runs", {})
    for n, shape in enumerate((Shape((2, 2), 130, 200), Shape((1, 1), 64, 128), Shape((2, 1), 65, 1))):
        operands, mask, sizes, _ = expected(case, shape, seed + n)
        want = tilemap.build(mask, operands, sizes, torch.device("cpu"))
        got = tile_map.launch(mask, operands, sizes, torch.device("cpu"))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))


def check(spec: AttentionSpec, operands: list[Tensor], sizes: tuple[int, ...], seed: int) -> None:
    """Result and gradients against float64."""
    drop = torch.tensor([seed]) if spec.dropouts else None
    found = tilemap.mapped(spec)
    needs = [t.is_floating_point() and found is not None and n not in found.floats for n, t in enumerate(operands)]
    out, stats = launch.forward(spec, operands, sizes, drop)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    grads = launch.backward(spec, grad_out, operands, out, stats, sizes, drop, needs)
    exact = reference(spec, operands, sizes, drop, dtype=torch.float64)
    half = out.dtype == torch.float16
    assert torch.equal(out.isnan(), exact.isnan())
    distance = lambda a, b: (a.double() - b).nan_to_num().norm() / max(b.nan_to_num().norm(), 1e-1 * grad_out.double().norm())
    assert distance(out, exact) <= (2e-3 if half else 3e-6)
    for got, want in zip(grads, truth(spec, operands, sizes, drop, grad_out, needs), strict=True):
        if got is not None and want is not None:
            assert torch.equal(got.isnan(), want.isnan())
            assert distance(got, want) <= (4e-3 if half else 1e-5)


@interpreted
@pytest.mark.parametrize("case", [*MAPPED, SPARSE, DENSE, ONES], ids=lambda c: c.name)
def test_attention_along_a_map(case: Case, seed: int) -> None:
    dtype = ("float32", "float16")[len(case.name) % 2]
    for shape in (Shape((1, 2), 150, 200), Shape((2, 1), 130, 70)):
        operands, sizes = case.inputs(shape, getattr(torch, dtype), seed)
        spec, operands = with_map(case.spec(dtype), operands, sizes)
        check(spec, operands, sizes, seed)


@interpreted
@pytest.mark.parametrize("name", ("causal_padding_min", "segments"))
def test_tiles_that_are_parts_of_the_maps(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_runs", {})
    monkeypatch.setattr(launch_backward, "_runs", {})
    for module, m, n in ((launch, 16, 32), (launch_backward, 32, 16)):
        offered = module.candidates
        monkeypatch.setattr(module, "candidates", lambda *a, f=offered, m=m, n=n: tuple(replace(p, block_m=m, block_n=n) for p in f(*a)))
    operands, sizes = BY_NAME[name].inputs(Shape((1, 2), 150, 140), torch.float32, seed)
    spec, operands = with_map(BY_NAME[name].spec(), operands, sizes)
    check(spec, operands, sizes, seed)


@interpreted
def test_grouped_heads_share_keys_along_a_map(seed: int) -> None:
    case = replace(SPARSE, groups=2)
    operands, sizes = case.inputs(Shape((1, 4), 140, 150), torch.float32, seed)
    spec, operands = with_map(case.spec(), operands, sizes)
    check(spec, operands, sizes, seed)


@interpreted
def test_the_map_is_followed(seed: int) -> None:
    """A map that calls every tile empty, or full, is believed: this is what the other tests would miss."""
    operands, sizes = BY_NAME["segments"].inputs(Shape((1, 2), 150, 200), torch.float32, seed)
    spec, operands = with_map(BY_NAME["segments"].spec(), operands, sizes)
    exact = reference(spec, operands, sizes, dtype=torch.float64)
    for counts in ((0, 0), (3, 3)):
        operands[spec.tiles[0]][..., :2] = torch.tensor(counts)  # type: ignore[index]
        out, _ = launch.forward(spec, operands, sizes)
        assert not torch.allclose(out.double().nan_to_num(), exact, rtol=1e-2, atol=1e-2)


@interpreted
def test_rows_without_keys_visit_empty_tiles(seed: int) -> None:
    """Left padding under finfo.min: rows of padding weigh ALL keys, in the result and in the gradient of every value."""
    case = BY_NAME["causal_padding_min"]
    operands, sizes = case.inputs(Shape((2, 2), 200, 200), torch.float32, seed)
    operands[3][:] = True
    operands[3][0, :140] = False
    spec, operands = with_map(case.spec(), operands, sizes)
    check(spec, operands, sizes, seed)


@interpreted
def test_a_model_with_a_map(everywhere: None, calls: list[tuple[str, int]], seed: int) -> None:
    model, (x, keep) = Layers(), padded(270)
    x.requires_grad_(True)
    exact = Layers().double()
    exact.load_state_dict(model.state_dict())
    wide = x.detach().double().requires_grad_(True)
    (want,) = torch.autograd.grad(exact(wide, keep).square().sum(), wide)
    with ops.force_executor("triton"):
        (got,) = torch.autograd.grad(attnfuse.optimize(model, inner="eager")(x, keep).square().sum(), x)
    assert calls == [("tile_map", 1), ("attention", 6), ("attention", 6)]
    assert (got.double() - want).norm() <= 1e-5 * want.norm()


# ---- the text, and what the compiler says of it

@outside
@pytest.mark.parametrize("name", ("causal_padding_min", "segments", "sinks_min"))
def test_only_cut_tiles_look_at_the_mask(name: str) -> None:
    """The loop over full tiles neither loads the mask nor compares positions; the one over cut tiles does both."""
    case = BY_NAME[name]
    operands, sizes = case.inputs(Shape((1, 2), 256, 256, 64, 64), torch.float16, 0)
    spec, operands = with_map(case.spec("float16"), operands, sizes)
    full, cut = launch.source(spec, sizes, operands, DEVICES["cuda", 90]).split("# full tiles\n")[1].split("# tiles that the mask")
    read = spec.operands[3 + (name == "sinks_min")].name
    assert "mask" not in full and read not in full
    assert "n_mask" in cut and read in cut


@outside
@pytest.mark.parametrize("target", [("cuda", 80), ("cuda", 90), ("cuda", 100), ("hip", "gfx942")], ids=str)
def test_kernels_along_maps_fit(target: tuple[str, int | str]) -> None:
    case = Case("documents", where(apply("and", CAUSAL, BY_NAME["segments"].score.args[0]), SCALED, const(MIN)), captured=BY_NAME["segments"].captured)
    device = DEVICES[target[0], int(str(target[1]).removeprefix("gfx")[:2]) if target[0] == "hip" else int(target[1])]
    for depth in (64, 128):
        operands, _ = case.inputs(Shape((1, 1), 1, 1, depth, depth), torch.bfloat16, 0)
        spec, operands = with_map(case.spec("bfloat16"), operands, (1, 1, 1, 1, depth, depth))
        shapes = [(4, 16, 4096, depth)] * 3 + [(4, 4096)] + [(4, 64, 66)] * 2
        meta = [torch.empty(s, dtype=t.dtype, device="meta") for s, t in zip(shapes, operands, strict=True)]
        sizes = (4, 16, 4096, 4096, depth, depth)
        found = [offline.compile_only(spec, sizes, meta, target)]
        found += [offline.compile_backward(spec, sizes, meta, target, job) for job in (Job("keys", key=True, value=True), Job("queries", query=True))]
        for one in found:
            assert one.shared <= device.shared and one.plan.block_m <= 64 and one.plan.block_n <= 64
            assert not one.spills or target[0] != "cuda" or one.spills <= 72, (depth, str(one.plan), one.spills)        # with Triton 3.6


@outside
@pytest.mark.parametrize("target", [("cuda", 80), ("cuda", 90), ("cuda", 100), ("hip", "gfx942")], ids=str)
def test_kernels_that_make_maps_compile(target: tuple[str, int | str]) -> None:
    """Both kernels, with 32-bit and 64-bit offsets, without a device: hardly any shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile as build

    kinds = {"bool": "*i1", "int32": "*i32", "float32": "*fp32"}
    lanes = 64 if target[0] == "hip" else 32
    for case, wide in ((BY_NAME["segments"], False), (SPARSE, True), (ONES, False)):
        found = tilemap.mapped(case.spec())
        assert found is not None
        kernel, module = tile_map.emit(found.mask, wide), tile_map._module(found.mask, wide)
        types = {p.name: kinds[found.mask.operands[p.operand].dtype] if isinstance(p.operand, int) else "*i8" for p in kernel.pointers}
        types |= {a.name: "i32" for a in kernel.integers} | {n: "constexpr" for n, _ in kernel.constants}
        lists = {"bits_ptr": "*i8", "rows_ptr": "*i32", "columns_ptr": "*i32", "CHUNK": "constexpr"}
        for function, signature, constants in ((getattr(module, kernel.name), types, dict(kernel.constants)), (module.list_tiles, lists, {"CHUNK": 128})):
            whole = {n: signature.get(n, "i32") for n in function.arg_names}
            made = build(ASTSource(fn=function, signature=whole, constexprs=constants), target=GPUTarget(*target, lanes), options={"num_warps": 4})
            assert made.metadata.shared <= 1024
