"""The training text of the demo: English sentences from a small grammar, the same on every machine.

Owns the grammar and how batches are cut from the text.  Where reading goes on is not kept here but in
a plain dict of the caller's, so that it can stand in the checkpoint: :meth:`Text.batch` moves it.
"""

from __future__ import annotations

import random

import torch

_GRAMMAR = {
    "text": ["{clause}. ", "{clause}, {link} {clause}. ", "when {clause}, {clause}. ", "{when}, {clause}. "],
    "clause": ["{thing} {acts} {thing}", "{thing} {rests} {where}", "{thing} {acts} {thing} {where}"],
    "thing": ["the {noun}", "a {quality} {noun}", "the {quality} {noun}", "every {noun}", "the {noun} of {name}"],
    "where": ["near the {noun}", "behind {thing}", "in the {quality} {place}", "far from {place_of}"],
    "place_of": ["the {place}", "the {place} of {name}"],
    "link": ["and", "but", "so", "because", "although", "until", "while"],
    "when": ["in the morning", "after the storm", "before dawn", "late in the year", "once a week", "by candlelight"],
    "acts": ["carries", "follows", "mends", "paints", "remembers", "finds", "watches", "measures", "hides", "weighs"],
    "rests": ["sleeps", "waits", "sings", "stands still", "turns slowly", "keeps quiet", "grows"],
    "noun": ["boat", "miller", "heron", "clock", "lantern", "gardener", "map", "fox", "letter", "bridge", "baker"],
    "place": ["harbour", "orchard", "valley", "library", "market", "mill", "old town", "observatory"],
    "quality": ["small", "quiet", "copper", "patient", "crooked", "bright", "forgotten", "careful", "heavy"],
    "name": ["Ada", "Emil", "Rosa", "Viktor", "Mina", "Oskar"],
}


def write_text(length: int, seed: int) -> bytes:
    """At least ``length`` bytes of sentences; draws from a generator of its own."""
    dice = random.Random(seed)
    parts: list[str] = []
    written = 0
    while written < length:
        sentence = _expand("{text}", dice)
        parts.append(sentence[0].upper() + sentence[1:])
        written += len(parts[-1])
    return "".join(parts).encode()


def _expand(pattern: str, dice: random.Random) -> str:
    """Replace ``{names}`` by one of their patterns, from the left, until only words are left."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return before
    name, _, after = rest.partition("}")
    return before + _expand(dice.choice(_GRAMMAR[name]), dice) + _expand(after, dice)


class Text:
    """Batches: each row reads a part of its own, all from the same position on."""

    def __init__(self, rows: int, context: int, length: int = 400_000, seed: int = 7) -> None:
        text = torch.frombuffer(bytearray(write_text(length, seed)), dtype=torch.uint8)
        part = len(text) // rows
        self._parts = text[: part * rows].view(rows, part).long()
        self._context = context

    def batch(self, data: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets at ``data["position"]``, which moves on, and begins again at the end."""
        at = data["position"]
        data["position"] = at + self._context
        if data["position"] + self._context + 1 > self._parts.shape[1]:
            data["position"] = 0
            data["rounds"] += 1
        window = self._parts[:, at : at + self._context + 1]
        return window[:, :-1], window[:, 1:]
