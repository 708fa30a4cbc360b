"""`evaluate_run` evaluates the checkpoints of a run, which it only reads."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import small

import stepfold as sf
from stepfold.__main__ import main
from stepfold.checkpoint import claims
from stepfold.checkpoint.claims import Lease
from stepfold.checkpoint.results import FOLDER, LEASES
from stepfold.checkpoint.store import open_store


def like():
    """Return the abstract state of the small run."""
    state = small.start()
    return jax.eval_shape(lambda: state)


def evaluation(name="eval", **options):
    return sf.Evaluation(lambda state: {"w": state.params["w"]}, name=name, **options)


def save(folder, *steps):
    """Save states whose parameter is their step."""
    for step in steps:
        state = small.start()
        state = state._replace(params={"w": jnp.float32(step)}, step=jnp.int32(step))
        sf.save(folder, state)


def evaluate(folder, **options):
    return sf.evaluate_run(folder, like, evaluation(), **{"follow": False, **options})


def test_the_newest_step_is_evaluated_and_the_others_are_named(tmp_path):
    save(tmp_path, 1, 2, 3)
    assert evaluate(tmp_path) == ({3: {"eval/w": 3.0}}, [1, 2])
    assert evaluate(tmp_path) == ({}, [1, 2])
    save(tmp_path, 4)
    assert evaluate(tmp_path) == ({4: {"eval/w": 4.0}}, [1, 2])


def test_all_steps_are_evaluated_in_order_and_each_once(tmp_path):
    save(tmp_path, 1, 2, 3)
    assert list(evaluate(tmp_path, steps="all").metrics) == [1, 2, 3]
    assert evaluate(tmp_path, steps="all") == ({}, [])


def test_a_result_of_another_process_is_not_repeated(tmp_path):
    save(tmp_path, 1)

    def measure(state):  # the other one is faster
        evaluate(tmp_path)
        return {"w": -1.0}

    assert sf.evaluate_run(tmp_path, like, sf.Evaluation(measure), follow=False).metrics == {}
    ranked = sf.restore(tmp_path, like(), step="best", best=("eval/w", "min"))
    assert ranked.step == 1


def test_the_numbers_rank_the_checkpoints_of_any_run(tmp_path):
    save(tmp_path, 1, 2, 3)
    evaluate(tmp_path, steps="all")
    for mode, step in (("max", 3), ("min", 1)):
        assert sf.Checkpoints(tmp_path, best="eval/w", mode=mode).best_step() == step
        assert sf.restore(tmp_path, like(), step="best", best=("eval/w", mode)).step == step


def test_numbers_keep_their_bits(tmp_path):
    save(tmp_path, 1)
    values = {"tiny": 5e-324, "third": 1 / 3, "nan": float("nan"), "inf": float("-inf"), "n": 2}
    kept = sf.evaluate_run(tmp_path, like, sf.Evaluation(lambda state: values), follow=False)
    (path,) = (tmp_path / FOLDER).iterdir()
    note = open_store(tmp_path).read_note(f"{FOLDER}/{path.name}")
    np.testing.assert_equal(note, {f"eval/{name}": float(x) for name, x in values.items()})
    np.testing.assert_equal(kept.metrics[1], note)


@pytest.mark.parametrize("debias", small.full_but([True], [False, True]))
def test_an_average_is_evaluated_as_in_fit(tmp_path, debias):
    """The state has the optimizer of the run; of that, only the average is restored."""
    tx = optax.chain(optax.clip(1.0), sf.ema_params(optax.adam(0.1), 0.9, debias=debias))
    make = lambda: sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(small.loss_fn, tx)
    both = [evaluation("plain", every=2), evaluation("average", every=2, ema=True)]
    checkpoints = sf.Checkpoints(tmp_path, every=2)
    run = sf.fit(step, make(), small.batches(), steps=4, checkpoints=checkpoints, evaluation=both)
    found = sf.evaluate_run(tmp_path, jax.eval_shape(make), both, steps="all", follow=False)
    for name in ("plain/w", "average/w"):
        assert [found.metrics[i][name] for i in (2, 4)] == run.history[name]
    assert run.history["plain/w"] != run.history["average/w"]


def test_the_optimizer_need_not_be_that_of_the_run(tmp_path):
    save(tmp_path, 1)
    other = lambda: sf.init_state({"w": jnp.ones(())}, optax.adam(0.1), jax.random.key(0))
    assert sf.evaluate_run(tmp_path, other, evaluation(), follow=False).metrics == {
        1: {"eval/w": 1.0}
    }


def test_a_damaged_step_is_left_out_with_a_warning(tmp_path):
    save(tmp_path, 1, 2)
    for path in (tmp_path / "2/state/d").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.warns(RuntimeWarning, match="step 2 is not evaluated, since it cannot be restored"):
        found = evaluate(tmp_path, steps="all")
    assert list(found.metrics) == [1]


@pytest.mark.parametrize("damage", [b"damaged", b"", b"\0" * 99])
def test_a_damaged_result_counts_as_none_and_is_made_again(damage, tmp_path):
    save(tmp_path, 1)
    evaluate(tmp_path)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(damage)
    checkpoints = sf.Checkpoints(tmp_path, best="eval/w", mode="min")
    text = rf"{path.name}: the result of the evaluation is damaged; .* step 1 again"
    with pytest.warns(RuntimeWarning, match=text):
        assert checkpoints.best_step() is None
    with pytest.warns(RuntimeWarning, match=text):
        assert evaluate(tmp_path) == ({1: {"eval/w": 1.0}}, [])
    assert checkpoints.best_step() == 1
    assert evaluate(tmp_path) == ({}, [])


def test_another_model_is_refused(tmp_path):
    save(tmp_path, 1)
    state = like()._replace(params={"v": jax.ShapeDtypeStruct((), jnp.float32)})
    with pytest.raises(sf.errors.TreeMismatchError, match="params/v"):
        sf.evaluate_run(tmp_path, state, evaluation(), follow=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "last"}, "steps: expected 'newest' or 'all', got 'last'"),
        ({"timeout": 0}, "timeout: expected"),
        ({"follow": 1}, "follow: expected"),
    ],
)
def test_arguments_are_checked(tmp_path, options, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        evaluate(tmp_path, **options)


def test_it_waits_for_a_run_that_has_not_begun_until_the_timeout(tmp_path):
    start = time.monotonic()
    found = sf.evaluate_run(tmp_path / "new", like, evaluation(), timeout=0.5)
    assert found == ({}, [])
    assert time.monotonic() - start >= 0.5
    assert not (tmp_path / "new").exists()


def fit(folder, hooks=(), **options):
    options = {"steps": 4, "checkpoints": sf.Checkpoints(every=2)} | options
    return sf.fit(
        small.STEP, small.start(), small.batches(), run_dir=folder, hooks=hooks, log_every=1,
        **options,
    )  # fmt: skip


def test_it_ends_with_the_run(tmp_path):
    """Of a run that does not await it, `run.json` says that it has ended."""
    fit(tmp_path)
    assert list(evaluate(tmp_path, steps="all", follow=True).metrics) == [2, 4]


def test_a_run_that_was_interrupted_has_not_ended(tmp_path):
    def interrupt(event):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(tmp_path, interrupt)
    start = time.monotonic()
    evaluate(tmp_path, follow=True, timeout=0.3)
    assert time.monotonic() - start >= 0.3


def test_checkpoints_may_be_in_another_directory_than_the_run(tmp_path):
    fit(tmp_path / "run", checkpoints=sf.Checkpoints(tmp_path / "other", every=2))
    assert list(evaluate(tmp_path / "run", steps="all").metrics) == [2, 4]


def test_a_step_is_held_while_it_is_evaluated(tmp_path):
    save(tmp_path, 1)
    kept = []

    def measure(state):
        if not kept:
            with sf.Checkpoints(tmp_path, keep=1) as series:
                for step in (5, 6, 7):
                    series.save(small.start(), step=step)
                series.wait()
                kept.extend(series.steps())
        return {"one": 1.0}

    sf.evaluate_run(tmp_path, like, sf.Evaluation(measure), steps="all", follow=False)
    assert kept == [1, 7]
    assert not any((tmp_path / LEASES).iterdir())


@pytest.mark.parametrize("is_here", [True, False])
def test_a_lease_ends_with_its_holder(tmp_path, monkeypatch, is_here):
    """On this host with the process, elsewhere with its heartbeat."""
    store = open_store(tmp_path)
    lease = Lease(store, LEASES)
    lease.hold({"names": [], "steps": [1]})
    (path,) = (tmp_path / LEASES).iterdir()
    note = store.read_note(f"{LEASES}/{path.name}")
    note["process"] |= {"started": "0"} if is_here else {"machine": "another"}
    store.write_note(f"{LEASES}/another", note)
    with sf.Checkpoints(tmp_path, keep=1) as series:
        for step in (1, 2, 3):
            series.save(small.start(), step=step)
        series.wait()
        assert series.steps() == [1, 3]
        lease.release()
        assert is_here == ("another" not in store.list_notes(LEASES))
        monkeypatch.setattr(claims, "_STALE", -1.0)
        series.save(small.start(), step=4)
    assert series.steps() == [4]
    assert store.list_notes(LEASES) == []


def test_a_heartbeat_keeps_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_STALE", 1.0)
    monkeypatch.setattr(claims, "_BEAT", 0.05)
    monkeypatch.setattr(claims, "_is_live", lambda _: None)
    store = open_store(tmp_path)
    lease, leases = Lease(store, LEASES), claims.Leases(store, LEASES)
    lease.hold({"steps": [1]})
    start = time.monotonic()
    while time.monotonic() - start < 1.5:
        assert leases.held() == [{"steps": [1]}]
        time.sleep(0.05)
    lease.release()
    assert leases.held() == []


def test_an_interrupt_leaves_no_lease(tmp_path):
    save(tmp_path, 1)

    def measure(state):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sf.evaluate_run(tmp_path, like, sf.Evaluation(measure))
    assert not any((tmp_path / LEASES).iterdir())


SCRIPT = """
import jax, stepfold as sf
from tests import small
state = small.start()
make = lambda: (jax.eval_shape(lambda: state), sf.Evaluation(lambda s: {"w": s.params["w"]}))
none = lambda: None
takes_one = lambda x: x
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def test_the_command_line(script, tmp_path, capsys):
    save(tmp_path / "run", 1, 2)
    assert main(["evaluate", f"{script}:make", str(tmp_path / "run"), "--once"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "step 1  left out, since a newer step is there\nstep 2  eval/w 2\n"
    assert printed.err == "evaluated 1 step\n"
    save(tmp_path / "run", 3)
    run = str(tmp_path / "run")
    assert main(["evaluate", f"{script}:make", run, "--all", "--timeout", "0.1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "step 1  eval/w 1\nstep 3  eval/w 3\n"
    assert printed.err == f"waiting for checkpoints in {run}\nevaluated 2 steps\n"
    assert main(["evaluate", f"{script}:make", run, "--once"]) == 0
    assert capsys.readouterr().err == f"evaluated 0 steps: none waits for an evaluation in {run}\n"


def test_the_command_line_names_a_directory_without_checkpoints(script, tmp_path, capsys):
    run = str(tmp_path / "mistyped")
    assert main(["evaluate", f"{script}:make", run, "--timeout", "0.1"]) == 0
    assert capsys.readouterr().err == (
        f"waiting for checkpoints in {run}\nevaluated 0 steps: there are no checkpoints in {run}\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "expected (state, evaluations) from it, got None"),
        ("takes_one", "expected a function without arguments, got"),
        ("nothing", "expected a function without arguments, got no 'nothing' in "),
        ("mak", "script.py; did you mean 'make'?"),
    ],
)
def test_the_command_line_explains_errors(script, tmp_path, capsys, name, message):
    assert main(["evaluate", f"{script}:{name}", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert main(["evaluate", "make", str(tmp_path)]) == 2
    assert "evaluate: expected script.py:make, got make" in capsys.readouterr().err
