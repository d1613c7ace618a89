"""sharding/manifest.py: what the file says, every kind of damage, and the metadata of the files beside it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.errors import ManifestError
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.sharding.layout import Box, EvenGrid, Fragment, TensorEntry, component_key, logical_key
from megatron_fp8_dist.sharding.manifest import (
    FragmentRecord,
    Manifest,
    MixedStack,
    StackRef,
    StoredTensor,
    build_manifest,
    check_against_index,
    metadata_digest,
)

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

E4M3 = Scheme("per_tensor", "E4M3")
E5M2 = Scheme("per_tensor", "E5M2")
SCALE = "rowwise_scale_inv"


def manifest() -> Manifest:
    """An even tensor, a stacked one with blocks, an uneven one, and a mixed stack of three layers."""
    row = EvenGrid((4, 6), {SCALE: (1, 1)}, (((2, 0),), ((1, 0),)))
    blocks = EvenGrid((1, 6, 8), {SCALE: (1, 3, 2)}, (((2, 0),), ((1, 0), (1, 2)), ((1, 0),)))
    uneven = tuple(Fragment(Box((a, 0), (b - a, 4)), (0, 0)) for a, b in pairwise((0, 5, 8, 16)))
    return Manifest(
        tensors={
            "even": TensorEntry(E4M3, "bfloat16", (8, 6), 0, row),
            "blocks": TensorEntry(Scheme("toy_block", "E4M3"), "float16", (2, 12, 8), 1, blocks),
            "uneven": TensorEntry(E5M2, "bfloat16", (16, 4), 0, None, uneven),
            "mixed.layer_1": TensorEntry(E4M3, "bfloat16", (8, 6), 0, row),
        },
        mixed={"mixed": MixedStack(3, (1,))},
        digest="sha256:0",
        writer={"torch": "2.13.0", "transformer-engine": None},
    )


def test_round_trip() -> None:
    assert Manifest.loads(manifest().dumps()) == manifest()


def test_round_trip_of_nothing() -> None:
    assert Manifest.loads(Manifest(tensors={}).dumps()) == Manifest(tensors={})


def test_the_text_does_not_depend_on_the_order_of_keys() -> None:
    first = manifest()
    turned = replace(first, tensors={key: first.tensors[key] for key in reversed(list(first.tensors))})
    assert turned.dumps() == first.dumps()


def test_counts() -> None:
    assert manifest().layers == 1 + 2 + 1 + 1
    assert manifest().codes == 48 + 192 + 64 + 48


# Damage

Edit = Callable[[dict[str, Any]], Any]


def tensor(document: dict[str, Any], key: str) -> dict[str, Any]:
    return document["tensors"][key]  # type: ignore[no-any-return]


DAMAGE: dict[str, tuple[Edit, str]] = {
    "missing field": (lambda d: tensor(d, "even").pop("slots"), r"even: .*expected fields .*slots"),
    "missing top field": (lambda d: d.pop("digest"), r"manifest: found fields"),
    "extra field": (lambda d: tensor(d, "even").update(more=1), r"even: found fields .*more"),
    "extra top field": (lambda d: d.update(more=1), r"manifest: found fields .*more"),
    "another format": (lambda d: d.update(format="other"), r"format 'other'"),
    "no format": (lambda d: d.pop("format"), r"format None"),
    "newer version": (lambda d: d.update(version=2), r"version 2.*Install a newer megatron-fp8-dist"),
    "version of another type": (lambda d: d.update(version="1"), r"format version '1'"),
    "version that equals 1": (lambda d: d.update(version=True), r"format version True"),
    "digest of another type": (lambda d: d.update(digest=7), r"digest: found 7"),
    "writer of another type": (lambda d: d.update(writer=[]), r"writer: found \[\]"),
    "writer's version of another type": (lambda d: d["writer"].update(torch=2), r"writer: found .*'torch': 2"),
    "tensors of another type": (lambda d: d.update(tensors=[]), r"tensors: found \[\], expected an object"),
    "entry of another type": (lambda d: d["tensors"].update(even=3), r"even: found 3, expected an object"),
    "unknown scheme": (lambda d: tensor(d, "even")["scheme"].update(name="x"), r"even -> scheme: .*'x'"),
    "unknown element": (lambda d: tensor(d, "even")["scheme"].update(element="E9M9"), r"even -> scheme: .*'E9M9'"),
    "scheme of another type": (lambda d: tensor(d, "even").update(scheme="per_tensor"), r"even -> scheme"),
    "scheme at odds with the table": (
        lambda d: tensor(d, "blocks")["scheme"]["grids"][SCALE].update(block=[8, 8]),
        r"blocks -> scheme",
    ),
    "nominal dtype that is none": (
        lambda d: tensor(d, "even").update(nominal_dtype="Tensor"),
        r"even -> nominal_dtype: found '?Tensor",
    ),
    "nominal dtype that is no float": (
        lambda d: tensor(d, "even").update(nominal_dtype="int32"),
        r"even -> nominal_dtype: found '?int32",
    ),
    "shape of another type": (lambda d: tensor(d, "even").update(global_shape="8x6"), r"even -> global_shape"),
    "negative shape": (lambda d: tensor(d, "even").update(global_shape=[-8, 6]), r"even -> global_shape"),
    "fraction in a shape": (lambda d: tensor(d, "even").update(global_shape=[8.0, 6]), r"even -> global_shape"),
    "too many prepended axes": (
        lambda d: tensor(d, "even").update(prepended_axes=3),
        r"even -> prepended_axes: found 3",
    ),
    "prepended axes at odds with the scheme": (
        lambda d: tensor(d, "blocks").update(prepended_axes=2),
        r"blocks -> prepended_axes: found 2",
    ),
    "fragment of another rank": (
        lambda d: tensor(d, "even").update(fragment_shape=[4]),
        r"even -> fragment_shape: found \[4\]",
    ),
    "slots of an unknown component": (
        lambda d: tensor(d, "even").update(slots={"x": [1, 1]}),
        r"even -> slots: .*rowwise_scale_inv",
    ),
    "slots of another type": (lambda d: tensor(d, "even").update(slots=[1, 1]), r"even -> slots: found \[1, 1\]"),
    "phases that do not fill the axis": (
        lambda d: tensor(d, "even")["phases"].__setitem__(0, [[1, 0]]),
        r"even -> phases -> axis 0: .*fragments of 4 that fill 8",
    ),
    "phases that overfill the axis": (
        lambda d: tensor(d, "even")["phases"].__setitem__(1, [[1, 0], [1, 0]]),
        r"even -> phases -> axis 1: .*fragments of 6 that fill 6",
    ),
    "phases of another rank": (lambda d: tensor(d, "even")["phases"].pop(), r"even -> phases: .*a list of 2 lists"),
    "run that is no pair": (
        lambda d: tensor(d, "even")["phases"].__setitem__(0, [[2]]),
        r"even -> phases: found \[2\]",
    ),
    "fragment out of range": (
        lambda d: tensor(d, "uneven")["fragments"][2].update(offset=[9, 0]),
        r"uneven -> fragments -> 2: found offset \(9, 0\).*inside \(16, 4\)",
    ),
    "fragments with a hole": (lambda d: tensor(d, "uneven")["fragments"].pop(1), r"uneven -> fragments: "),
    "fragments that overlap": (
        lambda d: tensor(d, "uneven")["fragments"][1].update(offset=[4, 0]),
        r"uneven -> fragments: ",
    ),
    "fragment of another type": (
        lambda d: tensor(d, "uneven")["fragments"].__setitem__(0, 5),
        r"uneven -> fragments -> 0: found 5",
    ),
    "fragment without a field": (
        lambda d: tensor(d, "uneven")["fragments"][0].pop("phase"),
        r"uneven -> fragments -> 0: found fields offset, shape",
    ),
    "fragments of another type": (
        lambda d: tensor(d, "uneven").update(fragments={}),
        r"uneven -> fragments: found \{\}",
    ),
    "mixed stack without its layer": (
        lambda d: d["tensors"].pop("mixed.layer_1"),
        r"mixed_stacks -> mixed: found no tensor mixed.layer_1",
    ),
    "mixed stack of too few layers": (
        lambda d: d["mixed_stacks"]["mixed"].update(num_layers=1),
        r"mixed_stacks -> mixed: found 1, expected a number of layers above",
    ),
    "mixed stack of another type": (
        lambda d: d["mixed_stacks"].update(mixed=[1]),
        r"mixed_stacks -> mixed: found \[1\]",
    ),
    "mixed stack without a field": (
        lambda d: d["mixed_stacks"]["mixed"].pop("quantized"),
        r"mixed_stacks -> mixed: found fields num_layers",
    ),
}


@pytest.mark.parametrize(("edit", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(edit: Edit, message: str) -> None:
    document = manifest().to_json()
    edit(document)
    with pytest.raises(ManifestError, match=message):
        Manifest.loads(json.dumps(document))


TEXTS = {
    "empty": "",
    "truncated": '{"format": "megatron_fp8_dist", "version": 1, "tens',
    "no object": "[1, 2]",
    "a number": "7",
    "no JSON": "fp8_manifest",
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ManifestError, match=r"fp8_manifest\.json"):
        Manifest.loads(text)


@given(st.data())
def test_a_truncated_file_is_refused(data: st.DataObject) -> None:
    text = manifest().dumps()
    end = data.draw(st.integers(0, len(text.rstrip()) - 1))
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.loads(text[:end])


def test_all_problems_at_once() -> None:
    document = manifest().to_json()
    document["digest"] = None
    tensor(document, "even")["scheme"]["name"] = "x"
    tensor(document, "blocks")["slots"] = {}
    tensor(document, "uneven")["fragments"][0]["shape"] = [17, 4]
    document["mixed_stacks"]["mixed"]["num_layers"] = 0
    with pytest.raises(ManifestError) as caught:
        Manifest.loads(json.dumps(document))
    places = [p.key for p in caught.value.problems]
    for place in ("digest", "even -> scheme", "blocks -> slots", "uneven -> fragments -> 0", "mixed_stacks -> mixed"):
        assert place in places


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_of(item, (*path, key))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 17) | st.floats(-2, 17) | st.text(max_size=3) | st.just("bfloat16"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "offset", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def edited(draw: st.DrawFn) -> Any:
    """The document with a few values replaced or removed, wherever they are."""
    document = manifest().to_json()
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([p for p in places_of(document) if p]))
        holder = document
        for step in path[:-1]:
            holder = holder[step]
        if draw(st.booleans()):
            holder[path[-1]] = draw(JSON_VALUES)
        else:
            del holder[path[-1]]
    return document


@given(edited())
def test_an_edited_document_is_refused_or_read_as_it_says(document: Any) -> None:
    try:
        read = Manifest.loads(json.dumps(document))
    except ManifestError as e:
        assert e.problems  # noqa: PT017 - both ways are right
        return
    # Text, not values: True and 1.0 are not 1 in a file.
    assert read.dumps() == json.dumps(document, indent=1, sort_keys=True) + "\n"
    check_against_index(read, {})


# The metadata of the files


def index_of(described: Manifest) -> dict[str, StoredTensor]:
    """The index of the files that a manifest describes."""
    found = {}
    for key, entry in described.tensors.items():
        for stored, component, shape in entry.stored(key):
            dtype = torch.float32 if component == SCALE else torch.uint8
            whole = Box((0,) * len(shape), shape)
            chunks = (whole,) if component == SCALE else tuple(f.box for f in entry.overlapping(whole))
            found[stored] = StoredTensor(dtype, shape, chunks)
    for layer in (0, 2):
        found[f"mixed.layer_{layer}"] = StoredTensor(torch.bfloat16, (8, 6), (Box((0, 0), (8, 6)),))
    found["norm"] = StoredTensor(torch.float32, (6,), (Box((0,), (6,)),))
    return found


def matched() -> tuple[Manifest, dict[str, StoredTensor]]:
    """A manifest and an index that fit together."""
    index = index_of(manifest())
    return replace(manifest(), digest=metadata_digest(index)), index


def test_a_manifest_and_its_files_agree() -> None:
    assert check_against_index(*matched()) == []


def test_every_component_is_looked_for() -> None:
    found, index = matched()
    components = [key for key in index if logical_key(key) is not None]
    assert len(components) == 2 + 2 + 4 + 2
    assert [p.key for p in check_against_index(found, {})][: len(components)] == components


IndexEdit = Callable[[dict[str, StoredTensor]], Any]


def changed(key: str, **fields: Any) -> IndexEdit:
    return lambda index: index.update({key: replace(index[key], **fields)})


MISMATCHES: dict[str, tuple[IndexEdit, str, str]] = {
    "missing codes": (lambda i: i.pop("even.rowwise_data"), "even.rowwise_data", "nothing"),
    "missing scales": (lambda i: i.pop(f"blocks.{SCALE}"), f"blocks.{SCALE}", "nothing"),
    "missing scales of a fragment": (lambda i: i.pop(f"uneven.{SCALE}@5_0"), f"uneven.{SCALE}@5_0", "nothing"),
    "codes of another dtype": (changed("even.rowwise_data", dtype=torch.int8), "even.rowwise_data", "torch.int8"),
    "scales of another dtype": (changed(f"even.{SCALE}", dtype=torch.float64), f"even.{SCALE}", "torch.float64"),
    "codes of another shape": (changed("even.rowwise_data", shape=(6, 8)), "even.rowwise_data", "[6, 8]"),
    "scales of another shape": (changed(f"even.{SCALE}", shape=(2, 2)), f"even.{SCALE}", "[2, 2]"),
    "plain key beside components": (lambda i: i.update(even=i["norm"]), "even", "a plain tensor"),
    "plain key beside a layer": (lambda i: i.update({"mixed.layer_1": i["norm"]}), "mixed.layer_1", "a plain tensor"),
    "plain key beside layers": (lambda i: i.update(mixed=i["norm"]), "mixed", "a plain tensor"),
    "missing high-precision layer": (lambda i: i.pop("mixed.layer_2"), "mixed.layer_2", "nothing"),
    "unknown component": (lambda i: i.update({f"x.{SCALE}": i["norm"]}), f"x.{SCALE}", "a stored component"),
    "unknown fragment": (lambda i: i.update({f"uneven.{SCALE}@6_0": i["norm"]}), f"uneven.{SCALE}@6_0", "a stored"),
    "other chunks of codes": (changed("even.rowwise_data", chunks=(Box((0, 0), (8, 6)),)), "even", "1 stored chunks"),
    "other chunks of scales": (changed("even.rowwise_scale_inv", chunks=()), "fp8_manifest.json", "digest"),
}


@pytest.mark.parametrize(("edit", "key", "found"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_what_does_not_fit_is_named(edit: IndexEdit, key: str, found: str) -> None:
    described, index = matched()
    edit(index)
    problems = check_against_index(described, index)
    assert [p.key for p in problems] == [key]
    assert found in problems[0].found


def test_an_older_digest_is_refused() -> None:
    described, index = matched()
    problems = check_against_index(replace(described, digest="sha256:0"), index)
    assert [p.key for p in problems] == ["fp8_manifest.json"]
    assert "sha256:0" in problems[0].found


def test_all_mismatches_at_once() -> None:
    described, index = matched()
    del index["even.rowwise_data"]
    del index[f"uneven.{SCALE}@5_0"]
    index[f"x.{SCALE}"] = index["norm"]
    assert {p.key for p in check_against_index(described, index)} == {
        "even.rowwise_data",
        f"uneven.{SCALE}@5_0",
        f"x.{SCALE}",
    }


def test_components_that_no_manifest_knows() -> None:
    problems = check_against_index(Manifest(tensors={}), index_of(manifest()))
    assert {p.key for p in problems} == {key for key in index_of(manifest()) if logical_key(key) is not None}


def test_digest_does_not_depend_on_order() -> None:
    index = index_of(manifest())
    turned = {k: replace(t, chunks=tuple(reversed(t.chunks))) for k, t in reversed(index.items())}
    assert metadata_digest(turned) == metadata_digest(index)


DIGEST_EDITS: dict[str, IndexEdit] = {
    "key": lambda i: i.update({"other.rowwise_data": i.pop("even.rowwise_data")}),
    "one key less": lambda i: i.pop("even.rowwise_data"),
    "dtype": changed("even.rowwise_data", dtype=torch.int8),
    "shape": changed("even.rowwise_data", shape=(8, 7)),
    "chunk": changed("even.rowwise_data", chunks=(Box((0, 0), (8, 6)),)),
    "chunk offset": changed(f"even.{SCALE}", chunks=(Box((1, 0), (1, 1)), Box((1, 0), (1, 1)))),
}


@pytest.mark.parametrize("edit", DIGEST_EDITS.values(), ids=DIGEST_EDITS.keys())
def test_digest_changes_with_any_component(edit: IndexEdit) -> None:
    index = index_of(manifest())
    before = metadata_digest(index)
    edit(index)
    assert metadata_digest(index) != before


def test_digest_leaves_other_tensors_alone() -> None:
    index = index_of(manifest())
    before = metadata_digest(index)
    del index["norm"]
    assert metadata_digest(index) == before


# From what ranks save


def record(offset: int, **changes: Any) -> FragmentRecord:
    base = FragmentRecord(
        "w", E4M3, "bfloat16", (8, 6), 0, Fragment(Box((offset, 0), (4, 6)), (0, 0)), ((SCALE, (1, 1)),), True
    )
    return replace(base, **changes)


def test_build_from_even_fragments_in_any_order() -> None:
    expected = {
        "w": TensorEntry(E4M3, "bfloat16", (8, 6), 0, EvenGrid((4, 6), {SCALE: (1, 1)}, (((2, 0),), ((1, 0),))))
    }
    for offsets in ((0, 4), (4, 0)):
        assert build_manifest(map(record, offsets), {}).tensors == expected


def test_build_keeps_runs_of_phases() -> None:
    records = [
        record(o, fragment=Fragment(Box((o, 0), (4, 6)), (o % 3, 0)), global_shape=(16, 6)) for o in (0, 4, 8, 12)
    ]
    grid = build_manifest(records, {}).tensors["w"].grid
    assert grid is not None
    assert grid.phases == (((1, 0), (1, 1), (1, 2), (1, 0)), ((1, 0),))


def test_build_from_uneven_fragments() -> None:
    boxes = [Box((5, 0), (3, 6)), Box((0, 0), (5, 6))]
    records = [record(0, fragment=Fragment(box, (0, 0)), even=False, slots=()) for box in boxes]
    entry = build_manifest(records, {}).tensors["w"]
    assert entry.grid is None
    assert [f.box for f in entry.uneven] == list(reversed(boxes))


def test_build_of_a_mixed_stack() -> None:
    layers = [record(o, key=f"w.layer_{layer}", stack=StackRef("w", layer, 4)) for layer in (3, 1) for o in (0, 4)]
    built = build_manifest(layers, {"torch": "2"})
    assert built.mixed == {"w": MixedStack(4, (1, 3))}
    assert set(built.tensors) == {"w.layer_1", "w.layer_3"}
    assert built.writer == {"torch": "2"}


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "scheme": {"scheme": E5M2},
    "nominal_dtype": {"nominal_dtype": "float16"},
    "global_shape": {"global_shape": (8, 7)},
    "prepended_axes": {"prepended_axes": 1},
    "slots": {"slots": ((SCALE, (2, 1)),)},
    "even": {"even": False},
}


@pytest.mark.parametrize(("name", "change"), CONTRADICTIONS.items(), ids=CONTRADICTIONS.keys())
@pytest.mark.parametrize("first", [0, 4])
def test_ranks_that_contradict_each_other(name: str, change: dict[str, Any], first: int) -> None:
    records = [record(first), record(4 - first, **change)]
    with pytest.raises(ManifestError, match=rf"w: found {name}"):
        build_manifest(records, {})
    with pytest.raises(ManifestError, match=rf"w: found {name}"):
        build_manifest(reversed(records), {})


def test_fragments_of_two_sizes_contradict_each_other() -> None:
    with pytest.raises(ManifestError, match="w: found"):
        build_manifest([record(0), record(4, fragment=Fragment(Box((4, 0), (2, 6)), (0, 0)))], {})


def test_two_phases_at_one_place_contradict_each_other() -> None:
    other = record(0, fragment=Fragment(Box((0, 3), (4, 3)), (1, 0)))
    mine = record(0, fragment=Fragment(Box((0, 0), (4, 3)), (0, 0)))
    below = [record(4, fragment=Fragment(Box((4, column), (4, 3)), (0, 0))) for column in (0, 3)]
    with pytest.raises(ManifestError, match="two phases at fragment 0 of axis 0"):
        build_manifest([mine, other, *below], {})


def test_component_keys_are_told_from_others() -> None:
    assert logical_key(component_key("a.b", SCALE)) == ("a.b", SCALE)
    assert logical_key(f"a.{SCALE}@0_5") == ("a", SCALE)
    for key in ("a.weight", SCALE, f"a.{SCALE}.x", f".{SCALE}", "a.amax"):
        assert logical_key(key) is None, key


def test_the_document_is_plain_data() -> None:
    document = manifest().to_json()
    assert json.loads(json.dumps(document)) == copy.deepcopy(document)
