"""What ranks say of the fragments that they save, and the manifest that comes of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ManifestError, Problem
from ..quantized.scheme import Scheme
from .layout import EvenGrid, Fragment, Shape, TensorEntry, tiles
from .manifest import Manifest, MixedStack


@dataclass(frozen=True, slots=True)
class StackRef:
    """That a tensor is one layer of a mixed stack."""

    key: str
    layer: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class FragmentRecord:
    """What a rank says of one fragment that it saves; travels with the fragment's codes."""

    key: str
    scheme: Scheme
    nominal_dtype: str
    global_shape: Shape
    prepended_axes: int
    directions: tuple[str, ...]
    fragment: Fragment
    slots: tuple[tuple[str, Shape], ...]
    """(scale component, slots per axis)."""
    even: bool
    stack: StackRef | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the fragment."""
        return self.fragment.box.shape


def build_manifest(records: Iterable[FragmentRecord], writer: Mapping[str, str | None]) -> Manifest:
    """The manifest of the fragments that all ranks save (main replicas only), without digest.

    Raises:
        ManifestError: fragments of one key contradict each other.
    """
    by_key: dict[str, list[FragmentRecord]] = defaultdict(list)
    for record in records:
        by_key[record.key].append(record)
    problems: list[Problem] = []
    tensors = {}
    for key, group in by_key.items():
        entry = _entry_of(key, group, problems)
        if entry is not None:
            tensors[key] = entry
    layers: dict[str, dict[int, int]] = defaultdict(dict)
    for group in by_key.values():
        if group[0].stack is not None:
            layers[group[0].stack.key][group[0].stack.layer] = group[0].stack.num_layers
    if problems:
        raise ManifestError("the ranks' quantized tensors do not fit together", problems)
    mixed = {key: MixedStack(max(found.values()), tuple(sorted(found))) for key, found in layers.items()}
    return Manifest(tensors=tensors, mixed=mixed, writer=writer)


def _entry_of(key: str, group: Sequence[FragmentRecord], problems: list[Problem]) -> TensorEntry | None:
    first = group[0]
    common = ["scheme", "nominal_dtype", "global_shape", "prepended_axes", "directions", "even"]
    for name in [*common, "slots", "shape"] if first.even else common:
        values = {getattr(r, name) for r in group}
        if len(values) > 1:
            problems.append(
                Problem(key, f"{name} {' and '.join(sorted(map(str, values)))}", f"one {name} on all ranks")
            )
            return None
    fragments = tuple(sorted((r.fragment for r in group), key=lambda f: f.box.offset))
    base = (first.scheme, first.nominal_dtype, first.global_shape, first.prepended_axes, first.directions)
    if not _covers(first, fragments):
        found = f"{len(fragments)} fragments in all main replicas"
        problems.append(Problem(key, found, f"fragments that fill {list(first.global_shape)}, each saved once"))
        return None
    if not first.even:
        return TensorEntry(*base, None, fragments)
    shape = first.shape
    axes = [
        _axis_phases(key, axis, fragments, shape[axis], first.global_shape[axis], problems)
        for axis in range(len(shape))
    ]
    return TensorEntry(*base, EvenGrid(shape, dict(first.slots), tuple(axes)))


def _covers(first: FragmentRecord, fragments: Sequence[Fragment]) -> bool:
    """Whether fragments fill the tensor, each once."""
    if not first.even:
        return tiles([f.box for f in fragments], first.global_shape)
    pairs = list(zip(first.global_shape, first.shape, strict=True))
    count = math.prod(g // s if s else 1 for g, s in pairs)
    return all(s == 0 or g % s == 0 for g, s in pairs) and len({f.box for f in fragments}) == len(fragments) == count


def _axis_phases(
    key: str, axis: int, fragments: Sequence[Fragment], size: int, total: int, problems: list[Problem]
) -> tuple[tuple[int, int], ...]:
    found: dict[int, int] = {}
    for fragment in fragments:
        index = fragment.box.offset[axis] // size if size else 0
        if found.setdefault(index, fragment.phase[axis]) != fragment.phase[axis]:
            problems.append(Problem(key, f"two phases at fragment {index} of axis {axis}", "one"))
    runs: list[tuple[int, int]] = []
    for index in range(total // size if size else 1):
        phase = found.get(index, 0)
        if runs and runs[-1][1] == phase:
            runs[-1] = (runs[-1][0] + 1, phase)
        else:
            runs.append((1, phase))
    return tuple(runs)
