"""The options of a save and of a load: the one way in for every setting of this package."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("torch_dist",)
"""Names that `SaveOptions.backend` takes."""

DIRECTIONS = ("both", "rowwise")
"""Names that `SaveOptions.directions` takes."""


def _one_of(field: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{field}={value!r}: known values are {', '.join(map(repr, known))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How quantized parameters are saved.

    Raises:
        ValueError: a value is not one of the known ones.
    """

    backend: str = "torch_dist"
    """What writes the bytes: "torch_dist" (Megatron's own format)."""
    directions: str = "both"
    """"both" stores what a bit-exact restore needs; "rowwise" leaves out a columnwise direction that is an independent
    quantization (it is rebuilt, and reported, on load). Without effect where columnwise is derivable from rowwise."""

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("directions", self.directions, DIRECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How quantized parameters are loaded."""

    strict_bitwise: bool = False
    """Raise, before anything is read into the model, where a parameter cannot come back bit for bit."""
    allow_recast: bool = False
    """Let a parameter change its element format (E4M3 <-> E5M2). Such a parameter is requantized and counted."""
