import jax.numpy as jnp

import stepfold as sf
from stepfold.adapter.card import card, spark


def test_a_card_tells_of_arguments_parameters_devices_and_curves():
    text = card(
        "digits",
        arguments={"learning_rate": 0.1, "left_out": None, "pattern": "a|b"},
        params={"w": jnp.ones((3, 2))},
        mesh=sf.make_mesh(),
        history={"eval/loss": [2.0, 1.0]},
        stopped="all 2 steps were done",
        notes={"checkpoint": "runs/2"},
    )
    assert text.startswith("# digits\n\nThe run ended: all 2 steps were done.\n")
    for said in ("| learning_rate | `0.1` |", "`'a\\|b'`", "| w    | (3, 2)", "'fsdp': 8"):
        assert said in text
    assert "| eval/loss | 2 | 2 | 1 | 1 | 2 | █▁ |" in text
    assert "left_out" not in text
    assert f"| stepfold | `'{sf.__version__}'` |" in text


def test_a_card_of_little_leaves_sections_out():
    text = card("a", arguments={}, params={"w": jnp.ones(1)})
    assert "## Results" not in text
    assert "## Arguments" not in text


def test_a_long_curve_is_thinned_and_a_flat_one_is_low():
    assert spark(range(1000)) == spark(range(1000))
    assert len(spark(range(1000))) == 32
    assert spark([3.0, 3.0]) == "▁▁"
    assert spark([]) == ""
