"""Pictures of tiles: what they show, and what they say when something is missing."""
from __future__ import annotations

import doctest

import pytest
import torch

import attnfuse
from attnfuse import picture
from tests.specs import BY_NAME


def test_the_example() -> None:
    assert doctest.testmod(picture).failed == 0


def test_documents() -> None:
    ids = torch.tensor([0] * 64 + [1] * 128 + [2] * 8)[None]
    shown = attnfuse.draw_tiles(BY_NAME["segments"].spec(), {"i": 200, "j": 200}, {"segments": ids.int()})
    assert shown == "█···\n·██·\n·██·\n···█\nqueries down, keys across, 64 x 64 a tile: 6 full, 0 cut, 10 empty"


def test_a_scalar_that_is_known_at_run_time() -> None:
    prefix = BY_NAME["prefix"].spec()
    shown = attnfuse.draw_tiles(prefix, {"i": 4, "j": 4, "prefix": 1}, tile=1)
    assert shown.splitlines()[:4] == ["██··", "██··", "███·", "████"]


def test_long_ones_have_larger_tiles_and_none_has_only_full_ones() -> None:
    shown = attnfuse.draw_tiles(BY_NAME["causal_inf"].spec(), {"i": 16384, "j": 16384}).splitlines()
    assert len(shown) == 65 and len(shown[0]) == 64 and "256 x 256" in shown[-1]
    assert attnfuse.draw_tiles(BY_NAME["plain"].spec(), {"i": 64, "j": 130}).splitlines()[0] == "███"


@pytest.mark.parametrize("name, sizes, operands, said", [
    ("segments", {"i": 64, "j": 64}, {}, "reads 'segments', a tensor of 2 dimensions"),
    ("segments", {"i": 64, "j": 64}, {"segments": torch.zeros(64, dtype=torch.int32)}, "has 1 dimensions"),
    ("segments", {"i": 64, "j": 64}, {"segments": torch.zeros(1, 9, dtype=torch.int32)}, "do not fit 64 queries and 64 keys"),
    ("prefix", {"i": 64, "j": 64}, {}, "depends on prefix: give its value"),
    ("plain", {"i": 64}, {}, "needs the number of keys"),
    ("plain", {"i": 0, "j": 64}, {}, "needs the number of queries"),
])
def test_what_is_missing_is_named(name: str, sizes: dict[str, int], operands: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attnfuse.draw_tiles(BY_NAME[name].spec(), sizes, operands)
    with pytest.raises(ValueError, match="at least one"):
        attnfuse.draw_tiles(BY_NAME["plain"].spec(), {"i": 4, "j": 4}, tile=0)
