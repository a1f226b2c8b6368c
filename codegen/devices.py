"""GPUs by name, with the rates that their makers publish, for planning and predicting without one.

    >>> device("h100").processors
    132
    >>> device("sm_90 with 99 KB").shared // 1024            # a device that the list does not hold, or half of one
    99

Sources: the data sheets and architecture papers of A100, H100, H200, HGX B200, GeForce RTX 3090, 4090 and 5090 (NVIDIA) and of MI300X
(AMD). `peak` is without sparsity, for float16 or bfloat16 with float32 sums; of MI300X `cache` is the Infinity Cache.
"""
from __future__ import annotations

import re
from dataclasses import replace

from .tiles import DEVICES, KIB, Device

MIB = 1024 * KIB


def _card(name: str, backend: str, arch: int, processors: int, peak: float, bandwidth: float, cache: float) -> Device:
    """A card of an architecture in the table of limits; tera-FLOP/s, tera-bytes/s, MiB."""
    return replace(DEVICES[backend, arch], name=name, processors=processors, peak=peak * 1e12, bandwidth=bandwidth * 1e12, cache=int(cache * MIB))


CARDS: dict[str, Device] = {
    "a100": _card("A100", "cuda", 80, 108, 312, 2.039, 40),
    "rtx3090": _card("RTX 3090", "cuda", 86, 82, 71, 0.936, 6),
    "rtx4090": _card("RTX 4090", "cuda", 89, 128, 165.2, 1.008, 72),
    "h100": _card("H100 SXM", "cuda", 90, 132, 989, 3.35, 50),
    "h200": _card("H200", "cuda", 90, 132, 989, 4.8, 50),
    "b200": _card("B200", "cuda", 100, 148, 2250, 8.0, 126),
    "rtx5090": _card("RTX 5090", "cuda", 120, 170, 209.5, 1.792, 96),
    "mi300x": _card("MI300X", "hip", 94, 304, 1307.4, 5.3, 256),
}
"""By the name that a user types. A100 is the one with 80 GB, H100 the SXM board."""

_ALIASES = {"rtx30": "rtx3090", "rtx40": "rtx4090", "rtx50": "rtx5090", "a10080gb": "a100", "h100sxm": "h100", "mi300": "mi300x"}
_ARCHITECTURE = re.compile(r"(?:(?:sm|cc)[_ ]?(\d+)(?:\.(\d))?[a-z]?|gfx(\d\d)[0-9a-f]+)(?:\s+(?:with|and|,)?\s*(\d+)\s*(?:kb|kib))?")


def known_names() -> str:
    """What an error says that there is."""
    architectures = sorted({f"sm_{arch}" for backend, arch in DEVICES if backend == "cuda"}, key=lambda x: int(x[3:]))
    return f"the known ones are {', '.join(CARDS)}; or an architecture, {', '.join(architectures)}, gfx942, as in 'sm_90 with 227 KB'"


def device(text: str) -> Device:
    """The device that a text means: a card (``"H100"``, ``"RTX 4090"``), or an architecture, with or without the shared memory of a block.

    Of an architecture the limits are known and the rates are not, so no time can be predicted for it.

    Raises:
        ValueError: neither; the message lists what there is.
    """
    plain = text.strip().lower()
    name = re.sub(r"[^a-z0-9]", "", plain).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    card = CARDS.get(_ALIASES.get(name, name))
    if card is not None:
        return card
    found = _ARCHITECTURE.fullmatch(plain)
    if found is None:
        raise ValueError(f"unknown device {text!r}: {known_names()}")
    major, minor, amd, shared = found.groups()
    entry = DEVICES.get(("hip", int(amd)) if amd else ("cuda", int(major + (minor or ""))))
    if entry is None:
        raise ValueError(f"unknown architecture {text!r}: {known_names()}")
    entry = replace(entry, name=plain.split()[0])
    if shared is None:
        return entry
    if not 16 <= int(shared) <= 1024:
        raise ValueError(f"{text!r}: a block has between 16 and 1024 KB of shared memory, not {shared}")
    return replace(entry, name=plain, shared=int(shared) * KIB)


def rates(device: Device) -> Device:
    """The device with the rates of the card that its name says it is; as it is where no card fits (``"NVIDIA H100 80GB HBM3"`` does)."""
    if device.peak:
        return device
    name = re.sub(r"[^a-z0-9]", "", device.name.lower())
    card = next((c for key, c in CARDS.items() if key in name), None)
    if card is None or "pcie" in name or "nvl" in name:
        return device
    return replace(device, peak=card.peak, bandwidth=card.bandwidth, cache=card.cache)
