"""`predict` gives the outputs of each example once, in order, and continues in files."""

import itertools
import os
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from tests import small

import stepfold as sf

PARAMS = {"w": np.float32([[1, -2], [3, 5], [-7, 4]])}


def data(count):
    rng = np.random.default_rng(count)
    x = rng.integers(-9, 9, (count, 3)).astype(np.float32)
    return {"x": x, "id": np.arange(count, dtype=np.int32)}


def step(params, batch):
    scores = batch["x"] @ params["w"]
    return {"scores": scores, "best": (scores.argmax(-1), batch["id"])}


def wanted(examples):
    scores = examples["x"] @ PARAMS["w"]
    return {"scores": scores, "best": (scores.argmax(-1).astype(np.int32), examples["id"])}


def same(found, examples):
    assert jax.tree.structure(found) == jax.tree.structure(wanted(examples))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, found, wanted(examples))


def on_mesh(devices):
    mesh = sf.make_mesh(devices=jax.devices()[:devices])
    return sf.sharding.place(PARAMS, jax.sharding.NamedSharding(mesh, P()))


def batches(examples, size=4, **options):
    return sf.batches(examples, size, **{"epochs": 1, "remainder": "pad", **options})


def read(files):
    arrays = [np.load(file) for file in files]
    return {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0].files}


def same_files(files, examples):
    expected = wanted(examples)
    expected = {
        "scores": expected["scores"], "best/0": expected["best"][0], "best/1": expected["best"][1]
    }  # fmt: skip
    found = read(files)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


# In memory


@given(
    count=st.integers(1, 30),
    size=st.integers(1, 4),
    devices=st.sampled_from([1, 2, 4, 8]),
    prefetches=st.booleans(),
)
def test_it_is_a_loop_over_the_examples(count, size, devices, prefetches):
    made = batches(data(count), size * devices)
    made = sf.prefetch(made) if prefetches else made
    same(sf.predict(step, on_mesh(devices), made), data(count))


@pytest.mark.parametrize("remainder", ["keep", "pad"])
@pytest.mark.parametrize("jitted", [False, True])
def test_the_last_batch_may_be_smaller_or_padded(remainder, jitted):
    made = batches(data(10), remainder=remainder)
    same(sf.predict(jax.jit(step) if jitted else step, PARAMS, made), data(10))


def test_it_begins_at_the_present_position():
    made = batches(data(10))
    next(made)
    same(sf.predict(step, PARAMS, made), {name: x[4:] for name, x in data(10).items()})


def test_an_example_that_its_own_mask_leaves_out_is_no_padding():
    examples = {**data(7), "mask": np.array([1, 0, 1, 1, 0, 0, 0])}
    same(sf.predict(step, PARAMS, batches(examples)), data(7))
    same(sf.predict(step, PARAMS, batches(examples, remainder="keep")), data(7))
    of_stream = batches(lambda: iter([{**data(1), "mask": 0}] * 3), 2, remainder="keep")
    flat = lambda params, batch: batch["id"][:, 0]
    assert sf.predict(flat, PARAMS, of_stream).tolist() == [0, 0, 0]


WRAPS = {
    "prefetch": sf.prefetch,
    "workers": lambda made: sf.workers(made, 0),
    "both": lambda made: sf.prefetch(sf.workers(made, 0)),
    "one worker": lambda made: sf.workers(made, 1),
}


@pytest.mark.parametrize("kind", small.full_but(["prefetch", "workers", "both"], WRAPS))
@pytest.mark.parametrize("files", [False, True])
def test_no_wrapper_leaves_out_an_example(kind, files, tmp_path):
    wrap = WRAPS[kind]
    examples = {**data(10), "mask": np.arange(10) % 3 > 0}
    options = {"to": tmp_path, "shard_rows": 4} if files else {}
    found = sf.predict(step, PARAMS, wrap(batches(examples)), **options)
    if files:
        found[-1].unlink()  # the rows of a folder are found again
        same_files(sf.predict(step, PARAMS, wrap(batches(examples)), **options), data(10))
    else:
        same(found, data(10))
    skipping = wrap(batches(examples).without([(0, 1)]))
    same(sf.predict(step, PARAMS, skipping), {name: x[4:] for name, x in data(10).items()})


def test_rows_of_other_batches_are_left_out_by_their_mask():
    examples = data(8)
    masks = np.bool_([[1, 1, 0, 1], [0, 0, 1, 0]])
    made = [
        {name: x[4 * i : 4 * i + 4] for name, x in examples.items()} | {"mask": masks[i]}
        for i in (0, 1)
    ]
    kept = {name: x[masks.ravel()] for name, x in examples.items()}
    same(sf.predict(step, PARAMS, made), kept)
    tokens = [{**each, "mask": np.outer(each["mask"], [True, False])} for each in made]
    same(sf.predict(step, PARAMS, tokens), kept)
    same(sf.predict(step, on_mesh(4), tokens), kept)


def test_a_padded_stream_is_read_to_its_end():
    examples = data(7)
    rows = lambda: ({name: x[i] for name, x in examples.items()} for i in range(7))
    same(sf.predict(step, PARAMS, batches(rows)), examples)


def test_outputs_are_no_views_of_a_buffer_that_the_source_writes_again():
    buffer = np.zeros((2, 3), np.float32)

    def reuse():
        for i in range(4):
            buffer[:] = i
            yield buffer

    found = sf.predict(lambda params, batch: batch, PARAMS, reuse())
    assert found[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_batches_without_a_real_row_give_empty_arrays():
    made = [{**data(4), "mask": np.zeros(4, bool)}]
    found = sf.predict(step, PARAMS, made)
    assert found["scores"].shape == (0, 2)


def test_batches_may_be_placed_already_and_the_step_compiled():
    state = on_mesh(4)
    mesh = state["w"].sharding.mesh
    made = (sf.shard_batch(batch, mesh) for batch in batches(data(10)))
    same(sf.predict(step, state, made), data(10))
    train_state = sf.TrainState(
        jnp.int32(0), jax.tree.map(jnp.asarray, PARAMS), (), (), jax.random.key(0)
    )
    compiled = sf.compile_step(
        lambda state, batch: step(state.params, batch), train_state, next(batches(data(10))),
        donate=False,
    )  # fmt: skip
    same(sf.predict(compiled, train_state, batches(data(10))), data(10))


def test_it_compiles_once_and_runs_under_a_transfer_guard(compiles, tmp_path):
    jitted = jax.jit(step)
    state = jax.device_put(PARAMS)
    sf.predict(jitted, state, batches(data(10)))
    compiles.clear()
    with jax.transfer_guard("disallow"):
        same(sf.predict(jitted, state, batches(data(10))), data(10))
        assert compiles == []
        same_files(sf.predict(jitted, state, batches(data(10)), to=tmp_path), data(10))


# What is refused

ROWS = "an array whose first axis has the 4 rows of the batch"


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda x: x.sum(), rf"^outputs: expected {ROWS}, got float32\[\]; return one output for"),
        (lambda x: {"a": x, "b": [x, x.sum(0)]}, rf"^outputs/b/1: expected {ROWS}, got float32\[3"),
        (lambda x: {"loss": sf.mean(x)}, rf"^outputs/loss/total: expected {ROWS}, got float32\[\]"),
        (lambda x: x.T, rf"^outputs: expected {ROWS}, got float32\[3,4\]"),
        (lambda x: {}, "^step: expected arrays with the rows of the batch as outputs, got dict {}"),
        (lambda x: None, "^step: expected arrays with .* as outputs, got NoneType None"),
        (
            lambda x: {"key": jax.random.split(jax.random.key(0), 4)},
            r"^outputs/key: expected an array of numbers, got key<fry>\[4\]; return jax.random.key",
        ),
    ],
)
def test_outputs_without_rows_are_refused_with_their_path(outputs, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.predict(lambda params, batch: outputs(batch["x"]), PARAMS, batches(data(10)))


def test_outputs_of_another_form_than_the_first_are_refused():
    made = [np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)]
    words = r"^outputs/a: expected float32\[rows,3\], as in the first batch, got float32\[rows,4\]"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.predict(lambda params, batch: {"a": batch}, PARAMS, made)
    names = iter("ab")
    fickle = lambda params, batch: {next(names): batch}
    words = r"^outputs/a: expected float32\[rows,3\], as in the first batch, got no such output"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.predict(fickle, PARAMS, made)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ([], sf.errors.DataError, "^predict: expected at least one batch, got none"),
        (
            None,
            sf.errors.ConfigError,
            "^batches: expected an iterable of batches, got NoneType None; "
            "sf.batches.data, 256, epochs=1, remainder='pad'. makes one",
        ),
        (data(4), sf.errors.ConfigError, "^batches: expected an iterable of batches, got dict"),
        (
            sf.batches(data(4), 2),
            sf.errors.ConfigError,
            "^predict: expected batches that end, .*='pad'",
        ),
        (
            sf.batches(sf.pack(sf.mix([([[1, 2], [3]], 1)]), length=4), 2, epochs=1),
            sf.errors.ConfigError,
            "^predict: expected batches that end, ",
        ),
        (
            [{"x": np.zeros((4, 3)), "id": np.zeros(3)}],
            sf.errors.DataError,
            r"^predict: expected the same number of rows in every leaf, got batch/id float64\[3\]",
        ),
        ([{"x": 1.0}], sf.errors.DataError, "^predict: expected batches of arrays with rows, got "),
        ([{"x": "text"}], sf.errors.DataError, "^batch/x: expected an array, got str"),
    ],
)
def test_what_is_no_batches_with_rows_is_refused(made, error, message):
    with pytest.raises(error, match=message):
        sf.predict(step, PARAMS, made)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"seed": 0, "remainder": "keep"}, "a shuffled order by seed=0; give "),
        ({"remainder": "drop"}, "remainder='drop', which leaves out the last of 10; give "),
        ({"size": [(0, 5), (1, 4)], "remainder": "drop"}, "remainder='drop'"),
        ({"seed": 0, "remainder": "drop"}, "a shuffled order by seed=0 and remainder='drop'"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda made: made, sf.prefetch])
def test_batches_in_another_order_or_without_the_last_rows_are_refused(options, got, wrap):
    words = f"^predict: expected batches of all rows, in order, got {got}.*epochs=1, remainder='pa"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.predict(step, PARAMS, wrap(batches(data(10), **options)))
    whole = wrap(batches(data(10), 5, remainder="drop"))
    same(sf.predict(step, PARAMS, whole), data(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": None}, "^step: expected a function of a state and a batch, got NoneType"),
        ({"shard_rows": 0}, "^shard_rows: expected an integer of at least 1, got 0"),
        ({"to": 3}, "^to: expected a path, got 3"),
        ({"to": "s3://bucket/x"}, "^to: expected a path on a file system, got 's3:"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    arguments = {"step": step, "state": PARAMS, "batches": batches(data(4)), **options}
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.predict(**arguments)


def test_a_state_that_was_donated_is_refused():
    gone = {"w": jnp.asarray(PARAMS["w"])}
    jax.jit(lambda state: state, donate_argnums=0)(gone)
    with pytest.raises(sf.errors.ConfigError, match="^state/w, …: the arrays were donated"):
        sf.predict(step, gone, batches(data(4)))


# In files


def row_names(folder):
    return [path.name for path in sorted(folder.glob("rows-*"))]


@given(
    count=st.integers(1, 30),
    size=st.sampled_from([1, 3, 8, 16]),
    shard_rows=st.integers(1, 12),
    remainder=st.sampled_from(["keep", "pad"]),
)
def test_files_hold_what_is_returned_without_them(
    count, size, shard_rows, remainder, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("files") / "new" / "folder"
    made = batches(data(count), size, remainder=remainder)
    files = sf.predict(step, PARAMS, made, to=folder, shard_rows=shard_rows)
    assert [len(np.load(file)["scores"]) for file in files] == [
        min(shard_rows, count - start) for start in range(0, count, shard_rows)
    ]
    same_files(files, data(count))
    assert sorted(os.listdir(folder)) == sorted(
        [*(file.name for file in files), "predictions.json"]
    )


def test_a_single_array_is_called_output(tmp_path):
    (file,) = sf.predict(lambda params, batch: batch["id"], PARAMS, batches(data(5)), to=tmp_path)
    assert file.name == "rows-000000000000-000000000005.npz"
    assert np.load(file)["output"].tolist() == [0, 1, 2, 3, 4]


def counted(calls):
    """Return a step that counts its calls, each a batch, and is compiled as a part of it."""
    inner = jax.jit(step)

    class Counted:
        lower = None  # as that of a jitted function

        def __call__(self, params, batch):
            calls.append(np.asarray(batch["id"]).tolist())
            return inner(params, batch)

    return Counted()


class Cut(Exception):
    pass


def interrupted(made, after):
    """Yield batches, and raise after some of them."""
    for number, batch in enumerate(made):
        if number == after:
            raise Cut
        yield batch


class CutSource:
    """A source that fails at an example, until it is mended."""

    def __init__(self, examples, at):
        self.examples, self.at, self.reads = examples, at, []

    def __len__(self):
        return len(self.examples["id"])

    def __getitem__(self, index):
        self.reads.append(index)
        if index == self.at:
            raise Cut
        return {name: x[index] for name, x in self.examples.items()}


@given(
    at=st.integers(0, 29),
    size=st.integers(1, 7),
    shard_rows=st.integers(4, 12),
    remainder=st.sampled_from(["keep", "pad"]),
    start=st.integers(0, 2),
    prefetches=st.booleans(),
)
def test_an_interrupted_call_continues(
    at, size, shard_rows, remainder, start, prefetches, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("files")
    source, calls = CutSource(data(30), at), []

    def make(size):
        made = batches(source, size, remainder=remainder, start=start)
        return sf.prefetch(made) if prefetches else made

    first = {name: x[start * size :] for name, x in data(30).items()}
    options = {"to": folder, "shard_rows": shard_rows}
    if at >= start * size:
        with pytest.raises(Cut):
            sf.predict(step, PARAMS, make(size), **options)
    source.at = None
    done = sum(len(np.load(folder / name)["scores"]) for name in row_names(folder))
    files = sf.predict(counted(calls), PARAMS, make(size), **options)
    same_files(files, first)
    assert calls[0][0] <= start * size + done if calls else done == len(first["id"])
    assert not calls or calls[0][-1] >= start * size + done
    before = {file: file.read_bytes() for file in files}
    assert sf.predict(step, PARAMS, make(size), **options) == files
    whole = sf.predict(step, PARAMS, make(size), to=folder / "whole", shard_rows=shard_rows)
    assert [file.read_bytes() for file in whole] == list(before.values())


def test_another_batch_size_and_other_devices_may_continue(tmp_path):
    source = CutSource(data(30), 13)
    with pytest.raises(Cut):
        sf.predict(step, PARAMS, batches(source, 4), to=tmp_path, shard_rows=5)
    source.at, calls = None, []
    assert len(row_names(tmp_path)) == 1  # outputs are read one batch late
    made = batches(source, 8)
    files = sf.predict(counted(calls), on_mesh(8), made, to=tmp_path, shard_rows=7)
    same_files(files, data(30))
    assert [len(each) for each in calls] == [8] * 4
    assert [file.name for file in files][1] == "rows-000000000005-000000000012.npz"


@pytest.mark.parametrize("form", ["stream", "list", "masked"])
def test_batches_that_cannot_seek_are_read_again_but_not_computed(form, tmp_path):
    examples, calls = data(22), []

    def make(cut):
        rows = lambda: ({name: x[i] for name, x in examples.items()} for i in range(22))
        if form == "stream":
            stop = 13 if cut else 22
            failing = lambda: itertools.chain(itertools.islice(rows(), stop), fail() if cut else ())
            return batches(failing)
        made = list(batches(rows))
        if form == "list":
            made = [{name: x[each["mask"]] for name, x in each.items()} for each in made]
        return interrupted(made, 4) if cut else made

    def fail():
        raise Cut
        yield

    with pytest.raises(Cut):
        sf.predict(step, PARAMS, make(True), to=tmp_path, shard_rows=3)
    done = len(row_names(tmp_path)) * 3
    assert done > 0
    same_files(sf.predict(counted(calls), PARAMS, make(False), to=tmp_path, shard_rows=3), examples)
    assert calls[0][0] == done // 4 * 4
    calls.clear()
    files = sf.predict(counted(calls), PARAMS, make(False), to=tmp_path)
    same_files(files, examples)
    assert calls == []


def test_rows_of_a_state_that_was_complete_are_not_computed_again(tmp_path):
    calls = []
    first = sf.predict(counted(calls), PARAMS, batches(data(10)), to=tmp_path, shard_rows=4)
    before = [(file.stat().st_mtime_ns, file.read_bytes()) for file in first]
    calls.clear()
    assert sf.predict(counted(calls), PARAMS, batches(data(10)), to=tmp_path) == first
    assert [(file.stat().st_mtime_ns, file.read_bytes()) for file in first] == before
    assert calls == []


def test_no_real_row_makes_no_file(tmp_path):
    made = [{**data(4), "mask": np.zeros(4, bool)}]
    assert sf.predict(step, PARAMS, made, to=tmp_path) == []
    assert sf.predict(step, PARAMS, made, to=tmp_path) == []


OTHER = "to: expected a folder of predictions of the same"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": {"w": PARAMS["w"] + np.float32(1e-6)}}, f"{OTHER} state, .*state/w differ"),
        ({"state": {"w": PARAMS["w"][::-1].copy()}}, f"{OTHER} state, .*state/w differ; give an"),
        ({"state": {**PARAMS, "b": np.zeros(2)}}, f"{OTHER} state, .*state/b differ"),
        ({"start": 1}, f"{OTHER} data, .*start, first differ"),
        ({"remainder": "keep"}, f"{OTHER} data, .*remainder, first differ"),
        ({"data": data(31)}, f"{OTHER} data, .*length, first differ"),
        ({"data": {**data(30), "x": -data(30)["x"]}}, f"{OTHER} data, .*first differ"),
    ],
)
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_folder_of_other_predictions_is_refused(change, message, is_complete, tmp_path):
    if is_complete:
        sf.predict(step, PARAMS, batches(data(30)), to=tmp_path, shard_rows=5)
    else:
        made = batches(CutSource(data(30), 20))
        with pytest.raises(Cut):
            sf.predict(step, PARAMS, made, to=tmp_path, shard_rows=5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments = {"state": PARAMS, "data": data(30), **change}
    options = {name: x for name, x in arguments.items() if name in ("start", "remainder")}
    made = batches(arguments["data"], **options)
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.predict(step, arguments["state"], made, to=tmp_path, shard_rows=5)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_batches_that_skip_some_continue_and_are_known_again(tmp_path):
    make = lambda *skip: batches(data(30), 4).without(skip)
    flat = lambda params, batch: batch["id"]
    files = sf.predict(flat, PARAMS, make((1, 3), (5, 6)), to=tmp_path, shard_rows=7)
    files[-1].unlink()
    assert sf.predict(flat, PARAMS, make((1, 3), (5, 6)), to=tmp_path, shard_rows=7) == files
    expected = np.concatenate([b["id"][b["mask"]] for b in make((1, 3), (5, 6))])
    assert np.array_equal(read(files)["output"], expected)
    with pytest.raises(sf.errors.ConfigError, match=f"{OTHER} data, got one whose skipped differ"):
        sf.predict(flat, PARAMS, make((1, 2)), to=tmp_path)


def test_a_folder_of_other_outputs_is_refused(tmp_path):
    with pytest.raises(Cut):
        sf.predict(step, PARAMS, batches(CutSource(data(30), 20)), to=tmp_path, shard_rows=5)
    other = lambda params, batch: {"scores": batch["id"]}
    with pytest.raises(
        sf.errors.ConfigError, match=f"{OTHER} outputs, .*scores, best/0, best/1 differ"
    ):
        sf.predict(other, PARAMS, batches(data(30)), to=tmp_path)


@pytest.mark.parametrize(("rows", "got"), [(16, "got 16"), (24, "got more")])
def test_other_counts_of_batches_that_do_not_know_theirs_are_refused(rows, got, tmp_path):
    whole = data(24)
    make = lambda rows: [
        {name: x[i : i + 4] for name, x in whole.items()} for i in range(0, rows, 4)
    ]
    sf.predict(step, PARAMS, make(20), to=tmp_path, shard_rows=5)
    with pytest.raises(
        sf.errors.ConfigError, match=f"^to: expected a folder of these data, .* 20 .*{got};"
    ):
        sf.predict(step, PARAMS, make(rows), to=tmp_path, shard_rows=5)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            lambda x: {"a": x.astype(jnp.bfloat16)},
            "^outputs/a: expected a dtype of numpy's, got bfloat16; cast it in the step",
        ),
        (
            lambda x: {"a/b": x, "a": {"b": x}},
            r"^outputs: expected outputs with different paths, got \['a/b'\]; rename some",
        ),
    ],
)
def test_outputs_that_files_cannot_hold_are_refused(outputs, message, tmp_path):
    cast = lambda params, batch: outputs(batch["x"])
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.predict(cast, PARAMS, batches(data(5)), to=tmp_path)
    assert os.listdir(tmp_path) == []
    assert jax.tree.leaves(sf.predict(cast, PARAMS, batches(data(5))))[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("leaf", "changed"),
    [
        (np.arange(6, dtype=np.uint8), np.array([0, 1, 2, 3, 5, 4], np.uint8)),
        (np.ones((2, 3), np.float16), np.ones((2, 3), np.float16) + np.float16(0.001)),
        (np.ones(3, jnp.bfloat16), np.array([1, 1, 1.01], jnp.bfloat16)),
        (np.bool_([1, 0]), np.bool_([0, 1])),
        (np.complex64([1 + 2j]), np.complex64([1 - 2j])),
        (np.zeros(2, np.float32), np.float32([0, -0.0])),
        (np.int32(7), np.int32(8)),
        (3, 4),
    ],
)
def test_a_state_of_any_dtype_is_known_again(leaf, changed, tmp_path):
    run = lambda leaf: sf.predict(
        lambda state, batch: batch["id"], {"x": leaf}, batches(data(5)), to=tmp_path
    )
    assert run(leaf) == run(leaf)
    with pytest.raises(sf.errors.ConfigError, match=r"state/x differ"):
        run(changed)


def test_a_state_is_known_again_on_any_mesh_with_its_key(tmp_path):
    key = jax.random.key(0)
    run = lambda state: sf.predict(
        lambda s, batch: batch["id"], state, batches(data(8), 8), to=tmp_path
    )
    state = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "key": key}
    plan = {"w": jax.sharding.NamedSharding(sf.make_mesh(), P(None, "fsdp"))}
    plan["key"] = jax.sharding.NamedSharding(sf.make_mesh(), P())
    assert run(state) == run(jax.device_put(state, plan))
    with pytest.raises(sf.errors.ConfigError, match=r"state/key differ"):
        run({**state, "key": jax.random.key(1)})


# Damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip,
    "other": lambda path: np.savez(path, scores=np.zeros((5, 2), np.float32)),
    "fewer": lambda path: np.savez(path, **{n: x[:3] for n, x in np.load(path).items()}),
}


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_last_file_is_refused_and_may_be_deleted(damage, is_complete, tmp_path):
    source = CutSource(data(30), None if is_complete else 20)
    with nullcontext() if is_complete else pytest.raises(Cut):
        sf.predict(step, PARAMS, batches(source), to=tmp_path, shard_rows=5)
    last = tmp_path / row_names(tmp_path)[-1]
    damage(last)
    with pytest.raises(
        sf.errors.CheckpointError, match=f"{last.name}: expected 5 rows, got .*; delete it"
    ):
        sf.predict(step, PARAMS, batches(data(30)), to=tmp_path, shard_rows=5)
    last.unlink()
    same_files(sf.predict(step, PARAMS, batches(data(30)), to=tmp_path, shard_rows=5), data(30))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_that_is_not_the_last_is_refused(damage, tmp_path):
    predict = lambda: sf.predict(step, PARAMS, batches(data(30)), to=tmp_path, shard_rows=5)
    files = predict()
    damage(files[2])
    text = f"{files[2].name}: expected 5 rows, got .*; delete it and the files after it, and their"
    with pytest.raises(sf.errors.CheckpointError, match=text):
        predict()
    for path in files[2:]:
        path.unlink()
    same_files(predict(), data(30))


def test_a_relative_folder_is_that_of_the_call(tmp_path, monkeypatch):
    class Moves:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            os.chdir("/")
            return {name: x[index] for name, x in data(5).items()}

    monkeypatch.chdir(tmp_path)
    files = sf.predict(step, PARAMS, batches(Moves()), to="out")
    assert files == [tmp_path / "out" / "rows-000000000000-000000000005.npz"]
    same_files(files, data(5))


def test_missing_files_are_refused(tmp_path):
    sf.predict(step, PARAMS, batches(data(30)), to=tmp_path, shard_rows=10)
    first, middle, last = (tmp_path / name for name in row_names(tmp_path))
    kept = middle.read_bytes()
    middle.unlink()
    with pytest.raises(
        sf.errors.CheckpointError, match=f"has no row 10 before {last.name}; delete"
    ):
        sf.predict(step, PARAMS, batches(data(30)), to=tmp_path)
    middle.write_bytes(kept)
    last.unlink()
    assert sf.predict(step, PARAMS, batches(data(30)), to=tmp_path, shard_rows=10)[-1] == last
    assert middle.read_bytes() == kept
    same_files([first, middle, last], data(30))
    (tmp_path / "predictions.json").unlink()
    with pytest.raises(sf.errors.ConfigError, match=f"got {first.name} without predictions.json"):
        sf.predict(step, PARAMS, batches(data(30)), to=tmp_path)


def test_other_counts_after_a_file_was_deleted_are_refused(tmp_path):
    make = lambda rows: [
        {name: x[i : i + 4] for name, x in data(24).items()} for i in range(0, rows, 4)
    ]
    sf.predict(step, PARAMS, make(20), to=tmp_path, shard_rows=10)[-1].unlink()
    with pytest.raises(
        sf.errors.ConfigError, match="^to: expected 20 rows, as before, got 24; give"
    ):
        sf.predict(step, PARAMS, make(24), to=tmp_path, shard_rows=10)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b"\xff", b"{}"])
def test_a_damaged_index_is_refused(content, tmp_path):
    sf.predict(step, PARAMS, batches(data(30)), to=tmp_path)
    (tmp_path / "predictions.json").write_bytes(content)
    with pytest.raises(
        sf.errors.CheckpointError, match="predictions.json: expected an index of predict"
    ):
        sf.predict(step, PARAMS, batches(data(30)), to=tmp_path)


def test_a_folder_may_have_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".rows-000000000000-000000000004.npz.part").write_text("of a killed call")
    sf.predict(step, PARAMS, batches(data(4)), to=tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".npz", ".txt"]


def test_two_calls_do_not_write_to_one_folder(tmp_path):
    def nested(params, batch):
        jax.debug.callback(again)
        return step(params, batch)

    errors = []

    def again():
        try:
            sf.predict(lambda params, batch: batch["id"], PARAMS, batches(data(4)), to=tmp_path)
        except sf.errors.CheckpointError as error:
            errors.append(str(error))

    sf.predict(nested, PARAMS, batches(data(4)), to=tmp_path)
    jax.effects_barrier()
    assert "to: another call of predict writes to" in errors[0]
