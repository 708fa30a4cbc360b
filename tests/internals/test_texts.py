"""If another package words an error differently, the user sees that error."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.checkpoint.arrays import ArrayReader
from stepfold.checkpoint.writer import _cause, _is_at_exit
from stepfold.core.loss import checked
from stepfold.core.optimizer import as_optimizer, update
from stepfold.inspect.memory import exhausted, is_exhausted
from stepfold.internals import texts
from stepfold.object_storage import _reason


@pytest.fixture
def reworded(monkeypatch):
    """Change the text of every error."""
    for name, value in vars(texts).items():
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(texts, name, re.compile("(?!)"))


def loss_over_an_axis(params, batch, key):
    return jax.lax.pmean(params.sum(), "devices")


def loss_of_averages(params, batch, key):
    return sf.mean(params) + sf.mean(batch)


def loss_with_float_labels(params, batch, key):
    logits = jnp.ones((3, 2)) * params
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()


def run(loss_fn):
    return checked(loss_fn)(jnp.ones(()), jnp.ones(3), jax.random.key(0))


ADVICE = [
    (loss_over_an_axis, "over axes of shard_map or vmap"),
    (loss_of_averages, "sf.mean gives a total and a weight"),
    (loss_with_float_labels, "labels of classes are integers"),
]


@pytest.mark.parametrize(("loss_fn", "advice"), ADVICE)
def test_advice_on_an_error_in_a_loss(loss_fn, advice):
    with pytest.raises(Exception) as caught:
        run(loss_fn)
    assert advice in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(("loss_fn", "advice"), ADVICE)
def test_a_reworded_error_in_a_loss_is_raised_as_it_is(reworded, loss_fn, advice):
    with pytest.raises((NameError, TypeError)) as caught:
        run(loss_fn)
    assert not isinstance(caught.value, sf.StepfoldError)
    notes = caught.value.__notes__
    assert [note.startswith("loss_fn was called with batch float32[3]") for note in notes] == [True]


def fail(message):
    """Make an optimizer whose update fails, as if a part of it declared other keywords."""

    def update(updates, state, params=None, **extra):
        raise TypeError(message)

    return as_optimizer(optax.GradientTransformationExtraArgs(lambda params: (), update))


@pytest.mark.parametrize(
    "message", ["missing 1 required keyword-only argument", "unexpected keyword argument 'value'"]
)
def test_a_reworded_error_of_an_optimizer_is_raised_as_it_is(monkeypatch, message):
    with pytest.raises(sf.errors.ConfigError, match="tx: expected"):
        update(fail(message), 1.0, (), 1.0, 1.0)
    monkeypatch.setattr(texts, "NEEDS_LOSS", re.compile("(?!)"))
    monkeypatch.setattr(texts, "REFUSES_VALUE", re.compile("(?!)"))
    with pytest.raises(TypeError, match=message) as caught:
        update(fail(message), 1.0, (), 1.0, 1.0)
    assert not isinstance(caught.value, sf.StepfoldError)


def compiled(**options):
    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.ones(3), tx, jax.random.key(0))
    step = sf.make_train_step(lambda params, x, key: sf.mean(x * params), tx)
    return sf.compile_step(step, state, jnp.ones(3), **options), state


def test_reworded_errors_of_xla_are_raised_as_they_are(reworded):
    step, state = compiled()
    step(state, jnp.ones(3))
    with pytest.raises((ValueError, RuntimeError), match="delete|donate") as caught:
        step(state, jnp.ones(3))
    assert not isinstance(caught.value, sf.StepfoldError)
    with pytest.raises(RuntimeError, match="no_such_option"):
        compiled(compiler_options={"no_such_option": True})
    error = RuntimeError("RESOURCE_EXHAUSTED: no room")
    assert not is_exhausted(error)
    assert str(exhausted(error, step.state, step.batch)).endswith(f"XLA reports: {error}")


def test_reworded_errors_of_topologies_are_raised_as_they_are(reworded, monkeypatch):
    def find(*_, **__):
        raise RuntimeError("libtpu is not installed")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", find)
    with pytest.raises(RuntimeError, match="libtpu is not installed"):
        sf.sharding.devices_of("v5e:2x2")


def test_a_reworded_nan_has_no_note(reworded):
    def run():
        tx = optax.sgd(0.1)
        step = sf.make_train_step(lambda params, x, key: jnp.log(params - 2).sum(), tx)
        state = sf.init_state(jnp.ones(3), tx, jax.random.key(0))
        with jax.debug_nans(True):
            sf.fit(step, state, [np.ones(3)], steps=1)

    with pytest.raises(FloatingPointError, match="invalid value") as caught:
        run()
    assert not any("jax_debug_nans ended" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(28, "No space left on device"), "no space left on the device; make room"),
        (ValueError("Disk quota exceeded"), "no space left on the device; make room"),
        (OSError(24, "Too many open files"), "too many open files; allow more"),
        (ValueError("PERMISSION_DENIED: a"), "no permission to write there"),
        (RuntimeError("can't create new thread at interpreter shutdown"), "the program ended"),
    ],
)
def test_the_cause_of_a_failed_save_is_explained_or_repeated(request, error, cause):
    assert cause in _cause(error)
    request.getfixturevalue("reworded")
    assert str(error) in _cause(error)
    assert not _is_at_exit(error)


def test_a_reworded_error_of_a_bucket_is_repeated(request):
    error = ValueError("PERMISSION_DENIED: no")
    assert _reason(error) == "PERMISSION_DENIED: no; check the credentials and what they permit"
    request.getfixturevalue("reworded")
    assert _reason(error) == "PERMISSION_DENIED: no"


def test_a_reworded_status_is_no_damage(request, tmp_path):
    reader = ArrayReader.__new__(ArrayReader)
    reader._base, reader._context = {"driver": "file", "path": f"{tmp_path}/"}, None
    error = RuntimeError("DATA_LOSS: a chunk")
    assert reader._is_damage(error)
    request.getfixturevalue("reworded")
    assert not reader._is_damage(error)


def test_every_text_is_in_use():
    users = "\n".join(
        path.read_text()
        for path in Path(sf.__file__).parent.rglob("*.py")
        if path.name != "texts.py"
    )
    names = [name for name in vars(texts) if name.isupper()]
    assert [name for name in names if name not in users] == []
