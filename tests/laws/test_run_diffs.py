"""Whatever makes two runs part, `diff` names the step, the leaves and the kind of the cause.

A cause is planted in one of two runs. A bare loop finds the first step that it changes, and the
arrays of the checkpoints say in which leaves.
"""

import functools
import json
import sys
import warnings
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf
from stepfold import tree
from stepfold.debug import Cause, diff, run_record

STEPS, EVERY, LOG_EVERY, ROWS = 24, 6, 4, 48
RANDOM = np.random.default_rng(0)
DATA = {
    "x": RANDOM.normal(size=(ROWS, 4)).astype(np.float32),
    "y": RANDOM.normal(size=ROWS).astype(np.float32),
}
NOT_WRITTEN = {"data", "hardware", "compiler"}


def loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    noise = 1 + 0.1 * jax.random.normal(key)
    return sf.mean(jnp.tanh(error) ** 2 + jnp.exp(error * noise / 9))


def other_loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    noise = 1 + 0.1 * jax.random.normal(key)
    return sf.mean(jnp.tanh(error) ** 2 + jnp.exp(error * noise / 8))


class Setup(NamedTuple):
    """What a run is made of."""

    rate: float = 1e-2
    is_in_config: bool = True
    loss: Any = loss_fn
    data: Any = DATA
    seed: int = 0
    batch_size: int = 8
    key: int = 0
    on_mesh: bool = False
    is_optimized: bool = True

    @property
    def mesh(self):
        return sf.make_mesh((8,), ("data",)) if self.on_mesh else None

    def step(self):
        return sf.make_train_step(self.loss, optax.adam(self.rate))

    def state(self):
        make = lambda: sf.init_state(
            {"w": jnp.ones(4), "b": jnp.zeros(())}, optax.adam(1e-2), jax.random.key(self.key)
        )
        return (
            sf.sharding.place(make(), sf.make_sharding(make(), self.mesh))
            if self.on_mesh
            else make()
        )

    def batches(self):
        return sf.batches(self.data, self.batch_size, seed=self.seed)


class Planted(NamedTuple):
    """A cause: another setup after a step, or a change of the state after it."""

    kinds: set[str]
    what: str
    setup: Setup = Setup()
    after: int = 0
    changes: Any = None  # of the state
    is_note: bool = False
    versions: Any = ()


def changed(row, other):
    data = {name: values.copy() for name, values in DATA.items()}
    data["y"][row] += 1.0
    return data


def swapped(row, other):
    data = {name: values.copy() for name, values in DATA.items()}
    for values in data.values():
        values[[row, other]] = values[[other, row]]
    return data


def flipped(state):
    bits = np.array(state.params["w"]).view(np.uint32)
    bits[2] ^= 1 << 9
    params = {**state.params, "w": jnp.asarray(bits.view(np.float32))}
    return state._replace(params=params)


def halved(state):
    return state._replace(params=jax.tree.map(lambda leaf: leaf / 2, state.params))


def plant(kind, step, row):
    """Return a cause of a kind; the step and the row are where it can choose."""
    log_point = max(LOG_EVERY, step // LOG_EVERY * LOG_EVERY)
    data = {"swapped row": swapped, "changed value": changed}
    if kind in data:
        return Planted(NOT_WRITTEN, "data: ", Setup(data=data[kind](row, (row + 19) % ROWS)))
    return {
        "hyper-parameter": Planted(
            {"config", "program"}, "config: rate 0.01 -> 0.02", Setup(rate=0.02)
        ),
        "hyper-parameter that no config has": Planted(
            {"program"}, "program: ", Setup(rate=0.02, is_in_config=False)
        ),
        "line of the loss": Planted({"program"}, "program: ", Setup(loss=other_loss_fn)),
        "seed": Planted({"batches"}, "batches: seed 0 -> 1", Setup(seed=1)),
        "key": Planted({"seed"}, "seed: key [", Setup(key=1)),
        "batch size": Planted(
            {"batches", "program"}, "batches: batch_size 8 -> 12", Setup(batch_size=12)
        ),
        "mesh": Planted({"mesh", "program"}, "mesh: data nothing -> 8", Setup(on_mesh=True)),
        "flag of the compiler": Planted(NOT_WRITTEN, "compiler: ", Setup(is_optimized=False)),
        "flipped bit": Planted(NOT_WRITTEN, "hardware: a fault", after=step, changes=flipped),
        "replaced state": Planted(
            {"note"}, f"step {log_point:,}: replaced the state: halved",
            after=log_point, changes=halved, is_note=True,
        ),
        "version": Planted(
            {"versions"}, "versions: jax ", Setup(data=changed(row, 0)), versions={"jax": "0.1"}
        ),
        "resume with another argument": Planted(
            {"config", "program"}, f"from the resume at step {step}", Setup(rate=0.02), after=step
        ),
    }[kind]  # fmt: skip


KINDS = [
    *("hyper-parameter", "hyper-parameter that no config has", "line of the loss", "swapped row"),
    *("changed value", "seed", "key", "batch size", "mesh", "flag of the compiler"),
    *("flipped bit", "replaced state", "version", "resume with another argument"),
]


class Change:
    """Change the state after a step, between two steps, as a fault of the memory does."""

    name = "a fault"

    def __init__(self, step, change):
        self.step, self.change, self.is_done = step, change, False

    def next(self, run):
        return self.step if run.step < self.step else float("inf")

    def is_due(self, run):
        return run.step == self.step and not self.is_done

    def __call__(self, run):
        self.is_done = True
        return run._replace(state=self.change(run.state))


def replace_at(step, change):
    def update(_, event):
        is_due = event.step == step
        return None, sf.hooks.Replace(change(event.state), "halved") if is_due else None

    return sf.Hook(None, update, "replace", exact=True)


def train(folder, setup, until, planted=None):
    hooks = [sf.progress("none")]
    if planted is not None and planted.changes is not None:
        make = replace_at if planted.is_note else Change
        hooks.append(make(planted.after, planted.changes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "config: changed")
        config = {"rate": setup.rate if setup.is_in_config else 0.01}
        return sf.fit(
            setup.step(),
            setup.state(),
            setup.batches(),
            steps=until,
            run_dir=sf.RunDirectory(folder, config=config, compilation_cache=False),
            hooks=hooks,
            checkpoints=sf.Checkpoints(every=EVERY, keep=None),
            log_every=LOG_EVERY,
        ).state


def run(folder, planted, cuts=()):
    """Train a run in which a cause is planted, in several calls, and return its last state."""
    if planted.changes is None and planted.after:
        cuts = {*cuts, planted.after}
    state = None
    for until in [*sorted(cuts), STEPS]:
        setup = planted.setup if until > planted.after else Setup()
        with optimization(setup):
            is_here = planted.changes is not None and planted.after <= until
            state = train(folder, setup, until, planted if is_here else None)
    if planted.versions:
        info = json.loads((folder / "run.json").read_text())
        info["versions"] |= planted.versions
        (folder / "run.json").write_text(json.dumps(info))
    return state


def optimization(setup):
    """Switch off optimizations of XLA, which changes rounding."""
    return mock.patch.dict("os.environ") if setup.is_optimized else NotOptimized()


class NotOptimized:
    def __enter__(self):
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", True)

    def __exit__(self, *_):
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()


def bits(state):
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def loop(planted):
    """Return the bits of the state after each step, from a bare loop."""
    with optimization(planted.setup):
        setups = [Setup(), planted.setup]
        state = setups[planted.after == 0].state()
        steps = [jax.jit(setup.step()) for setup in setups]
        sources = [setup.batches() for setup in setups]
        found = [bits(state)]
        for number in range(1, STEPS + 1):
            is_planted = number > planted.after
            batches = [next(source) for source in sources][is_planted]
            if planted.setup.on_mesh:
                batches = sf.shard_batch(batches, planted.setup.mesh)
            state, _ = steps[is_planted](state, batches)
            if number == planted.after and planted.changes is not None:
                state = planted.changes(state)
            found.append(bits(state))
    return found


NOTHING = Planted(set(), "")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Train the run without a cause, and return its folder and the states of its loop."""
    folder = tmp_path_factory.mktemp("base")
    states = loop(NOTHING)
    assert bits(run(folder, NOTHING)) == states[-1]
    return folder, states


def saved_leaves(folder, step):
    state = sf.restore(folder / "checkpoints", Setup().state(), step=step).state
    state = state._replace(key=jax.random.key_data(state.key))
    return {name: np.asarray(leaf).tobytes() for name, leaf in tree.named_leaves(state)}


def check(found, planted, first, folders):
    """Check what `diff` found; `first` is the first step that the cause changes."""
    assert (found.is_equal, found.exit_code) == (False, 1)
    saved = sorted({*range(EVERY, STEPS + 1, EVERY)})
    assert found.equal_until == max([0, *(step for step in saved if step < first)])
    assert found.equal_until < first <= found.step
    assert found.step <= min(step for step in saved if step >= first)
    assert found.checkpoint == min(step for step in saved if step >= first)
    one, other = (saved_leaves(folder, found.checkpoint) for folder in folders)
    assert {*found.leaves} == {name for name in one if one[name] != other[name]}
    assert found.leaf in found.leaves
    assert found.compared["leaves"] == len(one)
    assert {cause.kind for cause in found.causes} == planted.kinds, str(found)
    assert planted.what in "; ".join(map(str, found.causes))
    assert found.cause.kind != "program" or planted.kinds == {"program"}
    assert not planted.kinds & {*found.equal}


@pytest.fixture(scope="module")
def try_cause(base, tmp_path_factory):
    """Return a function that plants a cause, and returns what to check the answer with."""

    @functools.cache
    def plant_once(kind, seed, has_cuts):
        random = np.random.default_rng(seed)
        folder, states = base
        step, row = int(random.integers(1, STEPS)), int(random.integers(ROWS))
        planted, other = plant(kind, step, row), tmp_path_factory.mktemp("other")
        cuts = random.integers(1, STEPS, 2).tolist() if has_cuts else []
        looped = loop(planted)
        assert bits(run(other, planted, cuts)) == looped[-1]
        # A key is a leaf, so that states with other keys differ from the start on.
        first = next(number for number in range(STEPS + 1) if states[number] != looped[number])
        return planted, max(first, 1), (folder, other)

    return plant_once


# The others cost minutes: each compiles its programs.
DEFAULT = [
    ("swapped row", 1, True), ("flipped bit", 2, False),
    ("resume with another argument", 4, True), ("replaced state", 3, True),
    ("hyper-parameter", 5, True),
]  # fmt: skip
CASES = [(kind, seed, cuts) for kind in KINDS for seed in range(3) for cuts in (False, True)]


@pytest.mark.parametrize("case", full_but([*zip(DEFAULT)], [*zip(dict.fromkeys(DEFAULT + CASES))]))
def test_the_step_the_leaves_and_the_kind_are_named(try_cause, case):
    planted, first, folders = try_cause(*case)
    found = diff(*folders)
    check(found, planted, first, folders)
    backward = diff(*folders[::-1])
    assert backward.step == found.step
    assert {*backward.leaves} == {*found.leaves}
    assert [each.kind for each in backward.causes] == [each.kind for each in found.causes]


def counts(found):
    names = ("rows", "checkpoints", "leaves")
    return *(found.compared[name] for name in names), found.compared_until


def test_runs_in_which_nothing_is_planted_are_equal(base, tmp_path):
    run(tmp_path, NOTHING, [5, 14])
    found = diff(base[0], tmp_path)
    assert (found.is_equal, found.exit_code, found.missing) == (True, 0, [])
    assert {each.partition(":")[0] for each in found.others} <= {"arguments"}  # such as steps
    # A cut divides the interval of a row, which has no counterpart then.
    assert counts(found) == (4, 4, 9, STEPS)
    assert {"config", "batches", "versions", "devices", "seed", "program"} <= {*found.equal}


# Wrong attributions

ANSWERS = {
    "an earlier step": lambda found: found._replace(equal_until=found.equal_until - EVERY),
    "a later step": lambda found: found._replace(equal_until=found.equal_until + EVERY),
    "a later row": lambda found: found._replace(step=found.step + EVERY),
    "no difference": lambda found: found._replace(step=None),
    "another leaf": lambda found: found._replace(leaves=["step", *found.leaves[1:]]),
    "one leaf less": lambda found: found._replace(leaves=found.leaves[:-1]),
    "one kind less": lambda found: found._replace(causes=found.causes[1:]),
    "one kind more": lambda found: found._replace(causes=[*found.causes, Cause("mesh", "")]),
    "another kind": lambda found: found._replace(
        causes=[Cause("seed", each.what) for each in found.causes]
    ),
    "another value": lambda found: found._replace(
        causes=[each._replace(what="rate 0.02 -> 0.01") for each in found.causes]
    ),
}


@pytest.mark.parametrize("mutant", ANSWERS)
@pytest.mark.parametrize("case", [DEFAULT[1], DEFAULT[2]])
def test_a_wrong_answer_fails_the_same_law(try_cause, case, mutant):
    planted, first, folders = try_cause(*case)
    wrong = ANSWERS[mutant](diff(*folders))
    with pytest.raises(AssertionError):
        check(wrong, planted, first, folders)


def newest_alone(info):
    """Take the settings of the newest attempt for those of the whole run."""
    (_, facts), *_ = TIMELINE(info)
    yield 0, facts


def first_leaf(a, b):
    different, count = COMPARE(a, b)
    return different[:1], count


def no_checkpoints(*_):
    fields = {"checkpoint": None, "leaves": (), "equal_until": 0}
    return fields, {"checkpoints": 0, "leaves": 0, "last_checkpoint": 0}


module = sys.modules[diff.__module__]
TIMELINE, COMPARE = run_record._timeline, module._compare_leaves
METHODS = {
    "the newest settings": (run_record, "_timeline", newest_alone, DEFAULT[2]),
    "no notes": (run_record, "_notes", lambda info: [], DEFAULT[3]),
    "one leaf": (module, "_compare_leaves", first_leaf, DEFAULT[0]),
    "arguments without an effect": (module, "_WITHOUT_EFFECT", (), DEFAULT[4]),
    "nothing is inferred": (module, "_NOT_WRITTEN", {"code": ""}, DEFAULT[1]),
    "no checkpoints": (module, "_compare_checkpoints", no_checkpoints, DEFAULT[0]),
    "all settings are causes": (module, "_attribute", lambda found: found, DEFAULT[2]),
}  # fmt: skip


@pytest.mark.parametrize("mutant", METHODS)
def test_what_is_nearly_right_fails_the_same_law(try_cause, mutant, monkeypatch):
    place, name, wrong, case = METHODS[mutant]
    planted, first, folders = try_cause(*case)
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError):
        check(diff(*folders), planted, first, folders)
