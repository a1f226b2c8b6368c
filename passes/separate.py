"""Results that leave the graph are separate tensors, as they were, though two calls compute the same.

Before:  a = attnfuse.attention(x, spec)[0];  b = attnfuse.attention(x, spec)[0];  return a, b
After:   the second call names its spec with a blank behind it, which means the same

AOTAutograd and inductor merge equal calls but for those whose results are returned, and do not see that of a call with several results.
Merged, `a` and `b` would be one tensor: what is done to one in place happens to both, and if one was made under no_grad, neither has a
gradient. Calls whose results stay inside may be merged.
"""
from __future__ import annotations

from collections import Counter

import torch
from torch.fx import GraphModule, Node

from . import nodes


def separate(gm: GraphModule, seen: Counter[str]) -> int:
    """Make every attention whose result leaves its graph unequal to those that are counted in `seen`, by the text of their specs, and count
    it there; returns how many needed it. One that has other operands is as well off."""
    needed = 0
    for call in gm.graph.nodes:
        if call.op == "call_function" and call.target is torch.ops.attnfuse.attention.default and _leaves(call):
            *others, text = call.args
            spec = str(text)
            call.args = (*others, spec + " " * seen[spec])
            needed += seen[spec] > 0
            seen[spec] += 1
    return needed


def _leaves(node: Node) -> bool:
    """Whether the graph returns a node, or something that may be a view of it: whatever no large operation has made anew. Among the small
    ones are views that are told neither by name nor by memory, such as a dropout that drops nothing."""
    seen, queue = {node}, [node]
    for one in queue:
        for user in one.users:
            if user.op == "output":
                return True
            if nodes.name(user) not in nodes.HEAVY | nodes.CONTRACTION and user not in seen:
                seen.add(user)
                queue.append(user)
    return False
