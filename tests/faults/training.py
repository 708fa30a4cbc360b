"""A small run that saves often, asynchronously, and goes on from whatever an earlier one left.

It notes in a file what it has done, and how its state looked, for a test to hold against what is
found after it was killed.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

STEPS, EVERY = 16, 2
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def train(folder, notes, options, mesh=None):
    """Train to the end, from the newest checkpoint on, if there is one.

    A run that stops is continued by a test, once it has copied the files.

    Args:
      folder: where the checkpoints are.
      notes: the file to note in, where processes one after another may.
      options: what to do on the way, by name:
        kill_at: before which change of a file under the folder to be killed, counted from 1.
        kill_after: how many saves to begin, and how many seconds later to be killed.
        stop_at: before which changes to stop.
        stop_after: pairs of how many saves to begin, and how many seconds later to stop.
        temporary: a second folder for checkpoints; of three saves, two are in this one.
      mesh: where the state is.
    """
    kill_after, temporary = options.get("kill_after"), options.get("temporary")
    folders = [folder] if temporary is None else [folder, temporary]
    actions = dict.fromkeys(options.get("stop_at", ()), stop) | {options.get("kill_at"): kill}
    note, changes = Notes(notes), Changes(folders, actions)
    timers = {saves: (seconds, stop) for saves, seconds in options.get("stop_after", ())}
    if kill_after is not None:
        timers[kill_after[0]] = kill_after[1], kill
    shape, init, step = compiled(mesh)
    batches = sf.batches(examples(), 8, seed=0)
    saved, saves = None, 0
    every, second = EVERY, None
    if temporary is not None:
        every, second = 3 * EVERY, sf.Temporary(temporary, every=EVERY)
    described = sf.Checkpoints(folder, every=every, keep=2, best="eval/loss", temporary=second)
    with described as series:
        if series.latest_step() is None:
            state = init()
        else:
            state, number, data, extra, *_ = series.restore(shape)
            batches.set_state(data)
            note(restored=[number, digest(state)])
            assert extra["step"] == number
            assert extra["buffer"].tolist() == buffer(number).tolist()
        for number in range(int(state.step) + 1, STEPS + 1):
            state, _ = step(state, placed(next(batches), mesh))
            note(reached=[number, digest(state)])
            if series.due(number):
                note(saving=[number, changes.count])
                saves += 1
                if saves in timers:
                    seconds, action = timers[saves]
                    timer = threading.Timer(seconds, changes.call, (action,))
                    timer.daemon = True
                    timer.start()
                metrics = {"eval/loss": (number * 7) % 10}
                extra = {"step": number, "buffer": buffer(number)}
                series.save(state, data=batches, metrics=metrics, extra=extra)
                if saved is not None:
                    note(committed=saved)
                if number % 3 == 0:
                    series.wait()
                    note(committed=number)
                saved = number
    changes.actions = None
    note(committed=saved or 0)
    note(end=digest(state))


def train_all(runs):
    """Train one run after another."""
    for arguments in runs:
        train(*arguments)


def train_on_two(start, folder, notes, options):
    """Train in two processes, with options for each of them."""
    start(heartbeat=5, shutdown=5)
    own = options[jax.process_index()]
    train(folder, f"{notes}.{jax.process_index()}", own, sf.make_mesh())


@functools.cache
def compiled(mesh=None):
    """Return an abstract state with its shardings, what makes the first state, and the step.

    The step is compiled here, so that the time until a kill is spent on what it is to hit.
    """
    tx = sf.ema_params(optax.adam(1e-2), 0.9)
    key = jax.random.key(0)
    shape = jax.eval_shape(lambda key: sf.init_state(weights, tx, key), key)
    plan = None if mesh is None else sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1))
    if plan is not None:
        shape = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shape,
            plan,
        )
    init = functools.partial(sf.init_state, weights, tx, key, sharding=plan)
    step = jax.jit(sf.make_train_step(loss_fn, tx), donate_argnums=0)
    batch = placed(next(sf.batches(examples(), 8, seed=0)), mesh)
    return shape, init, step.lower(shape, batch).compile()


def weights(key):
    first, second = jax.random.split(key)
    return {"in": jax.random.normal(first, (8, 16)), "out": jax.random.normal(second, (16, 4))}


def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    return sf.mean(((hidden * kept) @ params["out"] - batch["y"]) ** 2)


def examples():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(40, 8)).astype(np.float32),
        "y": rng.normal(size=(40, 4)).astype(np.float32),
    }


def placed(batch, mesh):
    return batch if mesh is None else sf.shard_batch(batch, mesh)


def buffer(number):
    """Return what a checkpoint holds in an array next to the state."""
    return np.arange(5000) * number


def digest(state):
    """Give a short text that differs if any bit of the state does that this process has."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        numbers = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for shard in numbers.addressable_shards:
            total.update(f"{shard.index}{numbers.dtype}{numbers.shape}".encode())
            total.update(np.asarray(shard.data).tobytes())
    return total.hexdigest()[:16]


class Notes:
    """Append lines to a file; what was noted stays, whatever becomes of the process."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **what):
        os.write(self._file, json.dumps(what).encode() + b"\n")


WATCHING = []  # the last one counts; a hook of the interpreter is never removed


class Changes:
    """Count what Python changes of the files under folders, and act before some of the changes."""

    def __init__(self, folders, actions):
        self.count, self.actions = 0, actions
        self._folders = tuple(map(str, folders))
        if not WATCHING:
            sys.addaudithook(lambda event, args: WATCHING[-1].look(event, args))
        WATCHING.append(self)

    def call(self, action):
        """Act, unless the run has ended."""
        if self.actions is not None:
            action(self._folders[0])

    def look(self, event, args):
        if self.actions is not None and event in CHANGES and self._is_ours(event, args):
            self.count += 1
            if self.count in self.actions:
                self.call(self.actions[self.count])

    def _is_ours(self, event, args):
        if event == "open" and not any(letter in str(args[1]) for letter in "wax+"):
            return False
        if event in ("os.remove", "os.rmdir") and args[-1] != -1:
            return True  # what `rmtree` deletes, by its name in a folder that is open
        return str(args[0]).startswith(self._folders)


def kill(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(folder):
    """Print the folder, and stop until a test continues the process."""
    os.write(1, f"{folder}\n".encode())
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further


class Run:
    """A run of as many processes one after another as it takes, and what they noted.

    `go(folder, notes, *options)` starts the processes, and tells whether they came to the end.
    """

    def __init__(self, folder, go=None, *, is_temporary=False):
        self.folder, self._notes, self._go = folder / "checkpoints", folder / "notes", go
        self.local = folder / "local"
        self._options = {"temporary": str(self.local)} if is_temporary else {}
        folder.mkdir(exist_ok=True)

    def go(self, *options):
        """Go on, until the end or until killed; tell whether it was the end."""
        options = [{**self._options, **each} for each in options or ({},)]
        return self._go(str(self.folder), str(self._notes), *options)

    def arguments(self, options):
        return str(self.folder), str(self._notes), options

    def noted(self, what):
        """List what was noted under a name, by all processes."""
        files = sorted(self._notes.parent.glob(f"{self._notes.name}*"))
        notes = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return [note[what] for note in notes if what in note]

    def folders(self):
        """List the folders of steps: the durable one, and the one that the local folder has."""
        folders = [self.folder, *(self.local.iterdir() if self.local.exists() else [])]
        return [folder for folder in folders if folder.exists()]

    def names(self):
        """List what is in the folders; of temporary files, without what tells starts apart."""
        return [
            sorted(
                re.sub(r"-[0-9a-f]+\.\d+-", " of process ", path.name)
                for path in folder.iterdir()
                if path.name not in ("series.json", "host.json")
            )
            for folder in self.folders()
        ]

    def newest(self):
        """Return the number of the newest step, or 0, and check that every step is whole."""
        problems = [sf.checkpoint.verify(folder) for folder in self.folders()]
        assert not any(any(steps.values()) for steps in problems), problems
        return max((step for steps in problems for step in steps), default=0)

    def check(self, whole):
        """Compare what a killed process left with its notes, and with a run without kills.

        Return the steps of work that were lost.
        """
        newest = self.newest()
        assert newest >= max(self.noted("committed"), default=0), "a committed save was lost"
        lost = max((step for step, _ in self.noted("reached")), default=0) - newest
        assert lost <= 2 * EVERY
        for name in ("reached", "restored"):
            assert {*map(tuple, self.noted(name))} <= {*map(tuple, whole.noted("reached"))}
        return lost

    def check_end(self, whole):
        """Compare the end, and what is on the disk, with a run without kills."""
        assert sorted(set(self.noted("end"))) == sorted(whole.noted("end"))
        assert self.newest() == whole.newest() == STEPS
        assert self.names() == whole.names(), "something was left behind"


class Cut(BaseException):
    """End a run as a kill does."""


@contextlib.contextmanager
def cut(step):
    """Give a hook that cuts a run after a step; nothing is saved then."""

    def hook(event):
        if event.is_train and event.step == step:
            raise Cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepfold.runs.session.rescue", lambda *_: None)
        with pytest.raises(Cut):
            yield hook
