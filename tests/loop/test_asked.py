import jax
import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.asked import read_arguments

BATCHES = sf.batches({"x": np.zeros(8, np.float32)}, 4, epochs=3)


class Writer:
    def write_scalars(self, step, scalars): ...


def asked(batches=BATCHES, step=lambda state, batch: (state, {}), **options):
    given = {
        "steps": None,
        "epochs": None,
        "evaluation": (),
        "checkpoints": None,
        "hooks": (),
        "log_every": 10,
        "steps_per_call": 1,
        "time_limit": None,
        "compilation_cache": None,
    }
    return read_arguments(step, batches, **{**given, **options})


def kinds(hooks):
    return [getattr(hook, "__qualname__", type(hook).__name__).split(".")[0] for hook in hooks]


def test_what_other_arguments_stand_for_is_added():
    mine = lambda event: None
    assert kinds(asked(hooks=mine, time_limit=5.0).hooks) == [
        "stop_on_nonfinite",
        "test_what_other_arguments_stand_for_is_added",
        "stop_after",
    ]


def test_ones_own_stop_takes_the_place_of_the_usual_one():
    own = sf.stop_on_nonfinite("train/grad_norm")
    assert asked(hooks=[own]).hooks == [own]
    warns = sf.only_warn(own)
    assert asked(hooks=[warns]).hooks == [warns]


def test_one_evaluation_is_one_of_several():
    one = sf.Evaluation(lambda state: {}, every=5)
    assert asked(evaluation=one).evaluations == [one]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps: expected an integer of at least 1, got 0"),
        ({"steps": 5, "epochs": 2}, "steps, epochs: expected one of them, got 5 and 2"),
        ({"log_every": None}, "log_every: expected an integer of at least 1, got None"),
        ({"steps_per_call": True}, "steps_per_call: expected an integer of at least 1, got True"),
        (
            {"checkpoints": "here"},
            r"checkpoints: expected sf.Checkpoints\(.*\), got str 'here'",
        ),
        ({"evaluation": 3}, r"evaluation: expected sf.Evaluation\(…\), got int 3"),
        ({"hooks": [3]}, "hooks: expected functions of an event, got int 3"),
        ({"compilation_cache": 3}, "compilation_cache: expected a directory, or None, got int 3"),
        ({"hooks": None}, "hooks: expected functions of an event, got NoneType None"),
        ({"hooks": [sf.stop_on_spike]}, r"got type .*; call it with its arguments, as in stop_on"),
        ({"hooks": [lambda step, metrics: None]}, r", which takes <lambda>\(step, metrics\)$"),
        ({"hooks": sf.progress}, r"got type .*; call it with its arguments, as in progress\(kind"),
        ({"hooks": Writer()}, r"got Writer .*; sf.log_to\(writer\) makes one of a writer"),
        ({"time_limit": -1}, "time_limit: expected seconds, a number of at least 0, got -1"),
    ],
)
def test_what_is_not_as_it_has_to_be_is_refused(options, said):
    with pytest.raises(sf.ConfigError, match=said):
        asked(**options)


def test_a_step_that_is_compiled_already_has_no_use_for_a_cache(tmp_path):
    words = "compilation_cache='.*': expected a step that is neither jitted nor compiled, .* give"
    with pytest.raises(sf.ConfigError, match=words):
        asked(step=jax.jit(lambda state, batch: (state, {})), compilation_cache=tmp_path)


def test_epochs_of_what_has_none_are_refused():
    with pytest.raises(sf.ConfigError, match=r"every_epochs: expected batches that know how many"):
        asked(iter([]), checkpoints=sf.Checkpoints("x", every_epochs=1))
    with pytest.raises(sf.ConfigError, match=r"hooks: expected batches that know how many"):
        asked(iter([]), hooks=sf.callback(lambda *_: None))


def test_an_evaluation_is_not_called_as_train_steps_are():
    """An event is of train steps if a metric begins with train/, and hooks go by that."""
    step = lambda state, batch: (state, {})
    evaluation = sf.Evaluation(lambda state: {"loss": 1.0}, every=1, name="train/held_out")
    with pytest.raises(sf.ConfigError, match="evaluation: expected a name of its own for each"):
        sf.fit(step, (), [1], evaluation=evaluation)


ENDLESS = sf.batches({"x": np.zeros(8, np.float32)}, 4)
EVALUATION = sf.Evaluation(lambda state: {"loss": 1.0})


def test_batches_without_end_are_refused_where_nothing_else_could_stop():
    said = r"steps, epochs: expected one of them .*, got neither; give steps=…, or epochs=… of 2 st"
    for batches in (ENDLESS, sf.prefetch(ENDLESS)):
        with pytest.raises(sf.ConfigError, match=said):
            asked(batches)
    for end in ({"steps": 3}, {"epochs": 1}, {"time_limit": 1.0}, {"hooks": [lambda event: "x"]}):
        asked(ENDLESS, **end)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluation": EVALUATION}, r"val_loss: .* measured; they are called train/…, eval/…$"),
        ({}, r"they are called train/…; evaluation=sf.Evaluation\(…\) measures eval/…$"),
    ],
)
def test_metrics_that_nothing_measures_are_not_looked_for(options, said):
    early = sf.stop_early("val_loss", patience=1)
    kept = sf.Checkpoints("x", best="val_loss")
    for looking in ({"hooks": [sf.progress(), early]}, {"checkpoints": kept}):
        with pytest.raises(sf.ConfigError, match=said):
            asked(**looking, **options)
    assert asked(hooks=[early, lambda event: {"val_loss": 1.0}], **options).looked_for == []


def test_metrics_of_steps_and_evaluations_are_looked_for():
    early, kept = sf.stop_early("eval/loss", patience=1), sf.Checkpoints("x", best="train/loss")
    found = asked(hooks=early, checkpoints=kept, evaluation=EVALUATION)
    assert found.looked_for == ["eval/loss", "train/loss"]
