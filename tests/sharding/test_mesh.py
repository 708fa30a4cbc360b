"""`make_mesh` makes the mesh that was asked for, or names those that fit."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import stepfold as sf


@dataclass(frozen=True)
class Device:
    """What mesh_utils asks of a device."""

    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@dataclass(frozen=True)
class Unsliced:
    """A device of a platform that knows no slices, as a GPU is."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def ids(mesh):
    return [[device.id for device in row] for row in mesh.devices]


def test_all_devices_are_fsdp_by_default_on_axes_that_leave_the_rest_to_the_compiler():
    mesh = sf.make_mesh()
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "tp": 1, "sp": 1}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert mesh.axis_types == (AxisType.Auto,) * 4


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ((1, -1, 1, 1), (1, 8, 1, 1)),
        ((2, -1, 2, 1), (2, 2, 2, 1)),
        ((-1, 1, 1, 8), (1, 1, 1, 8)),
        ((2, 2, 2, 1), (2, 2, 2, 1)),
        ([4, 1, -1, 1], (4, 1, 2, 1)),
    ],
)
def test_minus_one_takes_what_is_left(dims, shape):
    assert tuple(sf.make_mesh(dims).shape.values()) == shape


def test_names_are_ones_own_and_as_many_as_wanted():
    mesh = sf.make_mesh((np.int64(-1), 2), ["data", "model"])
    assert mesh.axis_names == ("data", "model")
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]  # the last axis has neighbours
    with pytest.raises(ValueError, match=r"expected names that differ, got \('a', 'a'"):
        sf.make_mesh((2, 4), ("a", "a"))


def test_a_mesh_may_be_of_some_devices():
    some = jax.devices()[2:6]
    mesh = sf.make_mesh((2, -1, 1, 1), devices=iter(some))
    assert list(mesh.devices.flat) == some
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 1, "sp": 1}
    with pytest.raises(sf.errors.ShardingError, match="expected at least one device, got none"):
        sf.make_mesh(devices=[])


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8, -1]), min_size=1, max_size=4))
def test_dims_give_a_mesh_of_all_devices_or_say_what_would(dims):
    names = "abcd"[: len(dims)]
    try:
        mesh = sf.make_mesh(dims, names)
    except sf.errors.ShardingError as error:
        fixed = math.prod(size for size in dims if size != -1)
        assert dims.count(-1) > 1 or 8 % fixed or (fixed != 8 and -1 not in dims)
        if "nearest" in str(error):
            first = str(error).split("nearest that do: (")[1].split(")")[0].rstrip(",")
            assert math.prod(map(int, first.split(","))) == 8
    else:
        assert mesh.size == 8
        assert all(size in (-1, got) for size, got in zip(dims, mesh.shape.values(), strict=True))


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            (3, -1, 1, 1),
            r"^dims=\(3, -1, 1, 1\) over \('dp', 'fsdp', 'tp', 'sp'\) does not fit the 8 devices "
            r"there are; nearest that do: \(4, 2, 1, 1\), \(2, 4, 1, 1\), .*, or give other "
            r"devices=$",
        ),
        ((16, -1, 1, 1), r"nearest that do: \(8, 1, 1, 1\), "),
        ((2, 2, 1, 1), r"does not fit the 8 devices there are; nearest that do: \(.*\)"),
        ((1, 1, 1, 6), r"nearest that do: \(1, 1, 1, 8\)"),
        ((-1, -1, 1, 1), r"^dims: expected positive sizes, one at most -1, got \(-1, -1, 1, 1\)$"),
        ((0, -1, 1, 1), r"dims: expected positive sizes, one at most -1, got \(0, -1"),
        ((-2, 1, 1, 1), r"dims: expected positive sizes, one at most -1, got \(-2, 1"),
        ((2.0, -1, 1, 1), r"dims: expected positive sizes, one at most -1, got \(2.0, -1"),
        (("2", -1, 1, 1), r"dims: expected positive sizes, one at most -1, got \('2', -1"),
        ((None, 8, 1, 1), r"dims: expected positive sizes, one at most -1, got \(None, 8"),
        ((1, -1), r"dims: expected one size for each of \('dp', 'fsdp', 'tp', 'sp'\), got \(1, -1"),
    ],
)
def test_dims_that_cannot_be_are_refused(dims, message):
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.make_mesh(dims)


@pytest.mark.parametrize("dcn_dims", [(1, 1, 1, 1), (-1, 1, 1, 1), (1, 1, 1, -1)])
def test_one_slice_is_the_mesh_within_it(dcn_dims):
    assert sf.make_mesh((2, -1, 1, 1), dcn_dims=dcn_dims) == sf.make_mesh((2, -1, 1, 1))


@pytest.mark.parametrize(
    "devices",
    [
        [Device(i, slice_index=i // 4) for i in range(8)],
        [Device(i, process_index=i // 4) for i in range(8)],
        [Unsliced(i, process_index=i // 4) for i in range(8)],
        [Device(i, process_index=i // 2, slice_index=i // 4) for i in range(8)],
    ],
    ids=["slices", "processes", "no slices", "slices of two processes"],
)
def test_slices_lie_along_the_axes_of_dcn_dims(devices):
    outer = sf.make_mesh((1, -1), ("dp", "tp"), dcn_dims=(2, 1), devices=devices)
    assert ids(outer) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    inner = sf.make_mesh((2, 2), ("dp", "tp"), dcn_dims=(1, -1), devices=devices)
    assert ids(inner) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert dict(inner.shape) == {"dp": 2, "tp": 4}


def test_slices_need_not_be_in_order():
    devices = [Device(i, slice_index=i % 2) for i in range(8)]
    mesh = sf.make_mesh((1, -1), ("dp", "tp"), dcn_dims=(2, 1), devices=devices)
    assert ids(mesh) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("dims", "dcn_dims", "slices", "message"),
    [
        ((2, 2), (1, -1), (3, 3, 2), r"^dcn_dims: expected slices of one size, got slices of \["),
        ((2, 2), (3, 1), (4, 4), r"^dcn_dims=\(3, 1\) over .* does not fit the 2 slices there are"),
        ((2, 2), (3, -1), (4, 4), r"nearest that do: \(2, 1\), \(1, 2\)"),
        ((3, 1), (2, 1), (4, 4), r"^dims=\(3, 1\) over .* does not fit the 4 devices of a slice"),
        ((1, -1), (2,), (4, 4), r"^dcn_dims: expected one size for each of \('a', 'b'\), got \(2,"),
        ((1, -1), (0, 2), (4, 4), r"^dcn_dims: expected positive sizes, one at most -1, got \(0,"),
        ((1, -1), (-1, -1), (4, 4), r"^dcn_dims: expected positive sizes, one at most -1"),
    ],
)
def test_slices_that_cannot_be_arranged_are_refused(dims, dcn_dims, slices, message):
    of = [index for index, count in enumerate(slices) for _ in range(count)]
    devices = [Device(i, slice_index=index) for i, index in enumerate(of)]
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.make_mesh(dims, ("a", "b"), dcn_dims=dcn_dims, devices=devices)


@pytest.mark.parametrize("use", ["make_sharding", "shard_batch"])
def test_what_is_no_mesh_is_refused(use):
    with pytest.raises(
        sf.errors.ShardingError,
        match=r"mesh: expected a jax.sharding.Mesh, got .*; sf.make_mesh\(\) makes one",
    ):
        getattr(sf, use)({"x": np.ones((8, 2))}, "mesh")
