import dataclasses

import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.errors import CheckpointError, ConfigError


def save(series, step, **options):
    series.save({"w": jnp.full(2, step, jnp.float32)}, step=step, **options)


@pytest.mark.parametrize("name", ["every", "every_epochs", "keep", "keep_every", "keep_best"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3"])
def test_counts_are_integers(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: expected an integer of at least 1, got "):
        sf.Checkpoints("a", **{name: value})


@pytest.mark.parametrize("value", [0, -0.5, True, float("nan")])
def test_minutes_are_above_zero(value):
    with pytest.raises(ConfigError, match=f"every_minutes: expected a number above 0, got {value}"):
        sf.Checkpoints("a", every_minutes=value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "min"}, "mode: expected best=… to go with it, got mode='min' alone"),
        ({"best": "a", "mode": "most"}, "mode: expected 'min' or 'max', got 'most'"),
        ({"best": 3}, "best: expected the name of a metric, got 3"),
        ({"keep_best": None}, "keep_best: expected an integer of at least 1, got None"),
    ],
)
def test_a_best_is_a_metric_and_a_mode(options, words):
    with pytest.raises(ConfigError, match=words):
        sf.Checkpoints("a", **options)


def test_a_description_does_nothing(tmp_path):
    described = sf.Checkpoints(tmp_path / "a", every=3)
    assert not (tmp_path / "a").exists()
    with pytest.raises(dataclasses.FrozenInstanceError):
        described.every = 4
    assert described == sf.Checkpoints(tmp_path / "a", every=3)
    assert dataclasses.replace(described, every=4).every == 4


def test_a_directory_is_needed_and_its_own_comes_first(tmp_path):
    with pytest.raises(ConfigError, match="directory: expected a path, got None; give Checkpoints"):
        sf.Checkpoints().open()
    with sf.Checkpoints().open(tmp_path / "given") as series:
        assert series.directory == tmp_path / "given"
    with sf.Checkpoints(tmp_path / "own").open(tmp_path / "given") as series:
        assert series.directory == tmp_path / "own"


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match="a: expected a directory"):
        sf.Checkpoints(tmp_path / "a").open()


def test_a_description_is_opened_again_and_again(tmp_path):
    described = sf.Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        with described as series:
            save(series, step)
    with described.open(tmp_path) as series, described as other:
        assert series is not other
    assert list(sf.verify(tmp_path)) == [2, 3]


def test_what_is_kept_is_as_described(tmp_path):
    options = {"keep": 2, "keep_every": 4, "best": "bleu", "keep_best": 2}
    bleu = {1: 5.0, 2: 9.0, 3: 1.0, 5: float("nan"), 6: 7.0}
    with sf.Checkpoints(tmp_path, **options) as series:
        for step in range(1, 11):
            save(series, step, metrics={"bleu": bleu[step]} if step in bleu else None)
    assert list(sf.verify(tmp_path)) == [2, 4, 6, 8, 9, 10]
    assert sf.restore(tmp_path, {"w": jnp.zeros(2)}, step="best").step == 2


def test_a_restart_goes_on_with_what_was_kept(tmp_path):
    described = sf.Checkpoints(tmp_path, keep=1, best="eval/loss", keep_best=1)
    for steps in ((1, 2, 3), (4, 5, 6)):
        with described as series:
            for step in steps:
                save(series, step, metrics={"eval/loss": abs(step - 2) + 0.5})
    assert list(sf.verify(tmp_path)) == [2, 6]
    assert sf.restore(tmp_path, {"w": jnp.zeros(2)}, step="best").step == 2
    with sf.Checkpoints(tmp_path, keep=1, best="eval/loss", mode="max") as series:
        save(series, 7, metrics={"eval/loss": 0.0})
    assert list(sf.verify(tmp_path)) == [6, 7]


def test_a_step_of_which_files_are_missing_does_not_count_as_kept(tmp_path):
    described = sf.Checkpoints(tmp_path, keep=2)
    with described as series:
        save(series, 1)
        save(series, 2)
    (tmp_path / "2" / "state" / "_METADATA").unlink()
    with described as series:
        save(series, 3)
    assert [step for step, problems in sf.verify(tmp_path).items() if not problems] == [1, 3]


def test_all_are_kept_if_asked(tmp_path):
    with sf.Checkpoints(tmp_path, keep=None) as series:
        for step in range(5):
            save(series, step)
    assert list(sf.verify(tmp_path)) == [0, 1, 2, 3, 4]


def test_minutes_are_a_number():
    with pytest.raises(ConfigError, match="every_minutes: expected a number above 0, got '5'"):
        sf.Checkpoints("a", every_minutes="5")


def test_the_step_that_was_just_saved_is_kept_though_newer_ones_are_there(tmp_path):
    with sf.Checkpoints(tmp_path, keep=1) as series:
        save(series, 30)
        save(series, 11)
    assert 11 in sf.verify(tmp_path)


def test_a_folder_without_files_does_not_keep_a_series_from_saving(tmp_path):
    (tmp_path / "5").mkdir()
    with sf.Checkpoints(tmp_path, keep=1) as series:
        save(series, 6)
        save(series, 7)
    assert sf.latest_step(tmp_path) == 7


def test_the_best_is_known_after_a_save_without_a_series(tmp_path):
    with sf.Checkpoints(tmp_path, best="loss") as series:
        save(series, 1, metrics={"loss": 1.0})
    sf.save(tmp_path, {"w": jnp.zeros(2)}, step=2)
    assert sf.restore(tmp_path, {"w": jnp.zeros(2)}, step="best").step == 1
