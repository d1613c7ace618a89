"""sharding/manifest.py: what the file says, every kind of damage, and what ranks' records become."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.errors import ManifestError
from megatron_fp8_dist.sharding.layout import Box, EvenGrid, Fragment, TensorEntry, component_key, logical_key
from megatron_fp8_dist.sharding.manifest import Manifest, MixedStack
from megatron_fp8_dist.sharding.records import FragmentRecord, StackRef, build_manifest
from megatron_fp8_dist.sharding.stored import check_against_index
from tests.manifests import E4M3, E5M2, ROWWISE, SCALE, manifest

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")


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
    "slots of another number": (
        lambda d: tensor(d, "even")["slots"].update({SCALE: [2, 1]}),
        r"even -> slots: found \[2, 1\], expected slots for fragments of \[4, 6\]",
    ),
    "more slots than blocks": (
        lambda d: tensor(d, "blocks")["slots"].update({SCALE: [1, 4, 2]}),
        r"blocks -> slots: found \[1, 4, 2\]",
    ),
    "slots on a prepended axis": (
        lambda d: tensor(d, "blocks")["slots"].update({SCALE: [2, 3, 2]}),
        r"blocks -> slots: found \[2, 3, 2\]",
    ),
    "fragments joined": (
        lambda d: tensor(d, "even").update(fragment_shape=[8, 6], phases=[[[1, 0]], [[1, 0]]], slots={SCALE: [2, 1]}),
        r"even -> slots: found \[2, 1\], expected slots for fragments of \[8, 6\]",
    ),
    "prepended axes of a tensor that is not stacked": (
        lambda d: tensor(d, "even").update(prepended_axes=1),
        r"even -> prepended_axes: found 1, expected axes along which every fragment has extent 1",
    ),
    "prepended axes of uneven fragments": (
        lambda d: tensor(d, "uneven").update(prepended_axes=1),
        r"uneven -> prepended_axes: found 1, expected axes along which",
    ),
    "runs beyond all memory": (
        lambda d: tensor(d, "even")["phases"].__setitem__(0, [[10**12, 0]]),
        r"even -> phases -> axis 0: .*fragments of 4 that fill 8",
    ),
    "runs of fragments without elements": (
        lambda d: tensor(d, "even").update(fragment_shape=[0, 6], phases=[[[10**12, 0]], [[1, 0]]]),
        r"even -> phases -> axis 0: .*fragments of 0 that fill 8",
    ),
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


PLAIN = st.none() | st.booleans() | st.integers(-2, 17) | st.floats(-2, 17) | st.text(max_size=3) | st.just("bfloat16")
JSON_VALUES = (
    PLAIN
    | st.lists(PLAIN | st.lists(PLAIN, max_size=2), max_size=3)
    | st.dictionaries(st.sampled_from(["name", "offset", "x"]), PLAIN, max_size=2)
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


# From what ranks save


def record(offset: int, **changes: Any) -> FragmentRecord:
    base = FragmentRecord(
        "w", E4M3, "bfloat16", (8, 6), 0, ROWWISE, Fragment(Box((offset, 0), (4, 6)), (0, 0)), ((SCALE, (1, 1)),), True
    )
    return replace(base, **changes)


def test_build_from_even_fragments_in_any_order() -> None:
    expected = {
        "w": TensorEntry(
            E4M3, "bfloat16", (8, 6), 0, ROWWISE, EvenGrid((4, 6), {SCALE: (1, 1)}, (((2, 0),), ((1, 0),)))
        )
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


def part(offset: int, size: int, **changes: Any) -> FragmentRecord:
    return record(0, fragment=Fragment(Box((offset, 0), (size, 6)), (0, 0)), **changes)


NOT_COVERING: dict[str, list[FragmentRecord]] = {
    "one missing": [record(0)],
    "one twice": [record(0), record(4), record(4)],
    "one twice and one missing": [record(0), record(0)],
    "not a whole number": [record(0, global_shape=(9, 6)), record(4, global_shape=(9, 6))],
    "uneven, one missing": [part(0, 3, even=False, slots=()), part(5, 3, even=False, slots=())],
    "uneven, overlapping": [part(0, 5, even=False, slots=()), part(4, 4, even=False, slots=())],
}


@pytest.mark.parametrize("records", NOT_COVERING.values(), ids=NOT_COVERING.keys())
def test_fragments_must_fill_the_tensor(records: list[FragmentRecord]) -> None:
    with pytest.raises(ManifestError, match=rf"w: found {len(records)} fragments .* fragments that fill \[\d, 6\]"):
        build_manifest(records, {})


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
