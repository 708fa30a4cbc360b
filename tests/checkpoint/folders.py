"""What lies in the folder of a series, and damage to it."""

import numpy as np


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(folder, step, array):
    """Flip a bit of an array that a step has on the disk, wherever it lies."""
    good = np.asarray(array).tobytes()
    paths = [*(folder / f"{step}").rglob("d/*"), *folder.glob(f"{step}-*")]
    found = [path for path in paths if good in path.read_bytes()]
    for path in found:
        path.write_bytes(path.read_bytes().replace(good, bytes([good[0] ^ 1]) + good[1:]))
    assert found
