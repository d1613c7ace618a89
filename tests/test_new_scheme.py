"""A scheme that the package does not have: a table row and an adapter are enough to send it the whole way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

import megatron_fp8_dist
from megatron_fp8_dist import LoadOptions, SaveOptions, Scheme, last_report, load, read_manifest, save
from megatron_fp8_dist.errors import ManifestError, PlanningError
from megatron_fp8_dist.quantized.scheme import (
    E2M1,
    ELEMENT_DTYPES,
    SCALE_DTYPES,
    SCHEMES,
    DirectionSpec,
    GridSpec,
    SchemeRow,
    component_names,
)
from megatron_fp8_dist.report import LoadReport
from megatron_fp8_dist.te import blocks, tensors
from tests import elements, formats
from tests.elements import Sides, conform, random_sides
from tests.elementwise import raw
from tests.fakemodel import put
from tests.shardcuts import Cut, even, loaded, saved

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "new_scheme")

KEY = "layers.weight"
NAME = "tile_2x24"
BLOCKS = {"rowwise": (2, 24), "columnwise": (24, 2)}


def direction(name: str) -> DirectionSpec:
    scale = GridSpec(f"{name}_scale_inv", "E4M3", BLOCKS[name])
    return DirectionSpec(name, scale, GridSpec(f"amax_{name}", "float32", (None, None)))


def scheme() -> Scheme:
    """The new scheme, while its row is there."""
    return Scheme(NAME, "E5M2")


ROW = SchemeRow(("E5M2",), tuple(map(direction, BLOCKS)), (("e4m3_max", 448),))
"""E5M2 in blocks of 2 x 24 and 24 x 2, which are quantized apart; E4M3 scales under an amax."""
RULE = formats.Rule("E5M2", partial(formats.e4m3_scale, e4m3_max=448), BLOCKS, np.uint8, amax=True)


# The toy of Transformer Engine


class TiledTensor(torch.Tensor):
    """What a new class may look like: scales padded to multiples of 4, columnwise codes and scales transposed.

    It can do nothing but detach, so that whatever would convert it raises.
    """

    __module__ = "transformer_engine.pytorch.tensor.tiled"
    BUFFERS: ClassVar = [f"_{name}" for d in BLOCKS for name in (f"{d}_data", f"{d}_scale_inv", f"amax_{d}")]
    _quantizer: Any

    def __new__(cls, *, shape: Sequence[int], dtype: torch.dtype, device: Any, quantizer: Any, **buffers: Any) -> Any:
        out: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        for name in cls.BUFFERS:
            setattr(out, name, buffers[name.removeprefix("_")])
        out._quantizer = quantizer
        return out

    def get_metadata(self) -> dict[str, Any]:
        """Arguments of another tensor over the same buffers."""
        return {n.removeprefix("_"): getattr(self, n) for n in self.BUFFERS} | {"quantizer": self._quantizer}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is not torch.ops.aten.detach.default:
            raise AssertionError(f"{func} on a {cls.__name__}")
        tensor = args[0]
        return cls(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **tensor.get_metadata())


class Tiled(blocks.BlockAdapter):
    """Its adapter."""

    def scheme(self, tensor: Any) -> Scheme:
        return scheme()

    def blocks(self, tensor: Any, name: str) -> tuple[int, int]:
        return BLOCKS[name]

    def scale_view(self, tensor: Any, name: str) -> torch.Tensor:
        buffer: torch.Tensor = getattr(tensor, f"_{name}_scale_inv")
        rows, columns = formats.grid_of(tuple(tensor.shape), BLOCKS[name])
        return (buffer.t() if name == "columnwise" else buffer)[:rows, :columns]

    def scale_names(self, name: str) -> list[str]:
        return [f"_{name}_scale_inv", f"_amax_{name}"]

    def amax(self, tensor: Any, name: str) -> torch.Tensor | None:
        amax: torch.Tensor = getattr(tensor, f"_amax_{name}")
        return amax.view(1, 1)


@pytest.fixture
def new_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a new scheme takes: a row in quantized/ and an adapter in te/; and its rule in the tests' own model."""
    monkeypatch.setitem(SCHEMES, NAME, ROW)
    monkeypatch.setitem(tensors._ADAPTERS, "TiledTensor", Tiled())
    known = elements.rule_of
    monkeypatch.setattr(elements, "rule_of", lambda scheme: RULE if scheme.name == NAME else known(scheme))


def tiled(shape: tuple[int, int], sides: Sides | None = None) -> Any:
    """A parameter with these elements, or with garbage; its pads are garbage always."""
    buffers: dict[str, torch.Tensor] = {}
    for name, block in BLOCKS.items():
        rows, columns = formats.grid_of(shape, block)
        codes, amax = np.full(shape, 0x55, np.uint8), 55.5
        scale = np.full((-(-rows // 4) * 4, -(-columns // 4) * 4), 0x91, np.uint8)
        if sides is not None:
            codes, amax = sides[name].codes, sides[name].amax[0, 0]
            scale[:rows, :columns] = elements.sampled(sides[name].scale, block)
        turned = (codes.T, scale.T) if name == "columnwise" else (codes, scale)
        buffers |= dict(zip((f"{name}_data", f"{name}_scale_inv"), map(copied, turned), strict=True))
        buffers[f"amax_{name}"] = torch.tensor([amax], dtype=torch.float32)
    device = torch.device("cpu")
    return nn.Parameter(TiledTensor(shape=shape, dtype=torch.bfloat16, device=device, quantizer=object(), **buffers))


def copied(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).copy())


def check_tiled(tensor: Any, expected: Sides) -> None:
    """Every element of a tensor, and every pad of its scales, which a load must have zeroed."""
    for name, block in BLOCKS.items():
        codes, scale = (getattr(tensor, f"_{name}_{part}").numpy() for part in ("data", "scale_inv"))
        codes, scale = (codes.T, scale.T) if name == "columnwise" else (codes, scale)
        rows, columns = formats.grid_of(codes.shape, block)
        np.testing.assert_array_equal(codes, expected[name].codes, err_msg=name)
        np.testing.assert_array_equal(scale[:rows, :columns], elements.sampled(expected[name].scale, block))
        assert not scale[rows:].any()
        assert not scale[:, columns:].any()
        assert getattr(tensor, f"_amax_{name}").tolist() == [expected[name].amax[0, 0]]


def buffers_of(tensor: Any) -> dict[str, tuple[int, bytes]]:
    """Where each buffer begins, and its bytes."""
    return {n: (getattr(tensor, n).data_ptr(), raw(getattr(tensor, n)).tobytes()) for n in TiledTensor.BUFFERS}


# Through files


SHAPE = (44, 60)
"""No multiple of a block on either axis, nor is a half of it."""


def random_tile(seed: int, shape: tuple[int, int] = SHAPE) -> Sides:
    return random_sides(scheme(), shape, np.random.default_rng(seed), BLOCKS, choices=8)


def entry(parameter: Any, *offsets: tuple[int, int, int]) -> Any:
    return ShardedTensor.from_rank_offsets(KEY, parameter, *offsets)


def report() -> LoadReport:
    found = last_report()
    assert isinstance(found, LoadReport)
    return found


@pytest.mark.usefixtures("single", "no_arithmetic")
@pytest.mark.parametrize("swiglu", [False, True])
def test_every_byte_through_files(tmp_path: Path, swiglu: bool) -> None:
    def entries(parameter: Any) -> dict[str, Any]:
        made = entry(parameter)
        return {"w": apply_swiglu_sharded_factory(made, ()) if swiglu else made}

    sides, destination = random_tile(1), tiled(SHAPE)
    before, quantizer = buffers_of(destination), destination._quantizer
    save(entries(tiled(SHAPE, sides)), tmp_path)
    returned = load(entries(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    check_tiled(destination, sides)
    assert {n: at for n, (at, _) in buffers_of(destination).items()} == {n: at for n, (at, _) in before.items()}
    assert destination._quantizer is quantizer
    assert isinstance(returned["w"], TiledTensor)
    assert (report().exact, report().requantized) == (1, 0)


@pytest.mark.usefixtures("single")
def test_the_manifest_says_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": entry(tiled(SHAPE, random_tile(1)))}, tmp_path)
    found = read_manifest(tmp_path).tensors[KEY]
    assert found.scheme == scheme()
    assert found.directions == tuple(BLOCKS)
    assert found.scheme.to_json()["grids"] == {
        f"{name}_scale_inv": {"format": "E4M3", "block": list(block)} for name, block in BLOCKS.items()
    } | {f"amax_{name}": {"format": "float32", "block": [None, None]} for name in BLOCKS}
    # A reader that does not have the scheme says which one it is.
    monkeypatch.delitem(SCHEMES, NAME)
    with pytest.raises(ManifestError, match=rf"{KEY} -> scheme: found scheme '{NAME}'"):
        read_manifest(tmp_path)


@pytest.mark.usefixtures("single")
@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_what_cannot_be_exact_is_counted_or_refused(tmp_path: Path) -> None:
    parts, whole = [random_tile(seed, (22, 60)) for seed in (1, 2)], Sides()
    for i, part in enumerate(parts):
        put(whole, SHAPE, (np.arange(22) + 22 * i, np.arange(60)), part)
    save({str(i): entry(tiled((22, 60), part), (0, i, 2)) for i, part in enumerate(parts)}, tmp_path)
    destination = tiled(SHAPE)
    before = buffers_of(destination)
    with pytest.raises(PlanningError, match=rf"{KEY}: found \d+ block\(s\)"):
        load({"w": entry(destination)}, tmp_path, options=LoadOptions(strict_bitwise=True))
    assert buffers_of(destination) == before
    load({"w": entry(destination)}, tmp_path)
    answer = conform(whole, scheme(), list(BLOCKS), list(BLOCKS))
    assert answer.blocks
    check_tiled(destination, answer.sides)
    assert dict(report().requantized_blocks) == {KEY: answer.blocks}
    for name, changed in answer.again.items():
        assert elements.error_in_bound(answer.old[changed], answer.sides[name][changed], RULE)


@pytest.mark.usefixtures("single")
def test_a_direction_that_was_left_out_is_made_again(tmp_path: Path) -> None:
    sides, destination = random_tile(1), tiled(SHAPE)
    save({"w": entry(tiled(SHAPE, sides))}, tmp_path, options=SaveOptions(directions="rowwise"))
    load({"w": entry(destination)}, tmp_path)
    answer = conform(sides, scheme(), ["rowwise"], list(BLOCKS))
    check_tiled(destination, answer.sides)
    assert dict(report().requantized_blocks) == {KEY: int(np.prod(formats.grid_of(SHAPE, BLOCKS["columnwise"])))}


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_high_precision_model_gets_the_values(tmp_path: Path, dtype: torch.dtype) -> None:
    sides = random_tile(1)
    save({"w": entry(tiled(SHAPE, sides))}, tmp_path)
    returned = load({"w": entry(torch.zeros(SHAPE, dtype=dtype))}, tmp_path)["w"]
    expected = torch.from_numpy(sides["rowwise"].values(RULE)).to(dtype)
    np.testing.assert_array_equal(raw(returned), raw(expected))
    assert report().dequantized == 1


# Other cuts, with fake ranks


@pytest.mark.parametrize("kind", ["rows", "columns", "swiglu"])
@pytest.mark.parametrize("choices", [1, 8], ids=["equal", "unequal"])
def test_any_cut(kind: str, choices: int) -> None:
    size, shape = 48, {"rows": (48, 60), "columns": (60, 48), "swiglu": (96, 60)}[kind]
    source = saved(scheme(), shape, even(kind, size, 4), choices=choices, amax=0.75)
    for parts in (1, 2, 3, 4, 6, 8):
        loaded(source, even(kind, size, parts), strict_bitwise=choices == 1 or parts == 4)


def test_uneven_fragments() -> None:
    cut = Cut("rows", (0, 7, 30, 31, 48), even=False)
    source = saved(scheme(), (48, 60), cut)
    loaded(source, cut, strict_bitwise=True)
    loaded(source, Cut("rows", (0, 9, 48), even=False))


# Nothing else knows one


PACKAGE = Path(megatron_fp8_dist.__file__).parent
ROOMS = ("sharding", "backends", "strategies")
SAVE_OPTION = ("save_plan.py", "rowwise")
"""Where `SaveOptions(directions="rowwise")` is carried out: a direction, which every scheme may have."""


def particular() -> set[str]:
    """What only some schemes or some of Transformer Engine's classes have."""
    flags = {flag for row in SCHEMES.values() for flag, _ in row.flags}
    # float32 is a dtype, too.
    formats_ = {*ELEMENT_DTYPES, *SCALE_DTYPES, E2M1} - {"float32"}
    parts = {*component_names(), "rowwise", "columnwise", "amax", "packed_axis"}
    classes = {*tensors._ADAPTERS, *tensors._REMEDIES, *(type(a).__name__ for a in tensors._ADAPTERS.values())}
    attributes = {
        node.attr
        for path in (PACKAGE / "te").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tensor" and node.attr.startswith("_")
    }
    assert {"_data", "_scale_inv", "_fp8_dtype", "_quantizer"} <= attributes
    return {*SCHEMES, *flags, *formats_, *parts, *classes, *attributes, "_rowwise_data", "_columnwise_data"}


def docstrings(tree: ast.AST) -> set[int]:
    """The strings that stand alone, by id."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def words(tree: ast.AST) -> Iterator[str]:
    """Every word of a module's strings, docstrings apart, and every name that it uses."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from re.findall(r"\w+", node.value)
        for field in ("id", "attr", "name", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from name.split(".")


def test_no_other_room_names_a_scheme_or_a_class() -> None:
    known, found = particular(), set[tuple[str, str]]()
    files = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]
    assert len(files) > 15
    for path in files:
        found |= {(path.name, word) for word in words(ast.parse(path.read_text())) if word in known}
    assert found == {SAVE_OPTION}
    # The search finds them where they may be.
    for module, some in {
        "quantized/scheme.py": "nvfp4",
        "te/tensors.py": "Float8Tensor",
        "te/blocks.py": "E2M1",
    }.items():
        assert some in known & set(words(ast.parse((PACKAGE / module).read_text())))
