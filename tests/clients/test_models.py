"""Models of other libraries, with batch norm and dropout."""

import jax
import pytest

from . import course, models

MODELS = {
    "flax linen": pytest.param(models.of_linen, marks=pytest.mark.full),
    "flax nnx": models.of_nnx,
    "equinox": pytest.param(models.of_equinox, marks=pytest.mark.full),
    "haiku": pytest.param(models.of_haiku, marks=pytest.mark.full),
    "no library": pytest.param(models.of_no_library, marks=pytest.mark.full),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def trained(request, tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        yield course.train(request.param(), tmp_path_factory.mktemp("run"))


def test_learns_digits(trained):
    course.check_it_learned(trained)


def test_evaluation_does_not_depend_on_the_batch_size(trained):
    course.check_it_is_measured_alike(trained)


def test_resume_is_bit_for_bit(trained):
    course.check_it_goes_on(trained)


def test_donation_leaves_the_model_intact(trained):
    course.check_the_model_is_left_whole(trained)
