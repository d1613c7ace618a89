"""Transformer Engine's block-scaled classes: their buffers as views in logical orientation.

Their scale buffers are padded, some of them and some of the codes are transposed, and 2-D scaling repeats each scale
along the tile. A view here has none of that: codes and scales as docs/format.md has them, over the same memory. Only
FP4 codes of one direction that are wanted in the other are a copy: they are packed along another axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..quantized.elements import repack
from ..quantized.scheme import Scheme

Components = dict[str, torch.Tensor]
Blocks = tuple[int, int]

DIRECTIONS = ("rowwise", "columnwise")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def present(tensor: Any, names: Iterable[str]) -> Components:
    """Attribute -> buffer, of those attributes that are not None."""
    found = {name: getattr(tensor, name) for name in names}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


class BlockAdapter:
    """One block-scaled class."""

    packed = False
    """Whether two codes share a byte, along the axis of the blocks."""
    columnwise_codes_transposed = True
    """Whether `_columnwise_data` is (K, M)."""
    scale_dtype = torch.uint8

    def scheme(self, tensor: Any) -> Scheme:
        """The scheme of a tensor."""
        raise NotImplementedError

    def refusal(self, tensor: Any) -> str | None:
        """Why a tensor cannot be saved or restored exactly, or None."""
        if all(getattr(tensor, f"_{name}_data") is None for name in DIRECTIONS):
            return "without codes"
        for name in DIRECTIONS:
            missing = [buffer for buffer in self.scale_names(name) if getattr(tensor, buffer) is None]
            if self._has(tensor, name) and missing:
                return f"without {', '.join(missing)}"
        if tensor.dim() != 2:
            return f"of {tensor.dim()} axes"
        found = (self._misshapen(tensor, name) for name in DIRECTIONS if self._has(tensor, name))
        return next((what for what in found if what is not None), None)

    def _misshapen(self, tensor: Any, name: str) -> str | None:
        """What is wrong with the dtype or the shape of the buffers of direction `name`, or None."""
        for buffer in (f"_{name}_data", f"_{name}_scale_inv"):
            if getattr(tensor, buffer).dim() != 2:
                return f"with a {buffer} of {getattr(tensor, buffer).dim()} axes"
        shape, amax = tuple(tensor.shape), self.amax(tensor, name)
        packed = tuple(s // 2 if self.packed and a == _packed_axis(name) else s for a, s in enumerate(shape))
        checks = [
            ("codes", self.code_view(tensor, name), torch.uint8, packed),
            ("scales", self.scale_view(tensor, name), self.scale_dtype, self.grid_shape(tensor, name)),
        ]
        if amax is not None:
            checks.append(("amax", amax, torch.float32, (shape[0] if self.row_scaled(tensor) else 1, 1)))
        for what, found, dtype, expected in checks:
            if (found.dtype, tuple(found.shape)) != (dtype, expected):
                return f"with {name} {what} of {found.dtype} {list(found.shape)} for {dtype} {list(expected)}"
        return None

    def row_scaled(self, tensor: Any) -> bool:
        """Whether there is one amax per row."""
        return False

    def scale_names(self, name: str) -> list[str]:
        """Attributes that go with the codes of direction `name`."""
        return [f"_{name}_scale_inv"]

    def buffers(self, tensor: Any) -> Components:
        """Attribute -> buffer, of those that are there."""
        return present(tensor, [n for name in DIRECTIONS for n in (f"_{name}_data", *self.scale_names(name))])

    def blocks(self, tensor: Any, name: str) -> Blocks:
        """Elements per entry of the class's own scale array of direction `name`; may be finer than the scheme's."""
        raise NotImplementedError

    def grid_shape(self, tensor: Any, name: str) -> Blocks:
        """Rows and columns of the class's own scale array of direction `name`, in logical orientation, unpadded."""
        rows, columns = (_ceil_div(s, b) for s, b in zip(tensor.shape, self.blocks(tensor, name), strict=True))
        return rows, columns

    def scale_transposed(self, tensor: Any, name: str) -> bool:
        """Whether the scale buffer of direction `name` is transposed."""
        raise NotImplementedError

    def scale_view(self, tensor: Any, name: str) -> torch.Tensor:
        """Scales of direction `name` in logical orientation, without padding: a view."""
        buffer: torch.Tensor = getattr(tensor, f"_{name}_scale_inv")
        rows, columns = self.grid_shape(tensor, name)
        return (buffer.t() if self.scale_transposed(tensor, name) else buffer)[:rows, :columns]

    def code_view(self, tensor: Any, name: str) -> torch.Tensor:
        """Codes of direction `name` in logical orientation: a view."""
        data: torch.Tensor = getattr(tensor, f"_{name}_data")
        return data.t() if name == "columnwise" and self.columnwise_codes_transposed else data

    def amax(self, tensor: Any, name: str) -> torch.Tensor | None:
        """Second-level amax of direction `name`, as a grid: a view."""
        return None

    def directions(self, tensor: Any) -> list[str]:
        """Names of the scheme's directions that the tensor has, or that follow exactly from what it has."""
        stored = [spec.name for spec in self.scheme(tensor).directions]
        there = [name for name in stored if self._has(tensor, name)]
        return there or stored[:1]

    def _has(self, tensor: Any, name: str) -> bool:
        return getattr(tensor, f"_{name}_data") is not None

    def components(self, tensor: Any) -> Components:
        """Components of the directions, views where the class holds them in the form that is stored."""
        scheme, out = self.scheme(tensor), Components()
        for spec in scheme.directions:
            if spec.name not in self.directions(tensor):
                continue
            source = spec.name if self._has(tensor, spec.name) else _other(spec.name)
            codes = self.code_view(tensor, source)
            out[spec.data] = codes if source == spec.name else self._repack(codes, source, spec.name)
            out[spec.scale.component] = self._compact(tensor, source, _finite(spec.scale.block))
            amax = self.amax(tensor, source)
            if spec.amax is not None and amax is not None:
                out[spec.amax.component] = amax
        return out

    def write(self, tensor: Any, components: Components) -> None:
        """Write components into the buffers that the tensor has; what the scheme does not store is derived."""
        scheme = self.scheme(tensor)
        for name in DIRECTIONS:
            if not self._has(tensor, name):
                continue
            spec = next((s for s in scheme.directions if s.name == name), scheme.directions[0])
            codes = components[spec.data]
            self.code_view(tensor, name).copy_(codes if spec.name == name else self._repack(codes, spec.name, name))
            getattr(tensor, f"_{name}_scale_inv").zero_()
            view = self.scale_view(tensor, name)
            view.copy_(
                _expand(
                    components[spec.scale.component],
                    _finite(spec.scale.block),
                    self.blocks(tensor, name),
                    view,
                )
            )
            amax = self.amax(tensor, name)
            if spec.amax is not None and amax is not None:
                amax.copy_(components[spec.amax.component])

    def _repack(self, codes: torch.Tensor, source: str, target: str) -> torch.Tensor:
        """Codes of one direction as those of the other, which holds the same values."""
        if not self.packed:
            return codes
        return repack(codes, _packed_axis(source), _packed_axis(target))

    def _compact(self, tensor: Any, name: str, block: Blocks) -> torch.Tensor:
        """Scales on the scheme's blocks."""
        view, own = self.scale_view(tensor, name), self.blocks(tensor, name)
        compact = view[:: block[0] // own[0], :: block[1] // own[1]]
        if block != own and not torch.equal(_expand(compact, block, own, view), view):
            raise ValueError(f"{type(tensor).__name__} is 2-D scaled, but its {name} scales differ inside a tile")
        return compact


def _packed_axis(name: str) -> int:
    return 1 if name == "rowwise" else 0


def _other(name: str) -> str:
    return "columnwise" if name == "rowwise" else "rowwise"


def _finite(block: tuple[int | None, int | None]) -> Blocks:
    rows, columns = block
    assert rows is not None and columns is not None, "block schemes have finite blocks"
    return rows, columns


def _expand(values: torch.Tensor, block: Blocks, own: Blocks, like: torch.Tensor) -> torch.Tensor:
    """Scales on a class's own, finer blocks."""
    for axis in (0, 1):
        values = values.repeat_interleave(block[axis] // own[axis], dim=axis) if block[axis] != own[axis] else values
    return values[: like.shape[0], : like.shape[1]]


_ELEMENT_NAMES = {"kFloat8E4M3": "E4M3", "kFloat8E5M2": "E5M2", "kFloat4E2M1": "E2M1"}


def element_of(dtype: Any) -> str:
    """Element format of one of Transformer Engine's dtypes, by name: its number has changed between releases."""
    return _ELEMENT_NAMES[dtype.name]


def _flag(tensor: Any, name: str, default: int = 0) -> int:
    return int(getattr(tensor, name, default))


def _quantizer_flag(tensor: Any, name: str) -> int:
    return int(getattr(tensor._quantizer, name, 0) or 0)


class Blockwise(BlockAdapter):
    """Float8BlockwiseQTensor: 128x128 or 1x128 blocks, float32 scales."""

    scale_dtype = torch.float32

    def scheme(self, tensor: Any) -> Scheme:
        """See `BlockAdapter.scheme`."""
        name = "blockwise_2d" if tensor._is_2D_scaled else "blockwise_1d"
        # Without its quantizer a tensor says nothing of the rule; power-of-two is TE's default.
        power = 1 if tensor._quantizer is None else _quantizer_flag(tensor, "force_pow_2_scales")
        return Scheme.of(name, element_of(tensor._fp8_dtype), power_of_two=power)

    def refusal(self, tensor: Any) -> str | None:
        """See `BlockAdapter.refusal`."""
        layout = getattr(tensor, "_data_format", None)
        if layout is not None and "COMPACT" in str(layout):
            return "in TE's compact data format"
        return super().refusal(tensor)

    def blocks(self, tensor: Any, name: str) -> Blocks:
        """See `BlockAdapter.blocks`."""
        if tensor._is_2D_scaled:
            return 128, 128
        return (1, 128) if name == "rowwise" else (128, 1)

    def scale_transposed(self, tensor: Any, name: str) -> bool:
        """See `BlockAdapter.scale_transposed`."""
        return (name == "columnwise") == bool(tensor._is_2D_scaled)


class MXFP8(BlockAdapter):
    """MXFP8Tensor: 1x32 and 32x1 blocks, or 32x32 tiles; E8M0 scales."""

    columnwise_codes_transposed = False

    def scheme(self, tensor: Any) -> Scheme:
        """See `BlockAdapter.scheme`."""
        tiled = _quantizer_flag(tensor, "with_2d_quantization")
        return Scheme("mxfp8_2d" if tiled else "mxfp8", element_of(tensor._fp8_dtype))

    def refusal(self, tensor: Any) -> str | None:
        """See `BlockAdapter.refusal`."""
        return _swizzled(tensor) or super().refusal(tensor)

    def blocks(self, tensor: Any, name: str) -> Blocks:
        """See `BlockAdapter.blocks`."""
        return (1, 32) if name == "rowwise" else (32, 1)

    def scale_transposed(self, tensor: Any, name: str) -> bool:
        """See `BlockAdapter.scale_transposed`."""
        return False


class NVFP4(BlockAdapter):
    """NVFP4Tensor: 1x16 and 16x1 blocks, or 16x16 tiles; E4M3 scales under a float32 amax."""

    packed = True

    def scheme(self, tensor: Any) -> Scheme:
        """See `BlockAdapter.scheme`."""
        name = "nvfp4_2d" if _quantizer_flag(tensor, "with_2d_quantization") else "nvfp4"
        name = "nvfp4_row_scaled" if _flag(tensor, "_row_scaled_nvfp4") else name
        flags = {
            "e4m3_max": _flag(tensor, "_nvfp4_e4m3_max", 448),
            "use_4over6": _flag(tensor, "_nvfp4_use_4over6"),
        }
        return Scheme.of(name, element_of(tensor._fp4_dtype), **flags)

    def refusal(self, tensor: Any) -> str | None:
        """See `BlockAdapter.refusal`."""
        if _flag(tensor, "_row_scaled_nvfp4") and tensor._columnwise_data is not None:
            return "row-scaled and with a columnwise direction, which does not follow from the rowwise one"
        if _quantizer_flag(tensor, "with_rht") and tensor._columnwise_data is not None:
            return "with a columnwise direction of Hadamard-transformed values (with_rht)"
        return _swizzled(tensor) or super().refusal(tensor)

    def blocks(self, tensor: Any, name: str) -> Blocks:
        """See `BlockAdapter.blocks`."""
        return (1, 16) if name == "rowwise" else (16, 1)

    def scale_transposed(self, tensor: Any, name: str) -> bool:
        """See `BlockAdapter.scale_transposed`."""
        return name == "columnwise"

    def scale_names(self, name: str) -> list[str]:
        """See `BlockAdapter.scale_names`."""
        return [f"_{name}_scale_inv", f"_amax_{name}"]

    def row_scaled(self, tensor: Any) -> bool:
        """See `BlockAdapter.row_scaled`."""
        return bool(_flag(tensor, "_row_scaled_nvfp4"))

    def amax(self, tensor: Any, name: str) -> torch.Tensor | None:
        """See `BlockAdapter.amax`."""
        amax: torch.Tensor = getattr(tensor, f"_amax_{name}")
        return amax.view(-1, 1)


def _swizzled(tensor: Any) -> str | None:
    return "with GEMM-swizzled scales" if _flag(tensor, "_with_gemm_swizzled_scales") else None
