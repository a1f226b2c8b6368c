"""The public surface: optimize, explain, rewrite, last_report, the backend by name, settings, the command line."""
from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import attnfuse
from attnfuse import compiled, dynamo
from attnfuse.report import Report

from tests.conftest import Attention, Passes, Stack

ROOT = Path(__file__).parent.parent


class Kept(list[GraphModule]):
    """An inner compiler that keeps the graphs it is given and runs them as they are."""

    __hash__ = object.__hash__

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.append(gm)
        return gm.forward


def fused_calls(graphs: list[GraphModule]) -> int:
    """How many calls of our op the graphs hold."""
    return sum("attnfuse" in str(n.target) for gm in graphs for n in gm.graph.nodes)


# ---- optimize

def test_optimize_returns_the_same_model_with_the_same_keys(stack: Stack, x: Tensor) -> None:
    keys, expected, kept = list(stack.state_dict()), stack(x), Kept()
    assert attnfuse.optimize(stack, inner=kept) is stack
    torch.testing.assert_close(stack(x), expected)
    assert list(stack.state_dict()) == keys and type(stack) is Stack
    assert fused_calls(kept) == 2


def test_optimize_twice_keeps_the_compiled_code(stack: Stack, x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    attnfuse.optimize(stack, inner=kept)(x)
    attnfuse.optimize(stack, inner=kept)(x)
    assert len(kept) == 1
    attnfuse.optimize(stack, inner=kept, settings={"strict": True})(x)
    assert len(kept) == 2, "other settings compile anew"


def test_equal_models_share_compiled_code(x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    models = [attnfuse.optimize(Stack().eval(), inner=kept) for _ in range(12)]
    for model in models:
        assert attnfuse.last_report(model(x) is None or model) is not None
    assert len(kept) <= 2, "twelve models of one class must not use up Dynamo's limit of recompilations"


def test_training_and_evaluation_take_turns(x: Tensor, counted: list[GraphModule]) -> None:
    model, kept = Stack(), Kept()
    plain = copy.deepcopy(model)
    attnfuse.optimize(model, inner=kept)
    for train in (True, False, True, False):
        model.train(train), plain.train(train)
        torch.manual_seed(1)
        ours = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, plain(x))
    assert len(kept) == 2


def test_to_and_load_state_dict_keep_working(stack: Stack, x: Tensor) -> None:
    attnfuse.optimize(stack, inner="eager")(x)
    stack.to(torch.float64)
    plain = Stack().double().eval()
    plain.load_state_dict(stack.state_dict())
    torch.testing.assert_close(stack(x.double()), plain(x.double()))
    other = Stack().double().eval()
    stack.load_state_dict(other.state_dict())
    torch.testing.assert_close(stack(x.double()), other(x.double()))


def test_gradients_flow_as_without(x: Tensor) -> None:
    model = Stack().eval()
    plain = copy.deepcopy(model)
    attnfuse.optimize(model, inner="eager")(x).square().sum().backward()
    plain(x).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=name, rtol=1e-4, atol=1e-5)


def test_hooks_are_called(stack: Stack, x: Tensor, counted: list[GraphModule]) -> None:
    stack.register_forward_hook(lambda module, args, output: output + 1)
    expected = stack(x)
    torch.testing.assert_close(attnfuse.optimize(stack, inner=Kept())(x), expected)


def test_a_deep_copy_is_optimised_and_independent(stack: Stack, x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    attnfuse.optimize(stack, inner=kept)
    twin = copy.deepcopy(stack)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(twin(x), stack(x))
    assert kept and twin._compiled_call_impl is not None
    assert float(twin.calls) == float(stack.calls) == 1
    assert attnfuse.last_report(twin).sites


def test_a_deep_copy_of_a_larger_whole_is_optimised(stack: Stack, x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    attnfuse.optimize(stack, inner=kept)
    holder = copy.deepcopy({"model": nn.Sequential(stack)})
    holder["model"][0](x)
    assert kept


def test_shallow_copies_and_pickles_run_as_written(stack: Stack, x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    attnfuse.optimize(stack, inner=kept)
    stored = pickle.loads(pickle.dumps(stack))
    buffer = io.BytesIO()
    torch.save(stack, buffer)
    buffer.seek(0)
    for other in (stored, copy.copy(stack), torch.load(buffer, weights_only=False)):
        other(x)
        with pytest.raises(ValueError, match="not optimised"):
            attnfuse.last_report(other)
    assert not kept


def test_a_direct_forward_runs_as_written(stack: Stack, x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    attnfuse.optimize(stack, inner=kept).forward(x)
    assert not kept


def test_a_function_becomes_a_compiled_function(counted: list[GraphModule]) -> None:
    kept = Kept()
    f = attnfuse.optimize(lambda a: a.softmax(-1) * 2, inner=kept)
    torch.testing.assert_close(f(torch.ones(2, 4)), torch.full((2, 4), 0.5))
    assert len(kept) == 1


@pytest.mark.parametrize("arguments, message", [
    ({"inner": "inductr"}, "expected 'inductor', 'eager'"),
    ({"inner": 3}, "not int"),
    ({"inner": "eager", "mode": "max-autotune"}, "mode and options are inductor's"),
    ({"mode": "fastest"}, "unknown mode 'fastest'; the modes are"),
    ({"settings": {"stict": True}}, "unknown setting 'stict'; the settings are strict"),
    ({"settings": {"fully_masked_rows": "nan"}}, "expected one of 'as_written', 'zero'"),
    ({"settings": 3}, "settings must be"),
])
def test_bad_arguments_are_named(stack: Stack, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attnfuse.optimize(stack, **arguments)


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ValueError, match="not int"):
        attnfuse.optimize(3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generate_of_hugging_face(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, **common) if family == "gpt2" else \
        transformers.LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2,
                                 num_key_value_heads=1, **common)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 64, (1, 5))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    attnfuse.optimize(model, inner="eager")
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert attnfuse.last_report(model).sites


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Attention(), Attention()),
                                  lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)], ids=["sequential", "encoder"])
def test_modules_of_torch_are_captured_whole(make: Callable[[], nn.Module], x: Tensor, counted: list[GraphModule]) -> None:
    model, kept = make(), Kept()
    model.train(False)
    expected = model(x)
    torch.testing.assert_close(copy.deepcopy(attnfuse.optimize(model, inner=kept))(x), expected)
    assert len(kept) == 1, "Dynamo skips frames of torch.nn: nn.Module.compile would capture nothing"
    assert attnfuse.explain(model, x).graphs == 1


# ---- explain

def test_explain_leaves_no_trace(x: Tensor) -> None:
    model = Stack().train()
    state = torch.random.get_rng_state()
    report = attnfuse.explain(model, x)
    assert len(report.sites) == 2 and report.rewritten == 2
    assert float(model.calls) == 0 and model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model._compiled_call_impl is None


def test_explain_sees_every_graph(x: Tensor, counted: list[GraphModule]) -> None:
    model = Stack(break_graph=True).eval()
    report = attnfuse.explain(model, x)
    assert report.graphs >= 2 and {s.graph for s in report.sites} >= {0, 1} and len(report.sites) == 2


def test_explain_without_running_stops_at_the_first_graph(x: Tensor, counted: list[GraphModule]) -> None:
    ran: list[int] = []

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack(break_graph=True).eval()
            self.inner.layers[1].register_forward_pre_hook(lambda *a: ran.append(1))

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except Exception:
                return x

    report = attnfuse.explain(Noisy(), x, run=False)
    assert report.graphs == 1 and len(report.sites) == 1 and not ran


def test_explain_of_an_optimised_model_spares_its_code(x: Tensor, counted: list[GraphModule]) -> None:
    kept = Kept()
    model = attnfuse.optimize(Stack(break_graph=True).eval(), inner=kept)
    model(x)
    before, compiled = len(kept), model._compiled_call_impl
    for _ in range(12):
        assert len(attnfuse.explain(model, x).sites) == 2
    model(x)
    assert len(kept) == before and model._compiled_call_impl is compiled


def test_explain_sees_behind_breaks_what_is_compiled_by_itself(x: Tensor, counted: list[GraphModule]) -> None:
    model = Stack(break_graph=True).eval()
    attnfuse.optimize(model.layers[1], inner=Kept())
    assert len(attnfuse.explain(model, x).sites) == 2


def test_explain_does_not_touch_a_cache_it_is_given(counted: list[GraphModule]) -> None:
    class Appends(nn.Module):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            return torch.cat(cache).softmax(-1)

    cache = [torch.ones(1, 4)]
    attnfuse.explain(Appends(), torch.ones(1, 4), cache)
    assert len(cache) == 1


def test_explain_raises_what_the_model_raises(x: Tensor) -> None:
    with pytest.raises(Exception, match="(?s)(size|shape)"):
        attnfuse.explain(Attention(), x[..., :3])


def test_no_attention_is_no_candidates(x: Tensor) -> None:
    assert "no candidates" in str(attnfuse.explain(nn.Linear(16, 16), x))


def test_what_is_no_model_and_no_graph_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="an nn.Module or a function, not int"):
        attnfuse.explain(3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"a GraphModule, such as .*\.module\(\)`, not Attention"):
        attnfuse.rewrite(Attention(), ())  # type: ignore[arg-type]


def test_explain_says_when_nothing_was_captured() -> None:
    report = attnfuse.explain(lambda: 3)
    assert report.graphs == 0 and "no graph was captured" in str(report)


# ---- rewrite

def test_rewrite_of_an_exported_program(x: Tensor) -> None:
    model = Attention().eval()
    gm = torch.export.export(model, (x,)).module()
    before = str(gm.graph)
    new, report = attnfuse.rewrite(gm, (x,))
    assert str(gm.graph) == before
    assert report.rewritten == 1 and fused_calls([new]) == 1
    torch.testing.assert_close(new(x), model(x))


def test_rewrite_of_a_symbolic_trace() -> None:
    gm = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    new, report = attnfuse.rewrite(gm, (q, k, v))
    assert report.rewritten == 1, str(report)
    torch.testing.assert_close(new(q, k, v), gm(q, k, v))


# ---- failures

def broken(gm: GraphModule, settings: attnfuse.Settings) -> tuple[GraphModule, Report]:
    raise RuntimeError("a pass is broken")


def test_passes_that_raise_leave_the_model_as_it_is(stack: Stack, x: Tensor, set_passes: Callable[[Passes], None]) -> None:
    set_passes(broken)
    expected = stack(x)
    attnfuse.optimize(stack, inner="eager")
    with pytest.warns(dynamo.PassWarning, match="a pass is broken"):
        torch.testing.assert_close(stack(x), expected)
    assert "a pass is broken" in str(attnfuse.last_report(stack))


def test_strict_raises(stack: Stack, x: Tensor, set_passes: Callable[[Passes], None]) -> None:
    set_passes(broken)
    with pytest.raises(Exception, match="a pass is broken"):
        attnfuse.optimize(stack, inner="eager", settings={"strict": True})(x)
    with attnfuse.settings(strict=True), pytest.raises(Exception, match="a pass is broken"):
        attnfuse.explain(Stack(), x)


# ---- torch.compile by name

@pytest.mark.parametrize("folder", [ROOT, ROOT.parent], ids=["in the source tree", "elsewhere"])
def test_backend_by_name_without_importing_attnfuse(folder: Path, tmp_path: Path) -> None:
    if folder != ROOT:
        folder = tmp_path
    code = ("import sys, torch; f = torch.compile(lambda a: a.softmax(-1), backend='attnfuse')\n"
            "x = torch.randn(2, 3); torch.testing.assert_close(f(x), x.softmax(-1)); assert 'attnfuse' in sys.modules; print('ran')")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "ran", done.stderr


def test_backend_by_name_where_nothing_is_installed(tmp_path: Path) -> None:
    code = ("import importlib.metadata as m; m.entry_points = lambda **k: m.EntryPoints()\n"
            "import attnfuse, torch; assert 'attnfuse' in torch._dynamo.list_backends(); print('known')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={**__import__("os").environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "known", done.stderr


def test_options_of_the_backend(stack: Stack, x: Tensor, set_passes: Callable[[Passes], None]) -> None:
    seen: list[attnfuse.Settings] = []
    set_passes(lambda gm, settings: (gm, seen.append(settings) or Report()))
    options = {"fully_masked_rows": "zero", "epilogue_fusion": False}
    torch.testing.assert_close(torch.compile(stack, backend="attnfuse", options=options)(x), stack(x))
    assert seen[0].fully_masked_rows == "zero"
    assert attnfuse.last_report() is not None
    with pytest.raises(Exception, match="unknown option 'epilog'; attnfuse has strict"):
        torch.compile(Stack(), backend="attnfuse", options={"epilog": False})(x)


def test_mode_reaches_inductor(stack: Stack, x: Tensor, counted: list[GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compiled, "inductor", lambda *a: seen.append(a) or (lambda gm, inputs: gm.forward))
    torch.compile(stack, backend="attnfuse", mode="max-autotune-no-cudagraphs")(x)
    attnfuse.optimize(Stack(), mode="reduce-overhead", dynamic=True)(x)
    assert seen == [("max-autotune-no-cudagraphs", {}, None), ("reduce-overhead", {}, True)]


# ---- settings, reports on disk, the command line

def test_settings_nest_and_end() -> None:
    from attnfuse.settings import current
    with attnfuse.settings(strict=True), attnfuse.settings(executor="torch") as inner:
        assert inner == current() == attnfuse.Settings(strict=True, executor="torch")
    assert current() == attnfuse.Settings()
    with pytest.raises(ValueError, match="unknown setting"), attnfuse.settings(strictly=True):
        pass


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuse.settings import current
    monkeypatch.setenv("ATTNFUSE_STRICT", "yes")
    monkeypatch.setenv("ATTNFUSE_DUMP", "")
    assert current() == attnfuse.Settings(strict=True)
    with attnfuse.settings(strict=False):
        assert not current().strict
    monkeypatch.setenv("ATTNFUSE_FULLY_MASKED_ROWS", "nil")
    with pytest.raises(ValueError, match="ATTNFUSE_FULLY_MASKED_ROWS='nil'.*'as_written', 'zero'"):
        current()


def test_dump_writes_a_folder_a_graph(stack: Stack, x: Tensor, counted: list[GraphModule], tmp_path: Path) -> None:
    attnfuse.explain(stack, x, settings={"dump": tmp_path / "d"})
    attnfuse.explain(stack, x, settings={"dump": str(tmp_path / "d")})
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["graph_000", "graph_001"]
    place = tmp_path / "d" / "graph_000"
    assert sorted(p.name for p in place.iterdir()) == ["00_captured.txt", "01_find.txt", "report.json"]
    assert json.loads((place / "report.json").read_text())["rewritten"] == 2


def test_report_reads_well(x: Tensor) -> None:
    model = nn.Sequential(*(Attention() for _ in range(3)), nn.Softmax(-1)).eval()
    report = attnfuse.explain(model, x)
    text = str(report)
    assert text.startswith("attnfuse: 3 of 4 attention sites rewritten; 1 graph, ")
    assert text.count("Σ_j") == 1, "equal layers share one row and one equation"
    assert "0…2" in text and "conftest.py:" in text
    refused = next(s for s in report.sites if not s.rewritten)
    assert refused.reason.reason.name.lower() in text and refused.reason.reason.value in text
    json.dumps(report.to_dict())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attnfuse import cli
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"attnfuse {attnfuse.__version__}\n"
    (tmp_path / "m.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    assert cli.main(["explain", f"{tmp_path}/m.py:build"]) == 0
    assert "no candidates" in capsys.readouterr().out
    assert cli.main(["explain", f"{tmp_path}/m.py:nothing"]) == 2
    assert cli.main(["explain", "nowhere"]) == 2
    for wrong in ("number = 3", "def number(): return 3", "import torch\ndef number(): return torch.nn.Linear(2, 2), torch.zeros(1, 2)"):
        (tmp_path / "wrong.py").write_text(wrong)
        capsys.readouterr()
        assert cli.main(["explain", f"{tmp_path}/wrong.py:number"]) == 2
        assert "a function without arguments that returns (model, inputs)" in capsys.readouterr().err


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    from attnfuse import cli
    assert cli.main(["demo", "--quick", "--length", "32", "64"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 attention sites rewritten" in out and "left out" not in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_demo_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuse import demo
    monkeypatch.setitem(sys.modules, "transformers", None)
    lines: list[str] = []
    demo.main([32], quick=True, say=lines.append)
    assert "plain PyTorch" in lines[0] and any("2 of 2" in line for line in lines)


def test_demo_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuse import demo
    lines: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("InvalidCxxCompiler: none")))
    assert demo.usable_inner(lines.append) == "eager" and "no C++ compiler" in lines[0]


def test_every_public_name_is_there() -> None:
    assert set(attnfuse.__all__) == {"Settings", "settings", "Traffic", "traffic", "roofline", "__version__", *attnfuse._LAZY} <= set(dir(attnfuse))
    assert all(getattr(attnfuse, name) is not None for name in attnfuse.__all__)
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        attnfuse.optimise  # noqa: B018
