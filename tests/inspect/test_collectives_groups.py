"""Groups of devices in every form that XLA prints."""

import pytest

import stepfold as sf
from stepfold.inspect.collectives import (
    connected_groups,
    differing_axes,
    group_axes,
    permute_pairs,
    replica_groups,
)

MESH = {"dp": 2, "tp": 4}


def sets(*groups):
    return tuple(map(frozenset, groups))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", sets({0, 1}, {2, 3})),
        ("{{0}}", sets({0})),
        ("[2,4]<=[8]", sets({0, 1, 2, 3}, {4, 5, 6, 7})),
        ("[4,2]<=[2,4]T(1,0)", sets({0, 4}, {1, 5}, {2, 6}, {3, 7})),
        ("[4,2]<=[2,2,2]T(1,0,2)", sets({0, 1}, {4, 5}, {2, 3}, {6, 7})),
        ("mesh['a'=2,'b'=4] {'b'}", sets({0, 1, 2, 3}, {4, 5, 6, 7})),
        ("mesh[a=2,b=4] {a}", sets({0, 4}, {1, 5}, {2, 6}, {3, 7})),
        ("mesh['a'=2,'b'=4] {'b','a'}", sets(set(range(8)))),
        ("mesh['a'=2,'b'=2] {}", sets({0}, {1}, {2}, {3})),
        (
            "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
            sets({0, 1, 2, 3}, {4, 5, 6, 7}),
        ),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", sets({0, 3}, {1, 2})),
        ("mesh['a'=8] {'a':(1)2}", sets({0, 4}, {1, 5}, {2, 6}, {3, 7})),
        ("mesh['a'=8] {'a':(2)2}", sets({0, 2}, {1, 3}, {4, 6}, {5, 7})),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", sets({0, 1, 4, 5}, {2, 3, 6, 7})),
    ],
)
def test_groups_in_each_form(text, expected):
    found = replica_groups(f", channel_id=1, replica_groups={text}, dimensions={{0}}")
    assert set(found) == set(expected)
    assert len(found) == len(expected)


def test_no_groups_mean_all_devices():
    assert replica_groups("replica_groups={}", partitions=4) == sets({0, 1, 2, 3})
    assert replica_groups("replica_groups={}", replicas=2, partitions=2) == sets({0, 1, 2, 3})


def test_a_group_of_replicas_may_mean_all_their_partitions():
    text = "channel_id=1, replica_groups={{0},{1}}, to_apply=%add"
    assert replica_groups(text, replicas=2, partitions=2) == sets({0, 1}, {2, 3})
    text += ", use_global_device_ids=true"
    assert replica_groups(text, replicas=2, partitions=2) == sets({0}, {1})


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(
        sf.ConfigError, match=r"replica_groups: expected lists, an iota or a mesh .*got 'replica_gr"
    ):
        replica_groups("replica_groups=<new>")


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tp",)),
        ("{{3,2,1,0},{7,6,5,4}}", ("tp",)),
        ("[1,8]<=[8]", ("dp", "tp")),
        ("{{0,1},{2,3},{4,5},{6,7}}", None),  # half of an axis
        ("{{0,1,2,3}}", None),  # not everywhere
        ("{{0,5},{1,4},{2,7},{3,6}}", None),  # diagonal
        ("[2,8]<=[16]", None),  # another mesh's
    ],
)
def test_axes_are_those_the_groups_run_along(text, axes):
    assert group_axes(replica_groups(f"replica_groups={text}"), MESH) == axes


@pytest.mark.parametrize(
    ("text", "axes", "devices"),
    [
        ("{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}", ("tp",), 4),
        ("{0,4},{4,0},{1,1}", ("dp",), 2),
        ("{0,5},{5,0}", ("dp", "tp"), 2),
        ("{0,9}", None, 2),
    ],
)
def test_axes_of_a_permute_are_those_its_pairs_differ_along(text, axes, devices):
    pairs = permute_pairs(f"source_target_pairs={{{text}}}")
    assert differing_axes(pairs, MESH) == axes
    assert max(map(len, connected_groups(pairs))) == devices
