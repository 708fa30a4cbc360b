"""A plausible misuse of a public name works as meant, warns or raises; none is wrong in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf

# Checkpoints


def save_losses(folder, **options):
    """Save steps 1 to 3 with losses 3, 1 and 2; return the series."""
    with sf.Checkpoints(folder, **options) as series:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            series.save(
                {"w": jnp.full(2, step)}, step=step, metrics={"loss": loss, "fluency": loss}
            )
    return series


@pytest.mark.parametrize(("name", "best"), [("perplexity", 2), ("eval/wer", 2), ("bleu", 1)])
def test_the_best_step_is_that_of_the_metric_s_own_direction(tmp_path, name, best):
    with sf.Checkpoints(tmp_path, keep=1, best=name) as series:
        for step, value in ((1, 3.0), (2, 1.0), (3, 2.0)):
            series.save({"w": jnp.ones(2)}, step=step, metrics={name: value})
    assert series.best_step() == best
    assert sf.restore(tmp_path, {"w": jnp.ones(2)}, step="best").step == best


def test_a_metric_with_an_uncertain_direction_needs_a_mode(tmp_path):
    for make in (
        lambda **mode: sf.Checkpoints(tmp_path, best="fluency", **mode),
        lambda **mode: sf.stop_early("fluency", patience=1, **mode),
    ):
        with pytest.raises(sf.ConfigError, match="mode='min' if lower is better, mode='max' if"):
            make()
        make(mode="max")
    save_losses(tmp_path)
    like = {"w": jnp.zeros(2, int)}
    with pytest.raises(sf.ConfigError, match=r"give best=\('fluency', 'min'\) or"):
        sf.restore(tmp_path, like, step="best", best="fluency")
    assert sf.restore(tmp_path, like, step="best", best=("fluency", "max")).step == 1


def test_the_best_is_restored_only_by_that_step(tmp_path):
    save_losses(tmp_path)
    with pytest.raises(sf.ConfigError, match="best: expected step='best' to go with it"):
        sf.restore(tmp_path, {"w": jnp.zeros(2, int)}, best="loss")  # not the newest


def test_a_ranking_by_a_metric_that_is_never_saved_warns(tmp_path):
    with pytest.warns(RuntimeWarning, match="best: expected the metric 'eval/loss' in save"):
        save_losses(tmp_path, best="eval/loss")


def test_a_schedule_of_epochs_without_epochs_warns(tmp_path):
    with (
        pytest.warns(RuntimeWarning, match="every_epochs: expected due.step, epoch=…. where an"),
        sf.Checkpoints(tmp_path, every_epochs=1) as series,
    ):
        assert not any(series.due(step) for step in range(1, 20))


@pytest.mark.parametrize(
    "options", [{"keep_best": 3}, {"keep": None, "keep_every": 10}, {"mode": "max"}]
)
def test_options_of_retention_without_effect_are_refused(options):
    with pytest.raises(sf.ConfigError, match="to go with it"):
        sf.Checkpoints("x", **options)


def test_reading_a_series_that_is_still_being_copied_leaves_it_as_it_is(tmp_path):
    for step in (1, 2):
        sf.save(tmp_path, {"w": np.full(2, step)}, step=step)
    file = tmp_path / "2/state/files.json"
    content = file.read_bytes()
    file.unlink()
    with pytest.warns(RuntimeWarning, match="step 2 is damaged, and an older one is taken"):
        sf.restore(tmp_path, {"w": np.zeros(2, int)})
    file.write_bytes(content)
    assert sf.restore(tmp_path, {"w": np.zeros(2, int)}).step == 2


def test_a_path_and_its_url_name_one_series(tmp_path):
    sf.save(tmp_path / "a", {"w": np.ones(2)}, step=1)
    assert sf.latest_step(f"file://{tmp_path}/a") == 1
    sf.save(f"file://{tmp_path}/b", {"w": np.ones(2)}, step=1)  # as a bucket has it
    assert sf.latest_step(tmp_path / "b") == 1


def test_a_cast_to_a_narrower_range_warns(tmp_path):
    sf.save(tmp_path, {"w": np.array([1.0, 1e6], np.float32)}, step=1)
    with pytest.warns(RuntimeWarning, match="w: 1 of 2 values are beyond the range of float16"):
        sf.restore(tmp_path, {"w": np.zeros(2, np.float16)}, cast=True)


def test_saving_in_a_traced_function_is_refused(tmp_path):
    with pytest.raises(sf.ConfigError, match="w: expected an array, got a tracer; save outside"):
        jax.eval_shape(lambda x: sf.save(tmp_path, {"w": x}, step=1), jnp.ones(2))
