"""The catalogue of reasons for which a chain is left as it was written."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a candidate was not rewritten; the value is the sentence that users read."""

    NO_VALUE_PRODUCT = "no product with values follows the softmax"
    HEADS_MIXED = "a layer mixes the weights of several heads before they meet the values"
    NO_SCORE_PRODUCT = "the scores are not a product of queries and keys"
    SOFTMAX_AXIS = "the softmax does not run over the axis that the value product sums over"
    AXIS_ROLES = "the roles of the axes (query, key, depth) could not be proven"
    WEIGHTS_USED = "the attention weights are used elsewhere, and no kernel can give them there"
    SCORES_USED = "the scores are used elsewhere"
    INPLACE = "an in-place operation may be seen from outside the chain"
    MUTATED_OPERAND = "an operand is changed in place between its use and the value product"
    UNKNOWN_OP = "an operation in the chain has no lifting rule"
    WEIGHT_PROGRAM = "what happens to the weights after the softmax is not linear in them"
    ROW_DEPENDENT = "a score depends on other scores"
    NOT_EXPRESSIBLE = "a tensor that the chain reads cannot be handed to the kernel"
    DTYPE = "queries, keys and values must be real floating-point tensors"
    DEVICE = "the operands are not all on one device of a supported kind"
    VMAP = "the chain runs inside a transform of torch.func (vmap, grad, jvp), for which the kernel has no rule"
    DYNAMIC = "a length became a constant or gained a guard while the chain was analysed"
    METADATA = "the rewritten value would differ in shape, dtype or layout"
    FAILED = "the analysis failed"


@dataclass(frozen=True)
class Refusal:
    """A reason with its place: the graph node's name, the stage that refused, and what exactly was seen."""

    reason: Reason
    node: str = ""
    stage: str = ""
    detail: str = ""

    def __str__(self) -> str:
        place = f" [{self.stage}, {self.node}]" if self.node else f" [{self.stage}]" if self.stage else ""
        return f"{self.reason.name.lower()}: {self.reason.value}{f' ({self.detail})' if self.detail else ''}{place}"


class Refused(Exception):
    """Carries a `Refusal` up to the driver; never leaves the pipeline."""

    def __init__(self, reason: Reason, node: str = "", stage: str = "", detail: str = "") -> None:
        self.refusal = Refusal(reason, node, stage, detail)
        super().__init__(str(self.refusal))
