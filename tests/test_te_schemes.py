"""Transformer Engine's block-scaled parameters: every byte saved and restored in place, without a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, LoadOptions, SaveOptions, last_report, load, read_manifest, save
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.report import LoadReport
from megatron_fp8_dist.te import tensors
from tests import formats, te_cpu
from tests.elementwise import raw
from tests.te_cpu import Kind, Places

pytestmark = [pytest.mark.te, pytest.mark.usefixtures("single")]

KEY = "decoder.linear.weight"
KINDS = [
    *(Kind(f"blockwise_{d}d", e, p) for d in (2, 1) for e in ("E4M3", "E5M2") for p in (True, False)),
    *(Kind(name, e) for name in ("mxfp8", "mxfp8_2d") for e in ("E4M3", "E5M2")),
    Kind("nvfp4", "E2M1"),
    Kind("nvfp4_2d", "E2M1"),
]
INDEPENDENT = [k for k in KINDS if not k.derived and k.element != "E5M2"]
USES = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}
DIRECTIONS = ("rowwise", "columnwise")

each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_use = pytest.mark.parametrize("use", USES)


def shape_of(kind: Kind) -> tuple[int, int]:
    """No multiple of a block of 128, or of the padding of scales, wherever the class allows it."""
    return (160, 224) if not kind.name.startswith("blockwise") else (150, 200)


def random_tensor(kind: Kind, seed: int, use: str = "both", shape: tuple[int, int] | None = None) -> Any:
    """A tensor with random codes and random scales for each block, its pads left as garbage."""
    shape = shape or shape_of(kind)
    rng = np.random.default_rng(seed)
    rowwise, columnwise = USES[use]
    tensor = te_cpu.empty(kind, shape, rowwise=rowwise, columnwise=columnwise)
    block = formats.rule(kind.name, kind.element).blocks
    codes, scales, amax = np.zeros(shape, np.uint8), np.zeros(shape), np.float32(0)
    for direction in DIRECTIONS:
        if direction == "rowwise" or not kind.derived:
            # Of a derived columnwise the values are those of rowwise.
            codes = rng.integers(0, 16 if kind.packed else 256, shape, dtype=np.uint8)
            scales = spread(random_scales(kind, formats.grid_of(shape, block[direction]), rng), block[direction], shape)
            amax = np.float32(rng.uniform(0.5, 2.0))
        if getattr(tensor, f"_{direction}_data") is None:
            continue
        Places(tensor, kind, direction).write(codes, scales)
        if kind.packed:
            getattr(tensor, f"_amax_{direction}").fill_(float(amax))
    return nn.Parameter(tensor)


def random_scales(kind: Kind, grid: tuple[int, int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if kind.name.startswith("mxfp8"):
        return rng.integers(100, 140, grid, dtype=np.uint8)
    if kind.packed:
        return rng.integers(0x08, 0x70, grid, dtype=np.uint8)
    exponent = np.ldexp(1.0, rng.integers(-12, 4, grid)).astype(np.float32)
    return exponent if kind.power_of_two else (exponent * rng.uniform(1, 2, grid)).astype(np.float32)


def spread(grid: np.ndarray[Any, Any], block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """One value per element."""
    return grid.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def entries(parameter: Any) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets(KEY, parameter)}


def report() -> LoadReport:
    found = last_report()
    assert isinstance(found, LoadReport)
    return found


def pointers(tensor: Any) -> dict[str, tuple[int, int]]:
    return {name: (id(b), b.data_ptr()) for name, b in te_cpu.buffers(tensor).items()}


def check_same(found: Any, expected: Any, kind: Kind, directions: tuple[str, ...]) -> None:
    """Every element of these directions has the same code, scale and amax; every pad is zero."""
    for direction in directions:
        a, b = Places(found, kind, direction), Places(expected, kind, direction)
        np.testing.assert_array_equal(a.codes(), b.codes(), err_msg=direction)
        np.testing.assert_array_equal(a.scales(), b.scales(), err_msg=direction)
        assert not a.pads().any(), direction
        if kind.packed:
            assert raw(getattr(found, f"_amax_{direction}")).tolist() == (
                raw(getattr(expected, f"_amax_{direction}")).tolist()
            )


@pytest.fixture(autouse=True)
def _current_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The stand-in that NVFP4's quantizer needs whenever it is copied; the other classes do without."""
    kind = request.node.callspec.params.get("kind") if hasattr(request.node, "callspec") else None
    with te_cpu.current_device_stand_in() if kind is None or kind.packed else nullcontext():
        yield


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever quantizes or dequantizes raises, in Transformer Engine and in the package."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor import NVFP4Tensor

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a value was converted")

    names = [n for n in dir(tex) if "quantize" in n and n.islower() and not n.startswith("create_empty")]
    for name in names:
        monkeypatch.setattr(tex, name, never)
    for cls in (te.Float8BlockwiseQTensor, te.MXFP8Tensor, NVFP4Tensor):
        monkeypatch.setattr(cls, "dequantize", never)
    for name in ("quantize", "quantize_per_tensor", "dequantize"):
        if hasattr(torch, name):
            monkeypatch.setattr(torch, name, never)
    for name in ("quantize", "dequantize_into", "encode", "decode", "_quantize_again"):
        monkeypatch.setattr(f"megatron_fp8_dist.quantized.numerics.{name}", never)


# Components


@each_kind
@each_use
def test_components_are_the_logical_part_of_the_buffers(kind: Kind, use: str) -> None:
    tensor = random_tensor(kind, 1, use)
    wrapped = tensors.wrap(tensor)
    expected = {d for d in DIRECTIONS if use in ("both", d)} if not kind.derived else {"rowwise"}
    assert set(wrapped.directions) == expected
    assert tuple(wrapped.shape) == tuple(tensor.shape)
    rules = formats.rule(kind.name, kind.element)
    for direction in wrapped.directions:
        held = direction if use in ("both", direction) else "columnwise"
        places = Places(tensor, kind, held)
        components = {n: c.numpy() for n, c in wrapped.components().items()}
        codes, axis = components[f"{direction}_data"], rules.packed_axis(direction)
        np.testing.assert_array_equal(codes if axis is None else formats.unpack(codes, axis), places.codes())
        scales = components[f"{direction}_scale_inv"]
        block = rules.blocks[direction]
        assert scales.shape == formats.grid_of(shape_of(kind), block)
        np.testing.assert_array_equal(spread(scales, block, shape_of(kind)), places.scales())
        if kind.packed:
            assert components[f"amax_{direction}"].tolist() == [getattr(tensor, f"_amax_{held}").tolist()]


# Restore


@each_kind
@each_use
@pytest.mark.usefixtures("no_conversion")
def test_restore_writes_every_byte_in_place(kind: Kind, use: str) -> None:
    source, destination = random_tensor(kind, 1), random_tensor(kind, 2, use)
    before, quantizer = pointers(destination), destination._quantizer
    there = [d for d in DIRECTIONS if use in ("both", d)]
    assert all(Places(destination, kind, d).pads().all() for d in there)  # garbage
    tensors.restore(destination, tensors.wrap(source))
    assert pointers(destination) == before
    assert destination._quantizer is quantizer
    check_same(destination, source, kind, tuple(there))


# An independent direction that was not saved has to be rebuilt; what is shown here is exact.
EXACT_USES = [(k, a, b) for k in KINDS for a in USES for b in USES if k.derived or a in ("both", b)]


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize(("kind", "saved", "loaded"), EXACT_USES, ids=str)
def test_through_files(tmp_path: Path, kind: Kind, saved: str, loaded: str) -> None:
    source, destination = random_tensor(kind, 1, saved), random_tensor(kind, 2, loaded)
    before = pointers(destination)
    save(entries(source), tmp_path)
    returned = load(entries(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    assert report().exact == 1
    assert pointers(destination) == before
    assert returned["weight"] is not destination
    # `random_tensor` of a seed has the same values in whatever directions it has.
    check_same(destination, random_tensor(kind, 1), kind, tuple(d for d in DIRECTIONS if loaded in ("both", d)))


@each_kind
@pytest.mark.usefixtures("no_conversion")
def test_what_is_stored_is_what_a_restore_needs(tmp_path: Path, kind: Kind) -> None:
    save(entries(random_tensor(kind, 1)), tmp_path)
    entry = read_manifest(tmp_path).tensors[KEY]
    assert entry.scheme.name == kind.name
    assert entry.directions == (("rowwise",) if kind.derived else DIRECTIONS)


@each_kind
@pytest.mark.usefixtures("no_conversion")
def test_load_state_dict_with_the_returned_value_changes_nothing(tmp_path: Path, kind: Kind) -> None:
    source, destination = random_tensor(kind, 1), random_tensor(kind, 2)
    save(entries(source), tmp_path)
    module: Any = nn.Module()
    module.register_parameter("weight", destination)
    module.load_state_dict(load(entries(destination), tmp_path))
    check_same(module.weight, source, kind, DIRECTIONS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_block_scaled_tensor_reads_the_same_checkpoint(tmp_path: Path, kind: Kind) -> None:
    source = random_tensor(kind, 1)
    save(entries(source), tmp_path)
    wanted = tensors.wrap(source)
    zeros = {n: torch.zeros_like(c) for n, c in wanted.components().items()}
    plain = BlockScaledTensor.from_components(wanted.scheme, zeros)
    load(entries(nn.Parameter(plain)), tmp_path, options=LoadOptions(strict_bitwise=True))
    assert {n: raw(c).tobytes() for n, c in plain.components().items()} == {
        n: raw(c).tobytes() for n, c in wanted.components().items()
    }


# Directions that were not saved


def finite_tensor(kind: Kind, seed: int, use: str = "both") -> Any:
    """A tensor whose codes are all finite."""
    parameter = random_tensor(kind, seed, use)
    for direction in DIRECTIONS:
        if not kind.packed and getattr(parameter, f"_{direction}_data") is not None:
            getattr(parameter, f"_{direction}_data").bitwise_and_(0xBF)
    return parameter


def check_rebuilt(destination: Any, kind: Kind, direction: str, other: str) -> None:
    """`direction` is what the reference makes of the values of `other`."""
    wrapped = tensors.wrap(destination)
    rules = formats.rule(kind.name, kind.element, power_of_two=kind.power_of_two)
    components = {n: c.numpy() for n, c in wrapped.components().items()}
    values = formats.dequantize(components, rules, other)
    expected = formats.quantize(values, rules)
    for name in [n for n in expected if direction in n]:
        np.testing.assert_array_equal(components[name], expected[name], err_msg=name)
    assert not Places(destination, kind, direction).pads().any()


@pytest.mark.parametrize("kind", INDEPENDENT, ids=str)
@pytest.mark.parametrize("how", ["directions=rowwise", "rowwise", "columnwise"])
def test_a_direction_that_was_not_saved_is_rebuilt_and_counted(tmp_path: Path, kind: Kind, how: str) -> None:
    use = how if how in USES else "both"
    kept = "columnwise" if how == "columnwise" else "rowwise"
    lost = next(d for d in DIRECTIONS if d != kept)
    source, destination = finite_tensor(kind, 1, use), random_tensor(kind, 2)
    options = SaveOptions(directions="rowwise") if how not in USES else None
    save(entries(source), tmp_path, options=options)
    assert read_manifest(tmp_path).tensors[KEY].directions == (kept,)

    before = {n: b.clone() for n, b in te_cpu.buffers(destination).items()}
    with pytest.raises(PlanningError, match=KEY):
        load(entries(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    assert all(torch.equal(b, before[n]) for n, b in te_cpu.buffers(destination).items())

    load(entries(destination), tmp_path)
    check_same(destination, source, kind, (kept,))
    check_rebuilt(destination, kind, lost, kept)
    assert (report().exact, report().requantized) == (0, 1)
    blocks = formats.rule(kind.name, kind.element).blocks[lost]
    assert dict(report().requantized_blocks) == {KEY: int(np.prod(formats.grid_of(shape_of(kind), blocks)))}


@pytest.mark.parametrize("kind", INDEPENDENT, ids=str)
def test_rowwise_alone_stays_exact(tmp_path: Path, kind: Kind) -> None:
    save(entries(random_tensor(kind, 1)), tmp_path, options=SaveOptions(directions="rowwise"))
    destination = random_tensor(kind, 2, "rowwise")
    load(entries(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    check_same(destination, random_tensor(kind, 1), kind, ("rowwise",))


# Refusals


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name.startswith(("mxfp8", "nvfp4"))], ids=str)
@pytest.mark.parametrize("when", ["save", "load"])
def test_swizzled_scales_are_refused(tmp_path: Path, kind: Kind, when: str) -> None:
    tensor = random_tensor(kind, 1)
    if when == "load":
        save(entries(tensor), tmp_path)
    tensor._with_gemm_swizzled_scales = True
    before = list(tmp_path.iterdir())
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*GEMM-swizzled scales.* expected .*compact"):
        (save if when == "save" else load)(entries(tensor), tmp_path)
    assert list(tmp_path.iterdir()) == before


@each_kind
def test_three_axes_are_refused(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*of 3 axes.* expected .*2-D"):
        save(entries(nn.Parameter(te_cpu.empty(kind, (2, 64, 96)))), tmp_path)
    assert list(tmp_path.iterdir()) == []


@each_kind
def test_a_tensor_without_codes_is_refused(tmp_path: Path, kind: Kind) -> None:
    tensor = random_tensor(kind, 1)
    for name in te_cpu.buffers(tensor):
        setattr(tensor, name, None)
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*without codes"):
        save(entries(tensor), tmp_path)


NVFP4_FLAGS: dict[str, dict[str, Any]] = {
    "4over6": {"_nvfp4_use_4over6": True, "_nvfp4_e4m3_max": 256},
    "4over6 of 448": {"_nvfp4_use_4over6": True},
}


@pytest.mark.parametrize("flags", NVFP4_FLAGS.values(), ids=NVFP4_FLAGS)
@pytest.mark.usefixtures("no_conversion")
def test_flags_of_nvfp4_are_kept(tmp_path: Path, flags: dict[str, Any]) -> None:
    kind = Kind("nvfp4_2d", "E2M1")
    source, destination = random_tensor(kind, 1), random_tensor(kind, 2)
    for tensor in (source, destination):
        for name, value in flags.items():
            setattr(tensor, name, value)
    save(entries(source), tmp_path)
    load(entries(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    check_same(destination, source, kind, DIRECTIONS)
    found = read_manifest(tmp_path).tensors[KEY].scheme
    assert (found.flag("use_4over6"), found.flag("e4m3_max")) == (1, flags.get("_nvfp4_e4m3_max", 448))


def row_scaled(seed: int, *, columnwise: bool) -> Any:
    """An NVFP4Tensor with one amax per row."""
    kind = Kind("nvfp4", "E2M1")
    parameter = random_tensor(kind, seed, "both" if columnwise else "rowwise")
    parameter._row_scaled_nvfp4 = True
    generator = torch.Generator().manual_seed(seed)
    parameter._amax_rowwise = torch.rand(shape_of(kind)[0], generator=generator) + 0.5
    return parameter


@pytest.mark.usefixtures("no_conversion")
def test_row_scaled_nvfp4(tmp_path: Path) -> None:
    source, destination = row_scaled(1, columnwise=False), row_scaled(2, columnwise=False)
    before = pointers(destination)
    save(entries(source), tmp_path)
    load(entries(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    assert pointers(destination) == before
    check_same(destination, source, Kind("nvfp4", "E2M1"), ("rowwise",))


def test_row_scaled_nvfp4_with_a_columnwise_side_is_refused(tmp_path: Path) -> None:
    # Its columnwise side is an independent quantization, which the scheme does not store.
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*columnwise"):
        save(entries(row_scaled(1, columnwise=True)), tmp_path)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in ("mxfp8_2d", "nvfp4_2d")], ids=str)
def test_scales_that_differ_inside_a_tile_are_refused(tmp_path: Path, kind: Kind) -> None:
    tensor = random_tensor(kind, 1)
    tensor._rowwise_scale_inv[1, 0] ^= 1
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*differ inside a tile"):
        save(entries(tensor), tmp_path)
    assert list(tmp_path.iterdir()) == []


# Cuts


def same_amax(*parameters: Any) -> None:
    """Give parts of one NVFP4 weight one amax, as ranks that reduce it have."""
    for parameter in parameters:
        for name in ("_amax_rowwise", "_amax_columnwise"):
            getattr(parameter, name).fill_(0.75)


@each_kind
@pytest.mark.usefixtures("no_conversion")
@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_on_block_edges_merge_exactly(tmp_path: Path, kind: Kind, axis: int) -> None:
    parts = [random_tensor(kind, seed, shape=(128, 128)) for seed in (1, 2)]
    whole = random_tensor(kind, 3, shape=(256, 128) if axis == 0 else (128, 256))
    if kind.packed:
        same_amax(*parts)
    save({str(i): ShardedTensor.from_rank_offsets(KEY, p, (axis, i, 2)) for i, p in enumerate(parts)}, tmp_path)
    load(entries(whole), tmp_path, options=LoadOptions(strict_bitwise=True))
    for direction in DIRECTIONS:
        found, expected = Places(whole, kind, direction), [Places(p, kind, direction) for p in parts]
        np.testing.assert_array_equal(found.codes(), np.concatenate([e.codes() for e in expected], axis))
        np.testing.assert_array_equal(found.scales(), np.concatenate([e.scales() for e in expected], axis))
        assert not found.pads().any()
        if kind.packed:
            assert getattr(whole, f"_amax_{direction}").tolist() == [0.75]


@each_kind
@pytest.mark.usefixtures("no_conversion")
def test_swiglu_halves_that_start_inside_a_block(tmp_path: Path, kind: Kind) -> None:
    # 80 rows are no multiple of 128 or 32, nor are 75.
    source, destination = random_tensor(kind, 1), random_tensor(kind, 2)

    def halves(parameter: Any) -> dict[str, Any]:
        return {"weight": apply_swiglu_sharded_factory(ShardedTensor.from_rank_offsets(KEY, parameter), ())}

    save(halves(source), tmp_path)
    load(halves(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    check_same(destination, source, kind, DIRECTIONS)


@each_kind
def test_a_direction_without_its_scales_is_refused(tmp_path: Path, kind: Kind) -> None:
    tensor = random_tensor(kind, 1)
    tensor._rowwise_scale_inv = None
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*without _rowwise_scale_inv"):
        save(entries(tensor), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_hadamard_transformed_columns_are_refused(tmp_path: Path) -> None:
    # Their codes are not those of the weight's values: what is made of them elsewhere would be wrong.
    kind = next(k for k in KINDS if k.name == "nvfp4")
    tensor = random_tensor(kind, 1)
    tensor._quantizer.with_rht = True
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*with_rht"):
        save(entries(tensor), tmp_path)
    assert list(tmp_path.iterdir()) == []
