import io
from types import SimpleNamespace

from stepfold.adapter.showing import is_due, named, show, without_norms


def test_names_get_the_mode_once():
    found = named({"loss": 1, "train/loss": 2, "eval/loss": 3, "a/mlperf": 4}, "eval")
    assert found == {"eval/loss": 3.0, "train/loss": 2.0}
    assert without_norms({"train/grad_norm": 1.0, "train/loss": 2.0}) == {"train/loss": 2.0}


def test_train_steps_are_due_each_so_many_and_at_the_end():
    plan = SimpleNamespace(log_every=5, steps=23)
    due = lambda step, every, mode="train": is_due(step, every, plan, mode)
    assert [due(step, 10) for step in (5, 10, 23)] == [False, True, True]
    assert due(7, 5)
    assert due(7, 10, "eval")


def test_a_bar_of_tqdms_will_do():
    from tqdm import tqdm

    with tqdm(total=10, file=io.StringIO()) as bar:
        show({"train/loss": 1.0}, bar, 4)
        show({"train/loss": 1.0}, bar, 6)
        assert bar.n == 6
