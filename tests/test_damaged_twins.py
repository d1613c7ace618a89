"""Twins of the golden checkpoints, each damaged in one way: refused with an error that names it, or loaded unharmed.

What version 1 of the format cannot tell is here too, with its line in docs/format.md.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist import BlockScaledTensor, FP8CheckpointError, LoadOptions, Scheme, load, read_manifest
from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.errors import ManifestError, PlanningError, StorageError
from megatron_fp8_dist.quantized.scheme import SCHEMES
from tests import damage, goldens, groups
from tests.damage import MANIFEST
from tests.elementwise import component_bytes
from tests.goldens import EMBEDDING, FC1, OUTPUT, PROJ

pytest_plugins = ["tests.pure"]
pytestmark = [
    pytest.mark.usefixtures("one_rank", "one_thread"),
    # Megatron 0.16 builds these where one process holds several shards of a key.
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
]

Document: TypeAlias = dict[str, Any]
Harm: TypeAlias = Callable[[Path], object]
FORMAT = Path(__file__).parent.parent / "docs" / "format.md"
CORRUPT = (ManifestError, PlanningError, StorageError)
"""What a load of a damaged checkpoint may raise."""


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one rank, for all draws of hypothesis."""
    groups.join(dist.HashStore(), 0, 1)
    yield
    groups.leave()


def twin(directory: Path, name: str) -> Path:
    """A copy of a golden checkpoint."""
    target = directory / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(goldens.folder(name), target)
    return target


class Model:
    """Blank parameters for the weights of a golden checkpoint; they are made again once a load has touched them."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self.seed = name, seed
        self._renew()

    def _renew(self) -> None:
        self.pieces = list(goldens.pieces(self.name, "saved", seed=self.seed, empty=True))
        self.before = self.content()
        self.right = {p.name: component_bytes(p.right) for p in self.pieces}

    def content(self) -> dict[str, dict[str, bytes]]:
        """Every byte of every parameter."""
        return {p.name: component_bytes(p.entry.data) for p in self.pieces}

    def load(self, directory: Path) -> dict[str, dict[str, bytes]]:
        """Load bit for bit, or not at all; the bytes of the quantized parameters afterwards.

        Raises:
            FP8CheckpointError: of the load; planning leaves every parameter as it was, and each quantized one is
                wholly as it was or wholly restored in any case.
        """
        entries = {p.name: p.entry for p in self.pieces}
        try:
            load({"model": entries}, directory, options=LoadOptions(strict_bitwise=True))
        except FP8CheckpointError as e:
            self._check_refused(e)
            raise
        quantized = {p.name for p in self.pieces if isinstance(p.right, BlockScaledTensor)}
        found = {name: content for name, content in self.content().items() if name in quantized}
        self._renew()
        return found

    def _check_refused(self, error: FP8CheckpointError) -> None:
        after, problems = self.content(), list(error.problems)
        assert problems
        for problem in problems:
            assert f"{problem.key}: found {problem.found}, expected {problem.expected}" in str(error)
            assert problem.expected
        changed = [p for p in self.pieces if after[p.name] != self.before[p.name]]
        if not isinstance(error, StorageError):
            assert changed == []
        assert [p.name for p in changed if after[p.name] != self.right[p.name]] == []
        restored = {p.entry.key for p in changed if isinstance(p.right, BlockScaledTensor)}
        told = {key for p in problems if p.key.startswith("(restored") for key in p.found.split(", ")}
        assert restored <= told
        if changed:
            self._renew()

    def refuses(self, directory: Path, kinds: type[Exception] | tuple[type[Exception], ...], message: str) -> None:
        """Check that a load is refused, with a message that matches."""
        files = damage.snapshot(directory)
        with pytest.raises(kinds, match=message):
            self.load(directory)
        assert damage.snapshot(directory) == files

    def is_unharmed(self, directory: Path) -> bool:
        """Whether a load gives every quantized parameter the golden bytes."""
        return all(content == self.right[name] for name, content in self.load(directory).items())


# Components


def components(name: str) -> list[str]:
    """The stored components of a scheme."""
    grids = [g.component for spec in SCHEMES[name].directions for g in spec.grids]
    return [spec.data for spec in SCHEMES[name].directions] + grids


def stored_key(name: str, component: str) -> str:
    """Where a component lies of one weight of a golden checkpoint; a weight of every kind has its turn."""
    keys = (FC1, f"{PROJ}.layer_1", OUTPUT, EMBEDDING)
    key = f"{keys[components(name).index(component) % len(keys)]}.{component}"
    # The scales of uneven fragments have a key each.
    return next(k for k in sorted(damage.stored_tensors(goldens.folder(name))) if k.partition("@")[0] == key)


ANY_DTYPE = r"torch\.(uint8|float32)"
SHAPE = r"\[[\d, ]+\]"


@dataclass(frozen=True, slots=True)
class ComponentHarm:
    """One way to damage a stored component."""

    harm: Callable[[Path, str], object]
    kind: type[FP8CheckpointError]
    text: str
    """Pattern of the message; KEY is the component's."""
    everywhere: bool = False
    """Whether every scheme has a twin of this kind; else two schemes have it, which have all kinds of components."""


def _shape(directory: Path, key: str) -> tuple[int, ...]:
    return tuple(damage.stored_tensors(directory)[key].size)


def _placed(**change: int | Callable[[Any], int]) -> Callable[[Path, str], object]:
    """Let a component's items lie elsewhere: fields of their places, and what becomes of them."""

    def moved(place: Any) -> Any:
        return replace(place, **{field: to(place) if callable(to) else to for field, to in change.items()})

    return lambda d, k: damage.replace_places(d, k, moved)


def _rewritten(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path, str], object]:
    return lambda d, k: damage.rewrite(d, k, change)


COMPONENT_HARM = {
    "missing": ComponentHarm(
        damage.drop, ManifestError, f"KEY: found nothing, expected {ANY_DTYPE} of shape {SHAPE}", everywhere=True
    ),
    "cut by a byte": ComponentHarm(
        _placed(length=lambda place: place.length - 1),
        StorageError,
        rf"KEY{SHAPE}: found .*, expected a readable tensor in __0_[01]\.distcp",
        everywhere=True,
    ),
    "of another dtype": ComponentHarm(
        _rewritten(lambda t: t.to(torch.int16)),
        StorageError,
        f"KEY{SHAPE}: found torch.int16 of shape {SHAPE}, expected {ANY_DTYPE} of shape {SHAPE}",
        everywhere=True,
    ),
    "of another dtype, as .metadata says": ComponentHarm(
        lambda d, k: damage.declare(d, k, dtype=torch.int16),
        ManifestError,
        f"KEY: found torch.int16 of shape {SHAPE}, expected {ANY_DTYPE} of shape {SHAPE}",
        everywhere=True,
    ),
    "without a place": ComponentHarm(
        lambda d, k: damage.replace_places(d, k, lambda _: None),
        ManifestError,
        f"KEY{SHAPE}: found no place in any file, expected one for every chunk",
    ),
    "cut to nothing": ComponentHarm(
        _placed(length=0),
        ManifestError,
        rf"KEY{SHAPE}: found 0 bytes at \d+ of __0_[01]\.distcp, expected at least \d+ bytes",
    ),
    "before the file": ComponentHarm(
        _placed(offset=-1), ManifestError, rf"KEY{SHAPE}: found \d+ bytes at -1 of __0_[01]\.distcp"
    ),
    "behind the file": ComponentHarm(
        _placed(offset=10**6), ManifestError, r"__0_[01]\.distcp: found \d+ bytes, expected a file of at least 1\d{6}"
    ),
    "inside of another one": ComponentHarm(
        _placed(length=lambda place: place.length + 1),
        ManifestError,
        r"found byte \d+ of __0_[01]\.distcp, inside of another one's|expected a file of at least",
    ),
    "of another shape, as .metadata says": ComponentHarm(
        lambda d, k: damage.declare(d, k, shape=(*_shape(d, k)[:-1], _shape(d, k)[-1] + 1)),
        ManifestError,
        f"KEY: found {ANY_DTYPE} of shape {SHAPE}, expected {ANY_DTYPE} of shape {SHAPE}",
    ),
    "of the same bits in another dtype": ComponentHarm(
        _rewritten(lambda t: t.view(torch.int8 if t.dtype == torch.uint8 else torch.int32)),
        StorageError,
        rf"KEY{SHAPE}: found torch.int\d+ of shape {SHAPE}, expected {ANY_DTYPE} of shape {SHAPE}",
    ),
    "larger": ComponentHarm(
        _rewritten(lambda t: torch.cat([t, t])),
        StorageError,
        f"KEY{SHAPE}: found {ANY_DTYPE} of shape {SHAPE}, expected {ANY_DTYPE} of shape {SHAPE}",
    ),
    "with an axis more": ComponentHarm(
        _rewritten(lambda t: t[None]),
        StorageError,
        rf"KEY{SHAPE}: found {ANY_DTYPE} of shape \[1, [\d, ]+\], expected {ANY_DTYPE} of shape {SHAPE}",
    ),
}
COMPONENT_TWINS = [
    (name, how)
    for how, case in COMPONENT_HARM.items()
    for name in (SCHEMES if case.everywhere else ("blockwise_1d", "nvfp4"))
]


@pytest.mark.parametrize(("name", "how"), COMPONENT_TWINS)
def test_a_damaged_component(name: str, how: str, tmp_path: Path) -> None:
    model, case = Model(name), COMPONENT_HARM[how]
    for component in components(name):
        key, directory = stored_key(name, component), twin(tmp_path, name)
        case.harm(directory, key)
        model.refuses(directory, case.kind, case.text.replace("KEY", re.escape(key)))


# The manifest


def edited(directory: Path, change: Callable[[Document], object]) -> None:
    """Change the manifest's document."""

    def edit(document: Document) -> None:
        change(document)

    damage.edit_manifest(directory, edit)


def tensor(document: Document, key: str) -> Document:
    """The entry of a tensor."""
    return document["tensors"][key]  # type: ignore[no-any-return]


def stack(document: Document) -> Document:
    """The mixed stack."""
    return document["mixed_stacks"][PROJ]  # type: ignore[no-any-return]


Edit: TypeAlias = Callable[[Document], object]

# Of the golden checkpoint of blockwise_1d: fragments of EMBEDDING are [128, 6], those of FC1 [1, 66, 6].
CONTRADICTIONS: dict[str, tuple[Edit, type[FP8CheckpointError], str]] = {
    "another format": (lambda d: d.update(format="dist"), ManifestError, "found format 'dist'"),
    "a newer version": (lambda d: d.update(version=2), ManifestError, "version 2.*newer megatron-fp8-dist"),
    "another digest": (lambda d: d.update(digest="sha256:0"), ManifestError, "digest sha256:0, expected sha256:"),
    "no tensors": (
        lambda d: d.update(tensors={}, mixed_stacks={}),
        ManifestError,
        f"{EMBEDDING}.rowwise_data: found a stored component, expected nothing: no manifest knows it",
    ),
    "a tensor under another key": (
        lambda d: d["tensors"].update(other=d["tensors"].pop(EMBEDDING)),
        ManifestError,
        "other.rowwise_data: found nothing, expected torch.uint8",
    ),
    "a tensor twice": (
        lambda d: d["tensors"].update(other=tensor(d, EMBEDDING)),
        ManifestError,
        "other.rowwise_data: found nothing",
    ),
    "a tensor of high precision": (
        lambda d: d["tensors"].update({goldens.NORM: tensor(d, EMBEDDING)}),
        ManifestError,
        f"{goldens.NORM}: found a plain tensor beside",
    ),
    "no mixed stack": (lambda d: d["mixed_stacks"].clear(), PlanningError, f"{PROJ}: found nothing in the checkpoint"),
    "more layers": (
        lambda d: stack(d).update(num_layers=4),
        ManifestError,
        f"{PROJ}.layer_3: found nothing, expected a high-precision layer",
    ),
    "fewer layers": (
        lambda d: stack(d).update(num_layers=2),
        PlanningError,
        f"{PROJ}: found 2 layers saved, expected 3 layers",
    ),
    "fewer quantized layers": (
        lambda d: stack(d).update(quantized=[0]),
        ManifestError,
        f"{PROJ}.layer_1: found nothing, expected a high-precision layer",
    ),
    "more quantized layers": (
        lambda d: stack(d).update(quantized=[0, 1, 2]),
        ManifestError,
        f"{PROJ}: found no tensor {PROJ}.layer_2",
    ),
    "quantized layers out of order": (
        lambda d: stack(d).update(quantized=[1, 0]),
        ManifestError,
        rf"{PROJ} -> quantized: found \[1, 0\], expected indices in order",
    ),
    "a quantized layer twice": (
        lambda d: stack(d).update(quantized=[0, 1, 1]),
        ManifestError,
        rf"{PROJ} -> quantized: found \[0, 1, 1\], expected indices in order",
    ),
    "another scheme": (
        lambda d: tensor(d, FC1)["scheme"].update(name="mxfp8", flags={}),
        ManifestError,
        f"{FC1} -> scheme: found scheme mxfp8 of this version is",
    ),
    "another scheme, in all": (
        lambda d: tensor(d, FC1).update(scheme=Scheme("mxfp8", "E4M3").to_json()),
        ManifestError,
        rf"{FC1} -> slots: found \[1, 2, 6\], expected slots for fragments of \[1, 66, 6\]",
    ),
    "another element format": (
        lambda d: tensor(d, FC1)["scheme"].update(element="E5M2"),
        PlanningError,
        f"{FC1}: found E5M2 codes in the checkpoint, expected E4M3 codes",
    ),
    "another block": (
        lambda d: tensor(d, FC1)["scheme"]["grids"]["rowwise_scale_inv"].update(block=[1, 64]),
        ManifestError,
        f"{FC1} -> scheme: found scheme blockwise_1d of this version is",
    ),
    "a block that equals the right one": (
        lambda d: tensor(d, FC1)["scheme"]["grids"]["rowwise_scale_inv"].update(block=[True, 128.0]),
        ManifestError,
        f"{FC1} -> scheme: found scheme blockwise_1d of this version is",
    ),
    "another scale format": (
        lambda d: tensor(d, FC1)["scheme"]["grids"]["rowwise_scale_inv"].update(format="E8M0"),
        ManifestError,
        f"{FC1} -> scheme: found scheme blockwise_1d of this version is",
    ),
    "a flag's value that there is not": (
        lambda d: tensor(d, FC1)["scheme"].update(flags={"power_of_two": 2}),
        ManifestError,
        f"{FC1} -> scheme: found .*power_of_two=2",
    ),
    "a flag of another scheme": (
        lambda d: tensor(d, FC1)["scheme"].update(flags={"e4m3_max": 448}),
        ManifestError,
        f"{FC1} -> scheme: found .*e4m3_max",
    ),
    "codes of no float": (
        lambda d: tensor(d, FC1).update(nominal_dtype="uint8"),
        ManifestError,
        f"{FC1} -> nominal_dtype: found uint8",
    ),
    "a longer tensor": (
        lambda d: tensor(d, OUTPUT).update(global_shape=[135, 6]),
        ManifestError,
        f"{OUTPUT} -> fragments: found 2 regions",
    ),
    "a longer tensor, in all": (
        lambda d: tensor(d, EMBEDDING).update(global_shape=[384, 6], phases=[[[3, 0]], [[1, 0]]]),
        ManifestError,
        rf"{EMBEDDING}.rowwise_data: found torch.uint8 of shape \[256, 6\], expected torch.uint8 of shape \[384, 6\]",
    ),
    "fewer prepended axes": (
        lambda d: tensor(d, FC1).update(prepended_axes=0),
        ManifestError,
        f"{FC1} -> prepended_axes: found 0, expected what fits the scheme",
    ),
    "more prepended axes": (
        lambda d: tensor(d, EMBEDDING).update(prepended_axes=1),
        ManifestError,
        f"{EMBEDDING} -> prepended_axes: found 1, expected what fits the scheme",
    ),
    "fewer directions": (
        lambda d: tensor(d, FC1).update(directions=["rowwise"]),
        ManifestError,
        f"{FC1} -> slots: found .*expected an object with rowwise_scale_inv",
    ),
    "fewer directions, in all": (
        lambda d: [tensor(d, FC1).update(directions=["rowwise"]), tensor(d, FC1)["slots"].pop("columnwise_scale_inv")],
        ManifestError,
        f"{FC1}.columnwise_data: found a stored component, expected nothing",
    ),
    "directions out of order": (
        lambda d: tensor(d, FC1)["directions"].reverse(),
        ManifestError,
        f"{FC1} -> directions: found .*in this order",
    ),
    "larger fragments": (
        lambda d: tensor(d, EMBEDDING).update(fragment_shape=[256, 6]),
        ManifestError,
        f"{EMBEDDING} -> phases -> axis 0: found .*fragments of 256 that fill 256",
    ),
    "larger fragments, in all": (
        lambda d: tensor(d, EMBEDDING).update(
            fragment_shape=[256, 6],
            phases=[[[1, 0]], [[1, 0]]],
            slots={"rowwise_scale_inv": [256, 1], "columnwise_scale_inv": [2, 6]},
        ),
        ManifestError,
        f"{EMBEDDING}: found 2 stored chunks, expected the 1 fragments of the manifest",
    ),
    "fewer slots": (
        lambda d: tensor(d, FC1)["slots"].update(columnwise_scale_inv=[1, 1, 6]),
        ManifestError,
        f"{FC1} -> phases -> axis 1: found 66, expected a phase with which 66 elements meet 1 blocks of 128",
    ),
    "fewer slots, and phases that fit": (
        lambda d: tensor(d, FC1).update(
            slots={"rowwise_scale_inv": [1, 66, 1], "columnwise_scale_inv": [1, 1, 6]},
            phases=[[[2, 0]], [[2, 0]], [[1, 0]]],
        ),
        ManifestError,
        rf"{FC1}.columnwise_scale_inv: found torch.float32 of shape \[2, 4, 6\], expected .* of shape \[2, 2, 6\]",
    ),
    "other runs": (
        lambda d: tensor(d, FC1).update(phases=[[[2, 0]], [[1, 0], [2, 66]], [[1, 0]]]),
        ManifestError,
        f"{FC1} -> phases -> axis 1: found .*fragments of 66 that fill 132",
    ),
    "a phase beyond the block": (
        lambda d: tensor(d, FC1).update(phases=[[[2, 0]], [[1, 0], [1, 128]], [[1, 0]]]),
        ManifestError,
        f"{FC1} -> phases -> axis 1: found 128, expected a phase below 128",
    ),
    "a phase on a prepended axis": (
        lambda d: tensor(d, FC1).update(phases=[[[2, 1]], [[1, 0], [1, 66]], [[1, 0]]]),
        ManifestError,
        f"{FC1} -> phases -> axis 0: found 1, expected a phase below 1",
    ),
    "a phase that asks for more slots": (
        lambda d: tensor(d, EMBEDDING).update(phases=[[[2, 1]], [[1, 0]]]),
        ManifestError,
        f"{EMBEDDING} -> phases -> axis 0: found 1, expected a phase with which 128 elements meet 1 blocks of 128",
    ),
    "a phase that asks for fewer slots": (
        lambda d: tensor(d, FC1).update(phases=[[[2, 0]], [[2, 0]], [[1, 0]]]),
        PlanningError,
        rf"{FC1}.columnwise_scale_inv\[0, 2, 0\]: found a scale that is not 0 beyond the \[1, 1, 6\] blocks",
    ),
    "a phase of an uneven fragment beyond the block": (
        lambda d: tensor(d, OUTPUT)["fragments"][1].update(phase=[128, 0]),
        ManifestError,
        f"{OUTPUT} -> phases -> axis 0: found 128, expected a phase below 128",
    ),
    "a phase of an uneven fragment that asks for more scales": (
        lambda d: tensor(d, OUTPUT)["fragments"][0].update(phase=[1, 0]),
        ManifestError,
        rf"{OUTPUT}.columnwise_scale_inv@0_0: found .* of shape \[1, 6\], expected .* of shape \[2, 6\]",
    ),
    "fragments elsewhere": (
        lambda d: [
            tensor(d, OUTPUT)["fragments"][0].update(offset=[6, 0]),
            tensor(d, OUTPUT)["fragments"][1].update(offset=[0, 0]),
        ],
        ManifestError,
        f"{OUTPUT}.rowwise_scale_inv@6_0: found nothing",
    ),
    "even and uneven": (
        lambda d: tensor(d, OUTPUT).update(fragment_shape=[67, 6]),
        ManifestError,
        f"{OUTPUT}: found fields .*fragment_shape, fragments",
    ),
}


@pytest.mark.parametrize("how", CONTRADICTIONS)
def test_a_manifest_that_contradicts(how: str, tmp_path: Path) -> None:
    edit, kind, text = CONTRADICTIONS[how]
    directory = twin(tmp_path, "blockwise_1d")
    edited(directory, edit)
    Model("blockwise_1d").refuses(directory, kind, text)


Path_: TypeAlias = tuple[str | int, ...]


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Paths of all values in a document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def value_at(document: Any, path: Path_) -> Any:
    """What lies at a path."""
    for step in path:
        document = document[step]
    return document


MISSING = object()
WRONG = {"missing": MISSING, "of another type": None, "below the range": -1, "beyond the range": 10**12}


def wronged(original: Document, wrong: object) -> Iterator[tuple[Path_, Document]]:
    """The document with one value missing or wrong, for each value that this is possible for."""
    for path in places(original):
        document = copy.deepcopy(original)
        holder, last = value_at(document, path[:-1]), path[-1]
        if holder[last] is wrong or (isinstance(wrong, int) and not isinstance(holder[last], int)):
            continue
        if wrong is MISSING:
            del holder[last]
        else:
            holder[last] = wrong
        yield path, document


@pytest.mark.parametrize("how", WRONG)
def test_every_field_of_the_manifest(how: str, tmp_path: Path) -> None:
    # The scheme with most fields.
    directory, model = twin(tmp_path, "nvfp4"), Model("nvfp4")
    original = json.loads((directory / MANIFEST).read_text())
    for path, document in wronged(original, WRONG[how]):
        (directory / MANIFEST).write_text(json.dumps(document))
        if "writer" in path[:-1]:
            continue
        # What is named is the field, or the tensor or stack that it is about.
        names = [step.partition(".layer_")[0] for step in path if isinstance(step, str)]
        model.refuses(directory, CORRUPT, "|".join(map(re.escape, names[1:] or names)))


WRITERS: dict[str, Document] = {
    "none": {},
    "unknown versions": {"torch": None, "megatron-core": None},
    "others": {"numpy": "1", "torch": "99"},
}


@pytest.mark.parametrize("how", WRITERS)
def test_the_writer_is_for_people(how: str, tmp_path: Path) -> None:
    directory = twin(tmp_path, "mxfp8_2d")
    edited(directory, lambda d: d.update(writer=WRITERS[how]))
    assert Model("mxfp8_2d").is_unharmed(directory)


PLAIN = st.none() | st.booleans() | st.integers(-2, 140) | st.floats(-2, 140) | st.text(max_size=3)
WORDS = st.sampled_from(["float16", "E4M3", "E5M2", "E8M0", "rowwise", "columnwise", "mxfp8", "nvfp4", EMBEDDING, FC1])
NODES = PLAIN | WORDS | st.lists(PLAIN, max_size=3) | st.dictionaries(st.sampled_from(["name", "x"]), PLAIN, max_size=2)


@st.composite
def edits(draw: st.DrawFn, original: Document) -> Document:
    """A document with a few values replaced, removed, repeated, moved or changed a little, wherever they are."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(document))))
        holder, last = value_at(document, path[:-1]), path[-1]
        old = holder[last]
        how = draw(st.sampled_from(["replace", "delete", "insert", "copy", "shift"]))
        if how == "delete":
            del holder[last]
        elif how == "insert" and isinstance(holder, list):
            holder.insert(int(last), copy.deepcopy(old))
        elif how == "insert":
            holder[draw(st.text(max_size=3) | WORDS)] = copy.deepcopy(old)
        elif how == "copy":
            holder[last] = copy.deepcopy(value_at(document, draw(st.sampled_from(list(places(document))))))
        elif how == "shift" and type(old) is int:
            holder[last] = old + draw(st.sampled_from([-2, -1, 1, 2]))
        else:
            holder[last] = draw(NODES)
    return document


def phases_of(document: Document) -> dict[str, Any]:
    """All phases, which version 1 cannot check, by tensor."""
    found = {}
    for key, entry in document["tensors"].items():
        found[key] = entry["phases"] if "phases" in entry else [f["phase"] for f in entry["fragments"]]
    return found


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A copy of each golden checkpoint for all draws of hypothesis, which change its manifest alone."""
    holder = tmp_path_factory.mktemp("twins")
    return lambda name: holder / name if (holder / name).exists() else twin(holder, name)


@pytest.mark.parametrize("name", SCHEMES)
@given(data=st.data())
def test_an_edited_manifest_is_refused_or_harmless(
    name: str, data: st.DataObject, copies: Callable[[str], Path]
) -> None:
    directory, model = copies(name), Model(name)
    original = json.loads((goldens.folder(name) / MANIFEST).read_text())
    document = data.draw(edits(original))
    (directory / MANIFEST).write_text(json.dumps(document))
    try:
        unharmed = model.is_unharmed(directory)
    except CORRUPT as e:
        assert not str(e).startswith("saving or loading failed")  # noqa: PT017 - both ways are right
        return
    assert unharmed or phases_of(document) != phases_of(original)


# `.metadata`


def flips(data: bytes, step: int) -> Iterator[bytes]:
    """The data with one bit flipped, every so many bits.

    Left out are flips that become a pickle's LONG_BINPUT or BYTEARRAY8: with a wild size after them Python takes that
    much memory, or prints an error of its own about a buffer.
    """
    for bit in range(0, 8 * len(data), step):
        flipped = damage.flip(data, bit)
        if flipped[bit // 8] not in b"r\x96":
            yield flipped


@pytest.mark.parametrize("name", ["per_tensor", "nvfp4"])
def test_a_flipped_bit_in_metadata_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    directory, model = twin(tmp_path, name), Model(name)
    data, refused, harmless = (directory / ".metadata").read_bytes(), 0, 0
    for flipped in flips(data, len(data) // 25 | 1):
        (directory / ".metadata").write_bytes(flipped)
        try:
            assert model.is_unharmed(directory)
            harmless += 1
        except CORRUPT:
            refused += 1
    assert min(refused, harmless) > 0


# Other files


def _from(name: str, *files: str) -> Harm:
    """Files of the golden checkpoint of another scheme."""
    return lambda d: [shutil.copy(goldens.folder(name) / file, d / file) for file in files]


DATA_FILES = ("__0_0.distcp", "__0_1.distcp")


def _exchange_files(directory: Path) -> None:
    first, second = (directory / file for file in DATA_FILES)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def _lose(file: str) -> Harm:
    return lambda d: (d / file).unlink()


def _shorten(file: str) -> Harm:
    return lambda d: (d / file).write_bytes((d / file).read_bytes()[:-1])


# Of the golden checkpoint of nvfp4.
FILE_HARM: dict[str, tuple[Harm, type[FP8CheckpointError], str]] = {
    **{f"{f} lost": (_lose(f), ManifestError, f"{f}: found no such file") for f in DATA_FILES},
    **{f"{f} short": (_shorten(f), ManifestError, rf"{f}: found \d+ bytes, expected a file of at") for f in DATA_FILES},
    "data files exchanged": (_exchange_files, FP8CheckpointError, r"__0_[01]\.distcp"),
    "data file of another scheme": (
        _from("nvfp4_row_scaled", "__0_0.distcp"),
        ManifestError,
        "__0_0.distcp: found .*, expected a file of at least",
    ),
    "manifest of another scheme": (
        _from("nvfp4_row_scaled", MANIFEST),
        ManifestError,
        f"{FC1}.columnwise_data: found a stored component, expected nothing",
    ),
    "manifest of another scheme with the same components": (
        _from("blockwise_2d", MANIFEST),
        ManifestError,
        f"{FC1}.rowwise_data: found torch.uint8 of shape",
    ),
    ".metadata of another scheme": (
        _from("nvfp4_row_scaled", ".metadata"),
        ManifestError,
        f"{FC1}.columnwise_data: found nothing, expected torch.uint8",
    ),
    "everything but the manifest of another scheme": (
        _from("mxfp8", ".metadata", "__0_0.distcp", "__0_1.distcp"),
        ManifestError,
        f"{FC1}.rowwise_data: found torch.uint8 of shape",
    ),
}


@pytest.mark.parametrize("how", FILE_HARM)
def test_a_damaged_file(how: str, tmp_path: Path) -> None:
    harm, kind, text = FILE_HARM[how]
    directory = twin(tmp_path, "nvfp4")
    harm(directory)
    Model("nvfp4").refuses(directory, kind, text)


# What version 1 cannot tell


SEED = 100
"""Of the other model: same layout, other codes and scales."""


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> tuple[Path, Path]:
    """Checkpoints of two models of one layout, by one Megatron: a golden one's files need not lie as a new one's do."""
    folders = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("other")
    for folder, seed in zip(folders, (0, SEED), strict=True):
        goldens.write("nvfp4", folder, seed)
    return folders


def changes(model: Model, directory: Path) -> dict[str, list[str]]:
    """Parameter -> its components that a load got wrong."""
    found = {}
    for name, content in model.load(directory).items():
        found[name] = [component for component in content if content[component] != model.right[name][component]]
    return {name: wrong for name, wrong in found.items() if wrong}


def check_documented(line: str) -> None:
    """That docs/format.md says so under "What is not checked"."""
    section = FORMAT.read_text().partition("## What is not checked")[2].partition("\n## ")[0]
    assert line in " ".join(section.split())


def _save_id(directory: Path, _: Path) -> None:
    changed = damage.metadata(directory)
    changed.storage_meta.save_id = "another"  # type: ignore[union-attr]
    damage.put_metadata(directory, changed)


def _take(*files: str) -> Callable[[Path, Path], object]:
    return lambda d, other: [shutil.copy(other / file, d / file) for file in files]


SAVES_THAT_MATCH: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "another save_id": (_save_id, "Which save a file is from"),
    ".metadata of another save": (_take(".metadata"), "Which save a file is from"),
    "manifest of another save": (_take(MANIFEST), "another save of the same layout has the same digest"),
    "both": (_take(".metadata", MANIFEST), "Which save a file is from"),
}


@pytest.mark.parametrize("how", SAVES_THAT_MATCH)
def test_descriptions_of_another_save_of_the_layout_are_the_same(
    how: str, two_saves: tuple[Path, Path], tmp_path: Path
) -> None:
    harm, line = SAVES_THAT_MATCH[how]
    directory = tmp_path / "twin"
    shutil.copytree(two_saves[0], directory)
    harm(directory, two_saves[1])
    assert Model("nvfp4").is_unharmed(directory)
    check_documented(line)


def _take_items(directory: Path, other: Path) -> None:
    """What a rank would have written that holds EMBEDDING alone."""
    # Threads write the files: which one's items `.metadata` lists first is chance.
    ours, others = (sorted(damage.items(d), key=lambda i: (i.file.name, i.offset)) for d in (directory, other))
    for mine, theirs in zip(ours, others, strict=True):
        if mine.key.startswith(EMBEDDING):
            assert (mine.key, mine.offset, mine.length) == (theirs.key, theirs.offset, theirs.length)
            with mine.file.open("r+b") as file:
                file.seek(mine.offset)
                file.write(theirs.read())


DATA_OF_ANOTHER_SAVE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "one rank's file": (_take_items, EMBEDDING),
    "all files": (_take(*DATA_FILES), ""),
}


@pytest.mark.parametrize("how", DATA_OF_ANOTHER_SAVE)
def test_data_of_another_save_of_the_layout_is_not_noticed(
    how: str, two_saves: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, model, other = tmp_path / "twin", Model("nvfp4"), Model("nvfp4", SEED)
    shutil.copytree(two_saves[0], directory)
    harm, key = DATA_OF_ANOTHER_SAVE[how]
    harm(directory, two_saves[1])
    for name, content in model.load(directory).items():
        assert model.right[name] != other.right[name]
        assert content == (other if name.startswith(key) else model).right[name]
    check_documented("So does a `.distcp` file from another save of the same model and layout.")


UNNOTICED: dict[str, tuple[Harm, dict[str, list[str]], str]] = {
    "a bit of a code": (
        lambda d: damage.rewrite(d, f"{EMBEDDING}.rowwise_data", lambda t: t ^ 1, at=(0, 0)),
        {f"{EMBEDDING} 0 0": ["rowwise_data"]},
        "A flipped bit in a code, or in a scale that stays finite and not negative, loads silently.",
    ),
    "a scale": (
        lambda d: damage.rewrite(d, f"{EMBEDDING}.columnwise_scale_inv", lambda t: 2 * t, at=(1, 0)),
        {f"{EMBEDDING} 0 1": ["columnwise_scale_inv"]},
        "A flipped bit in a code, or in a scale that stays finite and not negative, loads silently.",
    ),
    "two places exchanged": (
        lambda d: damage.exchange_places(d, f"{EMBEDDING}.rowwise_data", (0, 0), (128, 0)),
        {f"{EMBEDDING} 0 {i}": ["rowwise_data"] for i in (0, 1)},
        "Which of two chunks of one dtype and shape lies where",
    ),
    "a flag that no value follows from": (
        lambda d: edited(d, lambda m: tensor(m, FC1)["scheme"].update(flags={"power_of_two": 0})),
        {},
        "an element format, flags, phases or a `nominal_dtype` that the scheme could have",
    ),
    "a nominal dtype": (
        lambda d: edited(d, lambda m: tensor(m, FC1).update(nominal_dtype="float16")),
        {},
        "an element format, flags, phases or a `nominal_dtype` that the scheme could have",
    ),
}


@pytest.mark.parametrize("how", UNNOTICED)
def test_what_is_not_noticed(how: str, tmp_path: Path) -> None:
    harm, wrong, line = UNNOTICED[how]
    directory = twin(tmp_path, "blockwise_1d")
    harm(directory)
    assert changes(Model("blockwise_1d"), directory) == wrong
    check_documented(line)


def high_precision(directory: Path, key: str) -> torch.Tensor:
    """The first layer of a weight, loaded into BF16."""
    stored = read_manifest(directory).tensors[key]
    axes = stored.prepended_axes
    layer = tuple((axis, 0, stored.global_shape[axis]) for axis in range(axes))
    into = torch.zeros(stored.global_shape[axes:], dtype=torch.bfloat16)
    entries = {"w": ShardedTensor.from_rank_offsets(key, into, *layer, prepend_axis_num=axes)}
    loaded = load(entries, directory)["w"]
    assert isinstance(loaded, torch.Tensor)
    return loaded


# Where the model is quantized as well, these are refused, or reported as requantized: its own scheme tells.
UNNOTICED_IN_HIGH_PRECISION: dict[str, tuple[str, Edit]] = {
    "an element format": ("blockwise_1d", lambda d: tensor(d, EMBEDDING)["scheme"].update(element="E5M2")),
    "a flag": ("nvfp4_2d", lambda d: tensor(d, EMBEDDING)["scheme"]["flags"].update(e4m3_max=256)),
    "a phase": ("mxfp8_2d", lambda d: tensor(d, FC1).update(phases=[[[2, 0]], [[1, 0], [1, 17]], [[1, 0]]])),
}


@pytest.mark.parametrize("how", UNNOTICED_IN_HIGH_PRECISION)
def test_what_high_precision_does_not_notice(how: str, tmp_path: Path) -> None:
    name, edit = UNNOTICED_IN_HIGH_PRECISION[how]
    directory, key = twin(tmp_path, name), FC1 if how == "a phase" else EMBEDDING
    right = high_precision(directory, key)
    edited(directory, edit)
    assert not torch.equal(high_precision(directory, key), right)
    with pytest.raises(PlanningError, match=key):
        Model(name).load(directory)
    check_documented("an element format, flags, phases or a `nominal_dtype` that the scheme could have")
