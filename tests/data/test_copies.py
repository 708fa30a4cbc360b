"""No function of a user can change a source, and no buffer that is filled again changes a batch."""

import collections
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Example:
    x: Any


class Tensor:
    """What torch's tensors have of an array."""

    def __init__(self, value):
        self.array = np.array(value)

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __iadd__(self, other):
        self.array += other
        return self

    def clone(self):
        return Tensor(self.array)


def to_dict(example):
    return {"x": example.x}


def tenth(example):
    example["x"] /= 10
    return example


def nested(example):
    example["in"]["x"] += 1
    return example


def grown(example):
    example["ids"].append(0)
    return {"n": len(example["ids"])}


def paired(example):
    example.x["x"] += 1
    return example.x


def attribute(example):
    example.x += 1
    return to_dict(example)


def counted(example):
    example["x"] += 1
    return dict(example)


def counted_row(row):
    row["x"] += 1
    return {"x": row["x"]}


CHANGES = {
    "dict": ([{"x": float(i)} for i in range(4)], tenth),
    "nested": ([{"in": {"x": i}} for i in range(4)], nested),
    "list": ([{"ids": [i] * i} for i in range(4)], grown),
    "namedtuple": ([Pair({"x": i}, 0) for i in range(4)], paired),
    "dataclass": ([Example(i) for i in range(4)], attribute),
    "Counter": ([collections.Counter(x=i) for i in range(4)], counted),
    "UserDict": ([collections.UserDict(x=i) for i in range(4)], counted),
    "tensor": ([{"x": Tensor(i)} for i in range(4)], counted),
    "row of a table": (list(np.zeros(4, [("x", "f8"), ("y", "i4")])), counted_row),
    "objects": (np.array([{"x": float(i)} for i in range(4)], object), tenth),
}


@pytest.mark.parametrize("way", ["transform", "collate"])
@pytest.mark.parametrize(("source", "change"), CHANGES.values(), ids=CHANGES)
def test_what_changes_its_example_does_not_change_the_source(source, change, way):
    def collate(examples):
        changed = [next(iter(change(example).values())) for example in examples]
        return {"x": np.stack([np.asarray(value) for value in changed])}

    options = {"transform": change} if way == "transform" else {"collate": collate}
    made = sf.batches(source, 2, **options)
    first = [made.at(0) for _ in range(3)]
    jax.tree.map(np.testing.assert_array_equal, first[0], first[1])
    jax.tree.map(np.testing.assert_array_equal, first[0], first[2])
    two_epochs = [next(made) for _ in range(4)]
    jax.tree.map(np.testing.assert_array_equal, two_epochs[:2], two_epochs[2:])
    again = next(sf.batches(source, 2, **options))
    jax.tree.map(np.testing.assert_array_equal, two_epochs[0], again)


def added(example):
    example["x"] += 1
    return example


def added_to_all(examples):
    return {"x": np.stack([added(example)["x"] for example in examples])}


@pytest.mark.parametrize("options", [{"transform": added}, {"collate": added_to_all}])
@pytest.mark.parametrize("mixed", [False, True])
def test_arrays_of_a_list_are_read_only(options, mixed):
    source = [{"x": np.zeros(3)} for _ in range(4)]
    made = sf.batches(sf.mix([(source, 1), (source, 1)]) if mixed else source, 2, **options)
    with pytest.raises(ValueError, match="read-only") as error:
        next(made)
    assert "change a copy, as of example['x'].copy()" in "".join(error.value.__notes__)
    assert source[0]["x"].flags.writeable
    assert not source[0]["x"].any()


class Reader:
    """A source whose examples are arrays of its own, or one buffer."""

    def __init__(self, refills=False):
        self.rows, self.buffer, self.refills = np.arange(12.0).reshape(4, 3), np.zeros(3), refills

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if not self.refills:
            return {"x": self.rows[index]}
        self.buffer[:] = index
        return {"x": self.buffer, "one": 1}


class AtOnce(Reader):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("make", [Reader, AtOnce, lambda: ({"x": x} for x in Reader().rows)])
def test_arrays_of_other_sources_are_copied(make):
    made = sf.batches(make(), 3, epochs=1, remainder="pad", transform=added)
    batches = list(made)
    assert batches[0]["x"].tolist() == (Reader().rows[:3] + 1).tolist()
    # Examples that are repeated are changed once.
    assert batches[1]["x"].tolist() == (Reader().rows[[3, 3, 3]] + 1).tolist()


def test_a_batch_that_is_made_again_after_an_error_has_the_examples_as_they_were():
    errors = [OSError("no answer")]

    def fails(example):
        example["x"] += 1
        if example["x"] == 2 and errors:
            raise errors.pop()
        return example

    for wrap in (lambda made: made, lambda made: sf.workers(made, 0), sf.prefetch):
        made = wrap(sf.batches(({"x": i} for i in range(4)), 2, transform=fails))
        errors[:] = [OSError("no answer")]
        with pytest.raises(OSError, match="no answer"):
            next(made)
        assert next(made)["x"].tolist() == [1, 2]


def test_a_masked_array_stays_one_that_is_refused():
    masked = np.ma.masked_array([1, 2], [False, True])
    with pytest.raises(sf.errors.DataError, match="masked array"):
        next(sf.batches(lambda: iter([masked] * 2), 2))
    with pytest.raises(sf.errors.DataError, match="masked array"):
        next(sf.batches([masked] * 2, 2, transform=lambda x: x))


# Buffers that are filled again


def refill(count=6, form=lambda buffer: buffer):
    buffer = np.zeros(3, np.float32)
    for i in range(count):
        buffer[:] = i
        yield form(buffer)


def read_only(buffer):
    view = buffer.view()
    view.flags.writeable = False
    return view


FORMS = {
    "array": lambda buffer: buffer,
    "view": lambda buffer: buffer[:2],
    "read-only": read_only,
    "dict": lambda buffer: {"x": buffer},
    "nested": lambda buffer: ({"x": buffer},),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("options", [{}, {"transform": lambda x: x}, {"collate": lambda x: x}])
def test_a_stream_may_fill_one_array_again(form, options):
    batch = next(sf.batches(refill(form=form), 4, **options))
    leaves = jax.tree.leaves(batch)
    rows = leaves if isinstance(batch, list) else leaves[0]
    assert [row[0] for row in rows] == [0, 1, 2, 3]


def test_a_stream_may_fill_one_dict_or_list_again():
    def refill_containers():
        example = {"ids": []}
        for i in range(4):
            example["ids"].append(i)
            del example["ids"][:-1]
            example["y"] = i
            yield example

    batch = next(sf.batches(refill_containers(), 4))
    assert batch["ids"].tolist() == [[0], [1], [2], [3]]
    assert batch["y"].tolist() == [0, 1, 2, 3]


def test_pack_takes_such_a_stream():
    (row,) = sf.pack(refill(3), length=9)
    assert row["tokens"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("size", [2, 4])
def test_a_source_may_fill_one_array_again(size):
    made = sf.batches(Reader(refills=True), size)
    rows = [row[0] for row in itertools.chain(*(next(made)["x"] for _ in range(8 // size)))]
    assert rows == [0, 1, 2, 3] * 2
    mixed = sf.mix([(Reader(refills=True), 1), (Reader(refills=True), 1)])
    assert next(sf.batches(mixed, 6))["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    packed = sf.pack(sf.mix([({"x": np.ones((4, 2))}, 1), (PairsOf(), 1)]), length=12)
    assert next(packed)["x"].tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("collate", [None, lambda examples: {"x": np.stack(examples)}])
def test_a_transform_may_fill_one_array_again(collate):
    buffer, constant = np.zeros(3), np.ones(1)

    def fill(i):
        buffer[:] = i
        return buffer

    made = sf.batches(range(6), 4, transform=fill, collate=collate)
    batch = next(made) if collate is None else next(made)["x"]
    assert batch[:, 0].tolist() == [0, 1, 2, 3]
    shares = sf.batches(range(6), 4, transform=lambda i: (np.full(3, i), constant))
    assert next(shares)[0][:, 0].tolist() == [0, 1, 2, 3]


def test_one_row_of_each_of_several_sources_of_one_buffer():
    reader = Reader(refills=True)
    mixed = sf.mix([(reader, 1), (reader, 1)], seed=0)
    rows = next(sf.batches(mixed, 2))["x"][:, 0].tolist()
    own = [next(sf.batches(sf.mix([(Rows(), 1), (Rows(), 1)], seed=0), 2))["x"][:, 0].tolist()]
    assert [rows] == own


class Rows(Reader):
    def __getitem__(self, index):
        return {"x": np.full(3, float(index)), "one": 1}


class PairsOf(Reader):
    def __init__(self):
        super().__init__(refills=True)

    def __getitem__(self, index):
        return {"x": super().__getitem__(index)["x"][:2]}


TX = optax.sgd(0.1)


def loss(params, batch, key):
    far = batch
    for _ in range(20):  # slow enough for the next batch to come first
        far = jnp.sin(far) + batch
    return sf.mean(params["w"] * batch + 0 * far)


STEP, EVAL_STEP = sf.make_train_step(loss, TX), sf.make_eval_step(loss)


def start():
    return sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))


def large(count, reuses, size=1 << 17):
    """Yield arrays at an address that jax on CPU does not copy from."""
    array = np.empty(4 * size + 64, np.uint8)
    for i in range(count):
        if not reuses:
            array = np.empty_like(array)
        offset = -array.ctypes.data % 64
        batch = array[offset : offset + 4 * size].view(np.float32)
        batch[:] = i
        yield batch


def collated(count, reuses):
    buffer = np.zeros(4, np.float32)

    def collate(examples):
        return np.copyto(buffer, examples) or (buffer if reuses else buffer.copy())

    return sf.batches(np.arange(4.0 * count), 4, collate=collate)


WRAPS = {
    "plain": lambda made: made,
    "prefetch": sf.prefetch,
    "workers": lambda made: sf.workers(made, 0),
    "both": lambda made: sf.prefetch(sf.workers(made, 0)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_steps_see_each_batch_of_a_collate_that_fills_one_buffer(steps_per_call, wrap):
    def train(reuses):
        made = collated(8, reuses)
        options = {"steps": 8, "steps_per_call": steps_per_call, "log_every": 8}
        return sf.fit(STEP, start(), wrap(made), **options)

    one, two = train(True), train(False)
    assert one.history == two.history
    assert one.state.params == two.state.params


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_steps_see_each_batch_of_an_iterator_that_fills_one_buffer(steps_per_call):
    def train(reuses):
        options = {"steps": 8, "steps_per_call": steps_per_call, "log_every": 8}
        return sf.fit(STEP, start(), large(8, reuses), **options)

    one, two = train(True), train(False)
    assert one.history == two.history
    assert one.state.params == two.state.params


def test_evaluations_and_predictions_see_each_batch_of_such_an_iterator():
    one, two = (sf.evaluate(EVAL_STEP, start(), large(8, reuses)) for reuses in (True, False))
    assert one == two


def test_predictions_see_each_batch_of_such_an_iterator():
    predict = lambda state, batch: batch + 0 * loss(state.params, batch, None).total
    outputs = sf.predict(predict, start(), large(6, True))
    assert outputs[:: 1 << 17].tolist() == [0, 1, 2, 3, 4, 5]
