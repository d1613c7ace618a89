"""Genuine Transformer Engine tensors on a CPU: the one stand-in for what needs CUDA.

Transformer Engine quantizes on a device only, so its tensors are built here from codes and scales that a test chooses.
Classes, buffers and quantizers are Transformer Engine's own; only what a device would have computed is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

Index: TypeAlias = NDArray[np.int64]

CPU = torch.device("cpu")
DELAYED_SCALE = 3.0
"""The scale in a delayed quantizer; no test's scale_inv is its inverse, so that writing it shows."""
DELAYED_AMAX = 7.0
DIRECTIONS = ("rowwise", "columnwise")


def element_type(element: str) -> Any:
    """Transformer Engine's enum member for "E4M3" or "E5M2"."""
    from transformer_engine.pytorch.constants import DType

    return getattr(DType, f"kFloat8{element}")


def quantizer(recipe: str, element: str = "E4M3", *, columnwise: bool = False) -> Any:
    """A quantizer of recipe "delayed" or "current"; None for "none"."""
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer

    if recipe == "delayed":
        scale, amax = torch.tensor([DELAYED_SCALE]), torch.tensor([DELAYED_AMAX])
        return Float8Quantizer(scale=scale, amax=amax, fp8_dtype=element_type(element), columnwise=columnwise)
    if recipe == "current":
        return Float8CurrentScalingQuantizer(element_type(element), device=CPU, columnwise=columnwise)
    return None


def float8(
    codes: torch.Tensor,
    scale_inv: float,
    *,
    element: str = "E4M3",
    recipe: str = "delayed",
    transpose: bool = False,
    rowwise: bool = True,
) -> Any:
    """A Float8Tensor with nominal dtype BF16.

    Args:
        codes: its bytes, which become its buffer.
        scale_inv: its scale.
        element: "E4M3" or "E5M2".
        recipe: see `quantizer`.
        transpose: allocate the transpose, valid.
        rowwise: keep the rowwise codes; without them the tensor has its transpose alone.
    """
    from transformer_engine.pytorch import Float8Tensor

    transposed = codes.permute(codes.dim() - 1, *range(codes.dim() - 1)).contiguous()
    return Float8Tensor(
        shape=codes.shape,
        dtype=torch.bfloat16,
        data=codes if rowwise else None,
        fp8_scale_inv=torch.tensor([scale_inv]),
        fp8_dtype=element_type(element),
        data_transpose=transposed if transpose or not rowwise else None,
        quantizer=quantizer(recipe, element, columnwise=transpose or not rowwise),
        device=CPU,
    )


# Block-scaled classes


@dataclass(frozen=True, slots=True)
class Kind:
    """One of Transformer Engine's classes, and a way to use it."""

    name: str
    """"per_tensor", "blockwise_2d", "blockwise_1d", "mxfp8", "mxfp8_2d", "nvfp4" or "nvfp4_2d"."""
    element: str = "E4M3"
    power_of_two: bool = True

    @property
    def derived(self) -> bool:
        """Whether columnwise follows from rowwise."""
        return self.name == "per_tensor" or self.name.endswith("_2d")

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.name.startswith("nvfp4")

    def __str__(self) -> str:
        return f"{self.name}-{self.element}{'' if self.power_of_two else '-plain'}"


@contextmanager
def current_device_stand_in() -> Iterator[None]:
    """torch.cuda.current_device() says the CPU: NVFP4Quantizer asks it where to put its Hadamard matrix."""
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        yield


def block_quantizer(kind: Kind, *, rowwise: bool = True, columnwise: bool = True) -> Any:
    """The quantizer of a class."""
    from transformer_engine.pytorch import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer

    usage = {"rowwise": rowwise, "columnwise": columnwise}
    if kind.name.startswith("blockwise"):
        dim = 2 if kind.derived else 1
        plain = {"force_pow_2_scales": kind.power_of_two, "block_scaling_dim": dim}
        return Float8BlockQuantizer(element_type(kind.element), **usage, **plain)
    if kind.packed:
        return NVFP4Quantizer(**usage, with_2d_quantization=kind.derived)
    return MXFP8Quantizer(element_type(kind.element), **usage, with_2d_quantization=kind.derived)


def empty(kind: Kind, shape: tuple[int, ...], *, rowwise: bool = True, columnwise: bool = True) -> Any:
    """A tensor with the buffers that Transformer Engine allocates, each byte of them garbage."""
    with current_device_stand_in():
        maker = block_quantizer(kind, rowwise=rowwise, columnwise=columnwise)
        tensor = maker.make_empty(shape, dtype=torch.bfloat16, device=CPU)
        if not (rowwise and columnwise):
            tensor.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
    _fill_with_garbage(tensor)
    return tensor


def _fill_with_garbage(tensor: Any) -> None:
    """Overwrite every buffer, the pads of scales too."""
    for number, buffer in enumerate(buffers(tensor).values()):
        buffer.view(torch.uint8).fill_(0x91 + number)


def buffers(tensor: Any) -> dict[str, torch.Tensor]:
    """Attribute -> buffer, of those that are there."""
    found = {name: getattr(tensor, name) for name, _ in type(tensor)._INNER_TENSORS}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


# Where Transformer Engine keeps the scale of element (i, j): index into the buffer.
_SCALE_PLACES: dict[tuple[str, str], Callable[[Index, Index], tuple[Index, ...]]] = {
    ("per_tensor", "rowwise"): lambda i, _: (np.zeros_like(i),),
    ("per_tensor", "columnwise"): lambda i, _: (np.zeros_like(i),),
    ("blockwise_2d", "rowwise"): lambda i, j: (i // 128, j // 128),
    ("blockwise_2d", "columnwise"): lambda i, j: (j // 128, i // 128),
    ("blockwise_1d", "rowwise"): lambda i, j: (j // 128, i),
    ("blockwise_1d", "columnwise"): lambda i, j: (i // 128, j),
    ("mxfp8", "rowwise"): lambda i, j: (i, j // 32),
    ("mxfp8", "columnwise"): lambda i, j: (i // 32, j),
    ("nvfp4", "rowwise"): lambda i, j: (i, j // 16),
    ("nvfp4", "columnwise"): lambda i, j: (j, i // 16),
}


class Places:
    """Where each element of a tensor lies in the buffers of one direction, by Transformer Engine's own rules."""

    def __init__(self, tensor: Any, kind: Kind, direction: str) -> None:
        i, j = np.indices(tuple(tensor.shape))
        place = kind.name if kind.name.startswith("blockwise") else kind.name.removesuffix("_2d")
        self.tensor = tensor
        self.data, self.scale = f"_{direction}_data", f"_{direction}_scale_inv"
        if place == "per_tensor":
            self.data, self.scale = "_data" if direction == "rowwise" else "_transpose", "_scale_inv"
        self.scale_at = _SCALE_PLACES[place, direction](i, j)
        transposed = direction == "columnwise" and not place.startswith("mxfp8")
        row, column = (j, i) if transposed else (i, j)
        self.shift = 4 * (column % 2) if kind.packed else np.zeros_like(column)
        self.code_at = (row, column // 2 if kind.packed else column)
        self.mask = 0xF if kind.packed else 0xFF

    def _buffer(self, name: str) -> NDArray[Any]:
        buffer: torch.Tensor = getattr(self.tensor, name)
        return buffer.numpy()

    def codes(self) -> NDArray[np.uint8]:
        """One code per element."""
        data: NDArray[Any] = self._buffer(self.data)[self.code_at] >> self.shift & self.mask
        return data.astype(np.uint8)

    def scales(self) -> NDArray[Any]:
        """One scale per element, as its buffer has it."""
        found: NDArray[Any] = self._buffer(self.scale)[self.scale_at]
        return found

    def pads(self) -> NDArray[Any]:
        """The scales that belong to no element."""
        buffer = self._buffer(self.scale)
        used = np.zeros(buffer.shape, np.bool_)
        used[self.scale_at] = True
        found: NDArray[Any] = buffer[~used]
        return found

    def write(self, codes: NDArray[np.uint8], scales: NDArray[Any]) -> None:
        """Put elements into the buffers; pads stay as they are."""
        data = self._buffer(self.data)
        data[...] = 0
        np.bitwise_or.at(data, self.code_at, (codes << self.shift).astype(np.uint8))
        self._buffer(self.scale)[self.scale_at] = scales


def hybrid(rows: int, columns: int) -> Any:
    """A HybridQuantizedTensor of two MXFP8 halves."""
    from transformer_engine.pytorch import HybridQuantizer
    from transformer_engine.pytorch.tensor import HybridQuantizedTensor

    halves = [block_quantizer(Kind("mxfp8")) for _ in range(2)]
    parts = [q.make_empty((rows, columns), dtype=torch.bfloat16, device=CPU) for q in halves]
    return HybridQuantizedTensor(
        shape=(rows, columns),
        dtype=torch.bfloat16,
        rowwise_storage=parts[0],
        columnwise_storage=parts[1],
        quantizer=HybridQuantizer(rowwise_quantizer=halves[0], columnwise_quantizer=halves[1]),
        device=CPU,
    )


def grouped(rows: int, columns: int) -> Any:
    """A GroupedTensor of two MXFP8 members."""
    from transformer_engine.pytorch.tensor import GroupedTensor

    return GroupedTensor(
        (2 * rows, columns),
        torch.bfloat16,
        num_tensors=2,
        shapes=[(rows, columns)] * 2,
        quantizer=block_quantizer(Kind("mxfp8")),
        data=torch.zeros(2 * rows * columns, dtype=torch.uint8),
        scale_inv=torch.zeros(2 * rows * columns // 32, dtype=torch.uint8),
    )


# Modules


def _allocated(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The tensor that a quantizer fills on a Hopper GPU, with garbage in it."""
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor

    if not isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        tensor = quantizer.make_empty(shape, dtype=dtype, device=CPU)
    else:
        # Transformer Engine's own allocation asks the device whether it needs a transpose. A Hopper does.
        codes, scale_inv = torch.empty(shape, dtype=torch.uint8), torch.empty(1)
        transpose = torch.empty((shape[-1], *shape[:-1]), dtype=torch.uint8) if quantizer.columnwise_usage else None
        tensor = Float8Tensor(
            shape=shape,
            dtype=dtype,
            data=codes,
            fp8_scale_inv=scale_inv,
            fp8_dtype=quantizer.dtype,
            data_transpose=transpose,
            quantizer=quantizer,
            device=CPU,
        )
    _fill_with_garbage(tensor)
    return tensor


def _quantize(values: torch.Tensor, quantizer: Any, output: Any = None, *_: Any) -> Any:
    if output is None:
        return _allocated(quantizer, tuple(values.shape), values.dtype)
    _fill_with_garbage(output)
    return output


@contextmanager
def building_stand_ins() -> Iterator[None]:
    """Transformer Engine's modules can be built without a device.

    Nothing is computed: what a module quantizes becomes garbage, for a test to overwrite.
    """
    from transformer_engine.pytorch.quantization import RecipeState

    create = RecipeState.create

    def create_on_cpu(recipe: Any, **how: Any) -> Any:
        return create(recipe, **how | {"device": CPU})

    with ExitStack() as stack:
        stack.enter_context(current_device_stand_in())
        stack.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
        stack.enter_context(mock.patch("transformer_engine_torch.quantize", _quantize))
        stack.enter_context(mock.patch.object(RecipeState, "create", create_on_cpu))
        yield


@contextmanager
def extra_state_stand_in() -> Iterator[None]:
    """The extra state of modules with delayed scaling can be taken and set without a device."""
    from transformer_engine.common.recipe import DelayedScaling

    default = "transformer_engine.pytorch.quantization.get_default_fp8_recipe"
    # The second is asked for outside of autocast; it depends on the device, and this is a Hopper's.
    with mock.patch("torch.cuda.synchronize"), mock.patch(default, DelayedScaling):
        yield
