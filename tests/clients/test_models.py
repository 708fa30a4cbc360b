"""Models of libraries that know nothing of stepfold, with batch norm and dropout."""

import jax
import pytest

from . import course, models

MODELS = {
    "flax linen": models.of_linen,
    "flax nnx": models.of_nnx,
    "equinox": models.of_equinox,
    "haiku": models.of_haiku,
    "no library": models.of_no_library,
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def trained(request, tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        yield course.train(request.param(), tmp_path_factory.mktemp("run"))


def test_it_learns(trained):
    course.check_it_learned(trained)


def test_it_is_measured_alike_in_batches_of_any_size(trained):
    course.check_it_is_measured_alike(trained)


def test_it_goes_on_bit_for_bit_from_a_checkpoint(trained):
    course.check_it_goes_on(trained)


def test_the_model_is_left_whole(trained):
    course.check_the_model_is_left_whole(trained)
