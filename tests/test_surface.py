"""The surface that users write against: names, signatures, fields; and what importing the package pulls in.

A change here is a change for every user: it belongs into the changelog. The import contract between the package's rooms
is checked by `make lint`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import megatron_fp8_dist
from megatron_fp8_dist import errors, report

OPTIONAL = {"megatron", "transformer_engine", "transformer_engine_torch", "zarr"}
"""Top-level packages that are imported where they are used, never by the package root."""

HOSTLESS = ["BlockScaledTensor", "FP8CheckpointError", "LoadOptions", "SaveOptions", "Scheme", "exact_ops"]
HOSTLESS += ["last_report", "read_manifest"]
"""Public names that are there without Megatron-core."""

SIGNATURES = {
    "BlockScaledTensor": "(scheme: Scheme, directions: Mapping[str, Direction], dtype: torch.dtype = torch.bfloat16, "
    "*, origin: Sequence[int] | None = None, requires_grad: bool = False, is_cut: bool = False, "
    "part_of: torch.Tensor | None = None) -> Self",
    "BlockScaledTensor.components": "(self) -> dict[str, torch.Tensor]",
    "BlockScaledTensor.dequantize": "(self, dtype: torch.dtype | None = None) -> torch.Tensor",
    "BlockScaledTensor.from_components": "(scheme: Scheme, components: Mapping[str, torch.Tensor], "
    "dtype: torch.dtype = torch.bfloat16) -> BlockScaledTensor",
    "BlockScaledTensor.quantize": "(values: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None = None) "
    "-> BlockScaledTensor",
    "FP8CheckpointError": "(summary: str, problems: Iterable[Problem] = ()) -> None",
    "FP8LoadShardedStrategy": "(options: LoadOptions | None = None, inner: Any = None) -> None",
    "FP8SaveShardedStrategy": "(options: SaveOptions | None = None, inner: Any = None) -> None",
    "LoadOptions": "(*, strict_bitwise: bool = False, allow_recast: bool = False) -> None",
    "SaveOptions": "(*, backend: str = torch_dist, directions: str = both) -> None",
    "Scheme": "(name: str, element: str, flags: tuple[tuple[str, int], ...] = ()) -> None",
    "Scheme.of": "(name: str, element: str, **flags: int) -> Scheme",
    "exact_ops": "() -> Iterator[None]",
    "expand_quantized": "(sharded_state_dict: Any, *, checkpoint_dir: str | Path | None = None, "
    "model: torch.nn.Module | Sequence[torch.nn.Module] | None = None, "
    "options: SaveOptions | LoadOptions | None = None, process_group: Any = None) -> Any",
    "last_report": "() -> SaveReport | LoadReport | None",
    "load": "(sharded_state_dict: Any, checkpoint_dir: str | Path, sharded_strategy: Any = None, *, "
    "options: LoadOptions | None = None, **stock_kwargs: Any) -> Any",
    "read_manifest": "(checkpoint_dir: str | os.PathLike[str]) -> Manifest",
    "save": "(sharded_state_dict: Any, checkpoint_dir: str | Path, sharded_strategy: Any = None, *, "
    "options: SaveOptions | None = None, **stock_kwargs: Any) -> Any",
}


def public(path: str) -> Any:
    """A public name, or a method of one."""
    name, _, method = path.partition(".")
    found = getattr(megatron_fp8_dist, name)
    return getattr(found, method) if method else found


def test_public_names() -> None:
    assert megatron_fp8_dist.__all__ == sorted({path.partition(".")[0] for path in SIGNATURES})
    assert set(megatron_fp8_dist.__all__) <= set(dir(megatron_fp8_dist))
    with pytest.raises(AttributeError, match="has no attribute 'sav'"):
        megatron_fp8_dist.sav  # noqa: B018


def test_signatures() -> None:
    # Annotations are strings; the quotes are of no interest.
    assert {path: str(inspect.signature(public(path))).replace("'", "") for path in SIGNATURES} == SIGNATURES


Fields = list[tuple[str, str, Any]]

OPTIONS: dict[str, Fields] = {
    "LoadOptions": [("strict_bitwise", "bool", False), ("allow_recast", "bool", False)],
    "SaveOptions": [("backend", "str", "torch_dist"), ("directions", "str", "both")],
}
REQUIRED = dataclasses.MISSING
REPORTS: dict[str, Fields] = {
    "LoadReport": [
        ("checkpoint_dir", "str", REQUIRED),
        *((name, "int", 0) for name in ("exact", "requantized", "dequantized", "quantized", "codes")),
        ("component_bytes", "int", 0),
        ("requantized_blocks", "Mapping[str, int]", REQUIRED),
        ("seconds", "float", 0.0),
    ],
    "SaveReport": [
        ("checkpoint_dir", "str", REQUIRED),
        *((name, "int", REQUIRED) for name in ("tensors", "codes", "component_bytes")),
        ("seconds", "float", REQUIRED),
    ],
}


@pytest.mark.parametrize(
    ("module", "name", "fields"),
    [(megatron_fp8_dist, *item) for item in OPTIONS.items()] + [(report, *item) for item in REPORTS.items()],
    ids=[*OPTIONS, *REPORTS],
)
def test_fields(module: Any, name: str, fields: Fields) -> None:
    cls = getattr(module, name)
    assert [(f.name, f.type, f.default) for f in dataclasses.fields(cls)] == fields
    assert all(f.kw_only for f in dataclasses.fields(cls))
    assert cls.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("field", "known"),
    [("backend", ("torch_dist",)), ("directions", ("both", "rowwise"))],
    ids=["backend", "directions"],
)
def test_values_of_options(field: str, known: tuple[str, ...]) -> None:
    for value in known:
        assert getattr(megatron_fp8_dist.SaveOptions(**{field: value}), field) == value
    with pytest.raises(ValueError, match=f"{field}='other': known values are " + ", ".join(map(repr, known))):
        megatron_fp8_dist.SaveOptions(**{field: "other"})


ERRORS = {
    "HostError": ImportError,
    "IncompleteCheckpointError": FileNotFoundError,
    "ManifestError": ValueError,
    "PlanningError": ValueError,
    "StorageError": RuntimeError,
}


def test_every_error_is_one_of_ours_and_a_builtin() -> None:
    found = {c.__name__: c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)}
    base = found.pop("FP8CheckpointError")
    assert sorted(found) == sorted(ERRORS)
    assert all(issubclass(cls, (base,)) and issubclass(cls, ERRORS[name]) for name, cls in found.items())
    assert issubclass(base, Exception)


def in_a_new_interpreter(code: str) -> Any:
    """What `code` prints as JSON: this interpreter has imported everything already."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_package_imports_no_host() -> None:
    code = "import json, sys, megatron_fp8_dist; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    loaded = set(in_a_new_interpreter(code))
    assert "megatron_fp8_dist" in loaded
    assert not loaded & OPTIONAL


def test_names_that_need_no_host() -> None:
    # A module that is None cannot be imported.
    code = f"""
import json, sys
sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))
import megatron_fp8_dist
there = []
for name in megatron_fp8_dist.__all__:
    try:
        getattr(megatron_fp8_dist, name)
        there.append(name)
    except ImportError as e:
        assert isinstance(e, megatron_fp8_dist.FP8CheckpointError), e
        assert "megatron-fp8-dist[megatron]" in str(e), e
print(json.dumps([there, megatron_fp8_dist.last_report()]))
"""
    assert in_a_new_interpreter(code) == [HOSTLESS, None]
