import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.replaying.going_back import Said, copied, go_back, not_finite
from stepfold.loop.stepper import Stepper

TX = optax.sgd(0.1)
STEP = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), TX)


def start():
    return sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))


def batches(step=6):
    data = np.arange(40, dtype=np.float32) / 100
    data[4 * step - 1] = np.nan
    return sf.batches(data, 4)


def capsule(folder=None, given=None, **options):
    plan = sf.Checkpoints(every=3, keep=None) if folder else None
    given = batches() if given is None else given
    result = sf.fit(STEP, start(), given, steps=10, run_dir=folder, checkpoints=plan, **options)
    return result.capsule


def back(kept, state=None, given=None):
    return go_back(kept, Stepper(STEP), state, kept.batches if given is None else given)


def wanted():
    """Fold by hand up to the step before."""
    state, step = start(), jax.jit(STEP)
    for _, batch in zip(range(5), batches(), strict=False):
        state, _ = step(state, batch)
    return state


def same(course):
    assert (course.origin, int(course.state.step)) == (6, 5)
    assert course.state.params["w"] == wanted().params["w"]
    assert np.array_equal(course.batch, batches().at(5), equal_nan=True)
    assert course.said.is_bad("loss")
    assert not course.last.is_bad("loss")


def test_the_state_before_the_step_is_folded_from_the_checkpoint(tmp_path):
    same(back(capsule(tmp_path)))


def test_without_a_checkpoint_it_is_folded_from_the_beginning():
    first = start()
    same(back(capsule(), first))
    assert not first.params["w"].is_deleted()


def test_batches_are_given_where_the_capsule_has_none(tmp_path):
    path = capsule(tmp_path).path
    same(back(sf.read_capsule(path), jax.eval_shape(start), batches()))
    rest = iter([batches().at(3), batches().at(4)])  # such as cannot be put anywhere
    same(back(sf.read_capsule(path), start(), rest))


def test_a_batch_that_was_lost_comes_from_those_that_are_given():
    gone = capsule(given=iter([batches().at(i) for i in range(9)]))
    same(back(gone, start(), batches_from_list()))
    same(back(gone, start(), iter(batches_from_list())))


def batches_from_list():
    return [batches().at(i) for i in range(9)]


def test_after_a_checkpoint_of_the_step_before_no_batches_are_needed(tmp_path):
    kept = sf.read_capsule(capsule(tmp_path, batches(4)).path)
    course = back(kept, start())
    assert (course.origin, course.last) == (4, None)


def test_a_form_is_asked_for_where_there_is_none(tmp_path):
    kept = sf.read_capsule(capsule(tmp_path).path)
    with pytest.raises(sf.ConfigError, match="state: expected the form of the state for a capsule"):
        back(kept, None, batches())


@pytest.mark.parametrize(("state", "got"), [(None, "None"), (jax.eval_shape(start), "an abstract")])
def test_a_state_is_asked_for_where_there_was_no_checkpoint(state, got):
    words = f"state: expected the state of step 0 that the run began with.* got {got}"
    with pytest.raises(sf.ConfigError, match=words):
        back(capsule(), state)


def test_another_state_than_the_first_is_refused():
    with pytest.raises(
        sf.ConfigError, match="that the run began with, of step 0, got one of step 5"
    ):
        back(capsule(), wanted())


def test_batches_are_asked_for(tmp_path):
    kept = sf.read_capsule(capsule(tmp_path).path)
    with pytest.raises(
        sf.ConfigError, match="batches: expected those of the run, for steps 4 to 6"
    ):
        back(kept, start())


def test_batches_that_end_too_soon_are_refused(tmp_path):
    kept = sf.read_capsule(capsule(tmp_path).path)
    with pytest.raises(sf.DataError, match="of steps 4 to 6, but they ended before step 5"):
        back(kept, start(), iter([batches().at(3)]))


def test_a_checkpoint_that_is_gone_is_said_to_be(tmp_path):
    kept = capsule(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(sf.CheckpointError, match="expected step 3 to restore, got none"):
        back(kept)


def test_leaves_that_are_not_finite_are_named():
    state = {
        "nan": jnp.array([1, np.nan]),
        "inf": np.float32([np.inf]),
        "half": jnp.array(np.inf, jnp.bfloat16),
        "fine": jnp.ones(2),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "word": "nan",
    }
    assert not_finite(state) == ["half", "inf", "nan"]


def test_a_copy_is_there_when_the_state_is_gone():
    state = {"w": jnp.ones(3), "key": jax.random.key(0), "n": 3}
    copy = copied(state)
    jax.tree.map(lambda x: x.delete() if isinstance(x, jax.Array) else None, state)
    assert (copy["w"].tolist(), copy["n"]) == ([1, 1, 1], 3)


def test_what_weighs_nothing_is_not_bad():
    said = Said({"a": np.nan, "b": np.nan, "c": 1.0}, {"a": 0.0, "b": 2.0, "c": 1.0})
    assert [said.is_bad(name) for name in "abc"] == [False, True, False]
