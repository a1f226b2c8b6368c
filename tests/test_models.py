"""Unchanged Hugging Face models with tiny random weights: rewritten in full, right in both padding styles, two lengths through one compilation."""
from __future__ import annotations

import copy
import warnings

import pytest
import torch

import attnfuse

transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
          "max_position_embeddings": 128, "head_dim": 16, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "d_model": 64, "d_ff": 128, "d_kv": 16,
          "num_layers": 2, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "rotary_dim": 8, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
          "use_cache": False, "embedding_size": 64, "word_embed_proj_dim": 64, "type_vocab_size": 2, "alibi": False}
QUICK = ("gpt2", "llama", "bert", "bloom")
MODELS = (*QUICK, "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "opt", "gpt_neox", "gptj", "falcon", "olmo2", "granite", "roberta", "electra",
          "albert", "camembert", "cohere", "stablelm", "starcoder2")


def tiny(kind: str) -> torch.nn.Module:
    """The model of a type, two layers of width 64, attention written out, nothing dropped."""
    cls = transformers.CONFIG_MAPPING[kind]
    known = set(vars(cls())) | set(getattr(cls, "attribute_map", {}) or {})
    config = cls(**{k: v for k, v in COMMON.items() if k in known})
    return transformers.AutoModel.from_config(config, attn_implementation="eager").eval()


def inputs(length: int, padding: str) -> dict[str, torch.Tensor]:
    """Two sequences of random tokens, the second padded by a third on one side."""
    out = {"input_ids": torch.randint(3, 128, (2, length))}
    if padding != "none":
        keep = torch.ones(2, length, dtype=torch.long)
        keep[1, slice(None, length // 3) if padding == "left" else slice(length - length // 3, None)] = 0
        out["attention_mask"] = keep
    return out


def check(kind: str, padding: str, lengths: tuple[int, ...], dynamic: bool | None) -> None:
    seed = int(torch.randint(0, 2 ** 31, (1,)))
    print("seed", seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny(kind)
    compiled: list[torch.fx.GraphModule] = []
    fused = attnfuse.optimize(copy.deepcopy(model), inner=lambda gm, _: compiled.append(gm) or gm.forward, dynamic=dynamic, settings={"strict": True})
    with torch.no_grad():
        for length in lengths:
            given = inputs(length, padding)
            # Not against model.double(): the fills of its masks would be other numbers.
            torch.testing.assert_close(fused(**given)[0], model(**given)[0], atol=2e-5, rtol=2e-5)
    ops = sum("attnfuse" in str(n.target) for gm in compiled for n in gm.graph.nodes)
    report = attnfuse.last_report(fused)
    assert report is not None and ops and all(s.rewritten for s in report.sites if s.reason is None or s.reason.reason.name != "NO_VALUE_PRODUCT"), str(report)
    assert len(compiled) == 1


@pytest.mark.parametrize("padding", ("none", "left", "right"))
@pytest.mark.parametrize("kind", QUICK)
def test_values(kind: str, padding: str) -> None:
    check(kind, padding, (17,), None)


@pytest.mark.parametrize("kind", QUICK)
def test_two_lengths_through_one_compilation(kind: str) -> None:
    check(kind, "left", (17, 33), True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_two_lengths_through_one_compilation_everywhere(kind: str) -> None:
    check(kind, "right", (17, 33, 64), True)
