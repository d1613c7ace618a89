"""What every backend must do: one conformance suite, which each backend's test class inherits.

A class supplies a constructor, and the stored bytes as they are found past the backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from megatron_fp8_dist.backends.base import Backend
from megatron_fp8_dist.compat.host import ShardedObject, ShardedTensor
from megatron_fp8_dist.errors import FP8CheckpointError, IncompleteCheckpointError, StorageError
from megatron_fp8_dist.sharding.layout import Box, Region
from tests.elementwise import raw

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_fp8_dist.sharding.layout import Shape

Tensors = dict[str, torch.Tensor]

DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.int64]


def distinct(shape: Shape, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    """Values that differ from each other, or at least from their neighbours."""
    count = int(np.prod(shape))
    return (torch.arange(start, start + count) % (251 if dtype == torch.uint8 else 1 << 30)).to(dtype).reshape(shape)


def chunk(key: str, whole: torch.Tensor, box: Box, **more: Any) -> Any:
    """A leaf that saves one region of a tensor."""
    data = whole[window(box)].clone()
    return ShardedTensor(key, data, data.dtype, box.shape, tuple(whole.shape), box.offset, None, **more)


def wanted(key: str, whole: torch.Tensor, box: Box) -> Any:
    """A leaf that loads one region of a tensor."""
    return ShardedTensor(key, None, whole.dtype, box.shape, tuple(whole.shape), box.offset, None)


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))


def all_of(whole: torch.Tensor) -> Box:
    return Box((0,) * whole.dim(), tuple(whole.shape))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check dtype, shape and every byte."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(raw(a), raw(b))


QUARTERS = tuple(Box((r, c), (4, 3)) for r in (0, 4) for c in (0, 3))
BANDS = (Box((0, 0), (1, 6)), Box((1, 0), (4, 6)), Box((5, 0), (3, 6)))
LAYOUTS = {"whole": (Box((0, 0), (8, 6)),), "quarters": QUARTERS, "bands": BANDS}
REGIONS = {
    "whole": Box((0, 0), (8, 6)),
    "one chunk": Box((4, 3), (4, 3)),
    "inside a chunk": Box((5, 4), (2, 1)),
    "across rows": Box((2, 1), (5, 2)),
    "across all": Box((3, 2), (2, 3)),
    "one element": Box((7, 5), (1, 1)),
    "nothing": Box((4, 0), (0, 6)),
}


class BackendSuite(ABC):
    """The cases."""

    @abstractmethod
    def make(self) -> Backend:
        """A new backend."""

    @abstractmethod
    def stored(self, backend: Backend, directory: Path) -> Tensors:
        """Every stored tensor, whole, read without calling the backend."""

    def written(self, directory: Path, **leaves: Any) -> Backend:
        """A backend that has written these leaves."""
        backend = self.make()
        backend.write(dict(leaves), directory)
        return backend

    def test_it_satisfies_the_protocol(self) -> None:
        assert isinstance(self.make(), Backend)
        assert isinstance(self.make().name, str)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("boxes", LAYOUTS.values(), ids=LAYOUTS.keys())
    def test_what_is_written_is_on_storage(self, boxes: tuple[Box, ...], dtype: torch.dtype, tmp_path: Path) -> None:
        whole = distinct((8, 6), dtype)
        backend = self.written(tmp_path, **{str(i): chunk("w", whole, box) for i, box in enumerate(boxes)})
        found = self.stored(backend, tmp_path)
        assert set(found) == {"w"}
        same_bytes(found["w"], whole)

    def test_every_byte_value_is_on_storage(self, tmp_path: Path) -> None:
        # Codes of NaN and -0.0 are bytes like any other.
        whole = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        same_bytes(self.stored(backend, tmp_path)["w"], whole)

    def test_odd_floats_are_on_storage(self, tmp_path: Path) -> None:
        bits = torch.tensor([0x80000000 - (1 << 32), 0x7FC00001, 0x00000001, 0x7F800000], dtype=torch.int32)
        whole = bits.view(torch.float32)
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        same_bytes(self.stored(backend, tmp_path)["w"].view(torch.int32), bits)
        same_bytes(backend.read(tmp_path, [Region("w", all_of(whole), (4,))])[0].view(torch.int32), bits)

    @pytest.mark.parametrize("shape", [(5,), (1, 1, 6), (2, 3, 4), (1,)], ids=str)
    def test_any_number_of_axes(self, shape: Shape, tmp_path: Path) -> None:
        whole = distinct(shape)
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        same_bytes(self.stored(backend, tmp_path)["w"], whole)
        same_bytes(backend.read(tmp_path, [Region("w", all_of(whole), shape)])[0], whole)

    def test_views_are_written_as_they_look(self, tmp_path: Path) -> None:
        whole = distinct((6, 8)).t()
        leaf = ShardedTensor("w", whole, whole.dtype, (8, 6), (8, 6), (0, 0), None)
        backend = self.written(tmp_path, w=leaf)
        same_bytes(self.stored(backend, tmp_path)["w"], whole)

    def test_the_state_dict_is_not_changed(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        leaves = {"a": chunk("w", whole, QUARTERS[0]), "more": [chunk("w", whole, box) for box in QUARTERS[1:]]}
        before = [leaves["a"], *leaves["more"]]
        self.make().write(leaves, tmp_path)
        assert [leaves["a"], *leaves["more"]] == before
        assert all(leaf.data is not None for leaf in before)

    @pytest.mark.parametrize("boxes", LAYOUTS.values(), ids=LAYOUTS.keys())
    @pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS.keys())
    def test_regions(self, boxes: tuple[Box, ...], region: Box, tmp_path: Path) -> None:
        whole = distinct((8, 6), torch.uint8)
        backend = self.written(tmp_path, **{str(i): chunk("w", whole, box) for i, box in enumerate(boxes)})
        same_bytes(backend.read(tmp_path, [Region("w", region, (8, 6))])[0], whole[window(region)])
        loaded = backend.load({"deep": [wanted("w", whole, region)]}, tmp_path)
        same_bytes(loaded["deep"][0], whole[window(region)])

    def test_many_regions_at_once_come_in_order(self, tmp_path: Path) -> None:
        a, b = distinct((8, 6)), distinct((8, 6), start=500)
        leaves = {f"{n}{i}": chunk(n, t, box) for n, t in (("a", a), ("b", b)) for i, box in enumerate(QUARTERS)}
        backend = self.written(tmp_path, **leaves)
        boxes = [REGIONS["across all"], REGIONS["whole"], REGIONS["across all"], REGIONS["nothing"]]
        asked = [(k, t, box) for box in boxes for k, t in (("b", b), ("a", a))]
        found = backend.read(tmp_path, [Region(k, box, (8, 6)) for k, _, box in asked])
        for tensor, (_, whole, box) in zip(found, asked, strict=True):
            same_bytes(tensor, whole[window(box)])

    def test_neither_writing_nor_reading_shares_memory(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        leaf = chunk("w", whole, all_of(whole))
        backend = self.written(tmp_path, w=leaf)
        leaf.data.zero_()
        region = Region("w", all_of(whole), (8, 6))
        backend.read(tmp_path, [region])[0].zero_()
        same_bytes(backend.read(tmp_path, [region])[0], whole)

    def test_no_regions(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        assert self.written(tmp_path, w=chunk("w", whole, all_of(whole))).read(tmp_path, []) == []

    def test_several_leaves_of_one_key_are_loaded(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        backend = self.written(tmp_path, **{str(i): chunk("w", whole, box) for i, box in enumerate(BANDS)})
        loaded = backend.load({n: wanted("w", whole, box) for n, box in REGIONS.items()}, tmp_path)
        for name, box in REGIONS.items():
            same_bytes(loaded[name], whole[window(box)])

    def test_index(self, tmp_path: Path) -> None:
        a, b = distinct((8, 6), torch.uint8), distinct((1, 3), torch.float32)
        leaves = {str(i): chunk("a", a, box) for i, box in enumerate(BANDS)}
        index = self.written(tmp_path, **leaves, b=chunk("b", b, all_of(b))).index(tmp_path)
        assert {k: (t.dtype, t.shape) for k, t in index.items()} == {
            "a": (torch.uint8, (8, 6)),
            "b": (torch.float32, (1, 3)),
        }
        assert set(index["a"].chunks) == set(BANDS)
        assert index["b"].chunks == (all_of(b),)

    @pytest.mark.parametrize("replica", [1, (0, 0, 1), (0, 1, 0)], ids=str)
    def test_only_main_replicas_are_written(self, replica: Any, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        other = chunk("w", whole + 1000, all_of(whole), replica_id=replica)
        alone = chunk("alone", whole, all_of(whole), replica_id=replica)
        main = chunk("w", whole, all_of(whole), replica_id=(0, 0, 0))
        backend = self.written(tmp_path, other=other, main=main, alone=alone)
        assert set(backend.index(tmp_path)) == {"w"}
        same_bytes(self.stored(backend, tmp_path)["w"], whole)

    def test_prepended_axes(self, tmp_path: Path) -> None:
        whole = distinct((3, 8, 6))
        layers = {
            str(i): ShardedTensor.from_rank_offsets("w", layer.clone(), (0, i, 3), prepend_axis_num=1)
            for i, layer in enumerate(whole)
        }
        backend = self.written(tmp_path, **layers)
        same_bytes(self.stored(backend, tmp_path)["w"], whole)
        box = Box((1, 2, 0), (2, 3, 6))
        same_bytes(backend.read(tmp_path, [Region("w", box, (3, 8, 6))])[0], whole[window(box)])

    def test_objects_round_trip(self, tmp_path: Path) -> None:
        data = {"steps": [1, 2, 3], "name": "x"}
        whole = distinct((2, 2))
        leaves = {"o": ShardedObject("o", data, (1,), (0,)), "w": chunk("w", whole, all_of(whole))}
        backend = self.written(tmp_path, **leaves)
        loaded = backend.load(
            {"o": ShardedObject("o", None, (1,), (0,)), "w": wanted("w", whole, all_of(whole))}, tmp_path
        )
        assert loaded["o"] == data
        same_bytes(loaded["w"], whole)
        assert set(backend.index(tmp_path)) == {"w"}

    def test_reading_a_missing_key_names_it(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        with pytest.raises(StorageError, match="other"):
            backend.read(tmp_path, [Region("w", all_of(whole), (8, 6)), Region("other", all_of(whole), (8, 6))])

    def test_loading_a_missing_key_names_it(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        with pytest.raises(StorageError, match="other"):
            backend.load({"o": wanted("other", whole, all_of(whole))}, tmp_path)

    @pytest.mark.parametrize("box", [Box((4, 0), (8, 6)), Box((0, 6), (8, 1))], ids=["half", "all"])
    def test_reading_outside_of_a_tensor_is_an_error(self, box: Box, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        with pytest.raises(StorageError, match="w"):
            backend.read(tmp_path, [Region("w", box, (8, 6))])

    @pytest.mark.parametrize("name", [".", "absent"], ids=["empty", "absent"])
    def test_there_is_no_checkpoint(self, name: str, tmp_path: Path) -> None:
        backend, directory = self.make(), tmp_path / name
        with pytest.raises(IncompleteCheckpointError):
            backend.index(directory)
        with pytest.raises(FP8CheckpointError):
            backend.read(directory, [Region("w", Box((0,), (1,)), (1,))])
        with pytest.raises(FP8CheckpointError):
            backend.load({"w": wanted("w", torch.zeros(1), Box((0,), (1,)))}, directory)

    def test_directories_are_apart(self, tmp_path: Path) -> None:
        backend, whole = self.make(), distinct((2, 2))
        for name, tensor in (("one", whole), ("two", whole + 7)):
            (tmp_path / name).mkdir()
            backend.write({name: chunk(name, tensor, all_of(tensor))}, tmp_path / name)
        for name, tensor in (("two", whole + 7), ("one", whole)):
            assert set(backend.index(tmp_path / name)) == {name}
            same_bytes(backend.read(tmp_path / name, [Region(name, all_of(tensor), (2, 2))])[0], tensor)

    def test_a_whole_checkpoint_is_not_damaged(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        leaves = {str(i): chunk("w", whole, box) for i, box in enumerate(QUARTERS)}
        assert self.written(tmp_path, **leaves).damage(tmp_path) == []
