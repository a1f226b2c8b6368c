"""Time in our passes against inductor's own compile time, for a Llama of 32 layers (grouped queries, left padding), on any machine.

    python -m bench.pass_time [layers]

Both compile the same model from cold caches in one process; writes results/pass_time.csv. The goal is at most 5 %.
"""
from __future__ import annotations

import os
import sys
import tempfile
import time

import torch

import attnfuse
from bench.common import header, save


def main() -> None:
    """Measure and print one row."""
    from transformers import LlamaConfig, LlamaModel

    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    config = LlamaConfig(hidden_size=128, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, intermediate_size=256,
                         vocab_size=512, attn_implementation="eager", use_cache=False)
    tokens = torch.randint(3, 512, (2, 128))
    padding = torch.ones_like(tokens)
    padding[1, :40] = 0
    with tempfile.TemporaryDirectory() as cold, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold
        os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
        plain = torch.compile(LlamaModel(config).eval(), backend="inductor")
        start = time.perf_counter()
        plain(tokens, attention_mask=padding)
        inductor = time.perf_counter() - start
        torch._dynamo.reset()
        model = attnfuse.optimize(LlamaModel(config).eval())
        start = time.perf_counter()
        model(tokens, attention_mask=padding)
        whole = time.perf_counter() - start
    report = attnfuse.last_report(model)
    assert report is not None
    row = {"layers": layers, "sites": len(report.sites), "rewritten": report.rewritten, "passes_s": round(report.seconds, 3),
           "inductor_s": round(inductor, 2), "with_attnfuse_s": round(whole, 2), "passes/inductor": round(report.seconds / inductor, 4)}
    print(header())
    print(row)
    save("pass_time", [row])


if __name__ == "__main__":
    main()
