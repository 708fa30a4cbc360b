"""Every argument of the public functions: a wrong value raises an error that names the argument."""

import dataclasses
import inspect
import io
import math
import os
import tempfile
import warnings
from functools import cache
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import ones

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments

pytestmark = pytest.mark.not_optimized

TX = optax.sgd(0.1)
DATA = {"x": np.arange(16, dtype=np.float32)}
ROWS = {"x": DATA["x"][:8]}
MESH = sf.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
PARAMS = {"w": ones(4)}


def loss_fn(params, batch, key):
    return sf.mean((params["w"].sum() * batch["x"]) ** 2)


STEP = jax.jit(sf.make_train_step(loss_fn, TX))
EVAL = jax.jit(sf.make_eval_step(loss_fn))


@pytest.fixture(autouse=True, scope="module")
def temporary_directory(tmp_path_factory):
    """Write relative paths and new directories below pytest's own."""
    before, directory = Path.cwd(), tmp_path_factory.mktemp("fuzz")
    tempfile.tempdir = str(directory)
    os.chdir(directory)
    yield
    tempfile.tempdir = None
    os.chdir(before)


@cache
def initial():
    return sf.init_state(PARAMS, TX, jax.random.key(0))


def state():
    return jax.tree.map(jnp.copy, initial())


def batches():
    return sf.batches(DATA, 8, seed=0, epochs=1)


def folder():
    return tempfile.mkdtemp(prefix="fuzz-")


@cache
def saved():
    path = folder()
    sf.save(path, PARAMS, step=1)
    return path


@cache
def exported():
    path = folder()
    sf.checkpoint.export_params(path, PARAMS)
    return path


# Valid arguments of each public callable, with every optional parameter that has a simple value.
VALID = {
    "Checkpoints": lambda: {
        "directory": folder(), "every": 1, "every_epochs": 1, "every_minutes": 1.0, "keep": 1,
        "keep_every": 1, "best": "eval/loss", "mode": "min", "keep_best": 1, "async_": False,
    },
    "Evaluation": lambda: {
        "measure": EVAL, "batches": batches, "every": 1, "every_epochs": 1, "name": "eval",
    },
    "Precision": lambda: {"compute": "bfloat16", "keep": "norm"},
    "async_writer": lambda: {"writer": sf.writers.Writer(), "depth": 2},
    "average_checkpoints": lambda: {"directory": saved(), "steps": [1], "like": None, "part": "w"},
    "batches": lambda: {
        "source": DATA, "batch_size": 8, "seed": 0, "start": 0, "epochs": 1, "remainder": "drop",
        "transform": None, "collate": None, "process_index": 0, "process_count": 1,
    },
    "block_diagonal_mask": lambda: {"segment_ids": np.ones((1, 4), int), "causal": True},
    "callback": lambda: {"function": lambda trainer, step, metrics: None},
    "check_step": lambda: {"step": sf.make_train_step(loss_fn, TX), "every": 2},
    "collate": lambda: {
        "examples": [{"ids": [1, 2]}], "length": 4, "truncate": "keep_end", "side": "right",
        "pad": 0, "keys": ["ids"],
    },
    "compile_step": lambda: {
        "step": sf.make_train_step(loss_fn, TX), "state": state(), "batch": ROWS, "donate": False,
    },
    "contents": lambda: {"directory": saved(), "step": "latest"},
    "describe": lambda: {
        "step": sf.make_train_step(loss_fn, TX), "state": state(), "batch": ROWS, "donate": False,
        "tokens": 8,
    },
    "dynamic_loss_scale": lambda: {
        "tx": TX, "initial": 2.0, "factor": 2.0, "period": 3, "minimum": 1.0, "maximum": 8.0,
    },
    "ema_params": lambda: {"tx": TX, "decay": 0.5, "debias": False},
    "NameMap": lambda: {"rules": [("a", "b")], "ignore": ["c"], "tied": {"d": "b"}},
    "evaluate": lambda: {"eval_step": EVAL, "state": state(), "batches": batches()},
    "every": lambda: {"n": 2, "hook": lambda event: None},
    "export_params": lambda: {
        "path": folder(), "params": PARAMS, "names": lambda path: path, "shard_size": 100,
        "metadata": {"a": "b"},
    },
    "fit": lambda: {
        "step": STEP, "state": state(), "batches": batches(), "steps": 1, "run_dir": folder(),
        "evaluation": (), "checkpoints": None, "hooks": (), "log_every": 1, "resume": True,
        "steps_per_call": 1, "time_limit": 60.0,
    },
    "fsdp": lambda: {"axis": "fsdp", "min_size": 1},
    "get_ema": lambda: {"state": sf.init_state(PARAMS, sf.ema_params(TX, 0.5), jax.random.key(0))},
    "init_state": lambda: {
        "init": PARAMS, "tx": TX, "key": jax.random.key(0), "stateful": False, "sharding": None,
    },
    "latest_step": lambda: {"directory": saved()},
    "load_params": lambda: {"path": exported(), "like": PARAMS, "names": None, "cast": False},
    "log_to": lambda: {"writer": sf.writers.Writer(), "every": 1, "everywhere": False},
    "low_precision": lambda: {"tx": TX},
    "make_eval_step": lambda: {"loss_fn": loss_fn, "precision": None, "stateful": False},
    "make_mesh": lambda: {
        "dims": (1,), "names": ("fsdp",), "dcn_dims": None, "devices": jax.devices()[:1],
    },
    "make_sharding": lambda: {
        "tree": PARAMS, "mesh": MESH, "rules": sf.sharding.fsdp(), "misfit": "error",
    },
    "make_train_step": lambda: {
        "loss_fn": loss_fn, "tx": TX, "accumulate": 1, "precision": None, "remat": None,
        "skip_nonfinite": False, "stateful": False, "grad": sf.make_grad,
    },
    "mix": lambda: {"sources": [(DATA, 1.0), (DATA, 2.0)], "seed": 0},
    "only_warn": lambda: {"hook": lambda event: None},
    "pack": lambda: {
        "examples": [{"ids": [1, 2]}], "length": 4, "rows": 1, "window": 4, "split": False,
        "truncate": None, "pad": 0,
    },
    "parameter_table": lambda: {"params": PARAMS, "stats": False},
    "place": lambda: {"state": PARAMS, "plan": sf.make_sharding(PARAMS, MESH)},
    "prefetch": lambda: {"batches": batches(), "sharding": None, "size": 1},
    "profile": lambda: {"first": 1, "count": 1, "folder": folder()},
    "progress": lambda: {
        "kind": "lines", "metrics": ["train/loss"], "average": "train/loss", "over": 2,
        "file": io.StringIO(),
    },
    "read_capsule": lambda: {"path": folder()},
    "replay": lambda: {"capsule": folder(), "step": STEP, "state": None, "batches": None},
    "restore": lambda: {
        "directory": saved(), "like": PARAMS, "step": "latest", "best": None, "parts": None,
        "rename": None, "cast": False, "partial": False, "fall_back": True,
    },
    "save": lambda: {
        "directory": folder(), "state": PARAMS, "step": 1, "data": None, "metrics": {"a": 1.0},
    },
    "shard_batch": lambda: {"batch": ROWS, "mesh": MESH, "axes": "fsdp"},
    "sharding_table": lambda: {"tree": PARAMS, "plan": None},
    "skip_spikes": lambda: {"tx": TX, "window": 10, "deviations": 3.0},
    "stop_early": lambda: {
        "metric": "eval/loss", "patience": 1, "mode": "min", "min_delta": 0.0, "keep_state": False,
    },
    "hooks.on_nonfinite": lambda: {
        "metric": "train/loss", "action": "go_back", "skip": 2, "limit": 1,
    },
    "hooks.on_spike": lambda: {
        "metric": "train/loss", "action": "go_back", "window": 10, "deviations": 3.0, "skip": 2,
        "limit": 1, "name": "mine",
    },
    "writers.console": lambda: {"stream": io.StringIO()},
    "writers.jsonl": lambda: {"path": folder() + "/a.jsonl", "csv": folder() + "/a.csv"},
    "writers.tensorboard": lambda: {"folder": folder()},
    "writers.wandb": lambda: {"library": "trackio"},
    "throughput": lambda: {"flops": 1.0, "peak": 1.0, "dtype": "bfloat16", "tokens": len},
    "make_grad": lambda: {
        "loss_fn": loss_fn, "accumulate": 1, "stateful": False, "accumulator_dtype": jnp.float32,
    },
    "verify": lambda: {"directory": saved()},
    "watchdog": lambda: {"seconds": 100.0, "abort": False, "file": io.StringIO()},
    "weight_statistics": lambda: {
        "pattern": "w", "writer": sf.writers.Writer(), "samples": 10, "name": "weights",
    },
}  # fmt: skip
WRONG = {
    "None": None, "True": True, "-1": -1, "0": 0, "3": 3, "0.5": 0.5, "nan": math.nan,
    "inf": math.inf, "huge": 10**400, "''": "", "'x'": "x", "NUL": "\0", "bytes": b"\0",
    "[]": [], "{}": {}, "()": (), "[None]": [None], "object": object(), "set": {1},
    "array": ones(3), "scalar": np.float32(0.5), "lambda": lambda: None, "type": int,
    "path": Path("/dev/null/x"),
}  # fmt: skip
# What user functions do with wrong data is theirs: these are trees, batches, and functions.
OWN = {
    "state", "batch", "params", "tree", "like", "data", "examples", "segment_ids", "step", "plan",
    "eval_step", "loss_fn", "hook", "init", "key", "grad", "sharding", "source", "sources",
}  # fmt: skip
FUNCTIONS = {"names", "rules", "rename", "remat"}  # called: a wrong one raises its own error
NEED_RUN_DIR = {"run_dir", "checkpoints", "resume"}
SLOW = {"compile_step", "describe", "evaluate"}  # flags only


def raw_error(name, parameter, wrong):
    """Call with one wrong value; return the error if it is neither clear nor of stepfold."""
    arguments = VALID[name]()
    if name == "fit" and parameter not in NEED_RUN_DIR:
        arguments["run_dir"] = None  # to write the files of a run takes longer than its steps
    valid, arguments[parameter] = arguments[parameter], WRONG[wrong]
    function = attrgetter(MOVED.get(name, name))(sf)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**arguments)
            if inspect.isgenerator(result):
                next(result, None)
            getattr(result, "close", lambda: None)()
    except sf.StepfoldError:
        return None
    except Exception as error:  # noqa: BLE001  returned
        is_clear = isinstance(error, TypeError) and parameter in str(error)
        return None if is_clear else f"{type(error).__name__}: {error}"
    is_flag = isinstance(valid, bool)
    if is_flag and not isinstance(WRONG[wrong], bool):
        return "accepted"
    return None


@pytest.mark.parametrize("name", sorted(VALID.keys() - SLOW))
def test_wrong_value_is_refused_by_name(name):
    errors = {
        (parameter, wrong): raw_error(name, parameter, wrong)
        for parameter in VALID[name]().keys() - OWN
        for wrong in WRONG
        if (name, parameter) != ("fit", "batches")
        if parameter not in FUNCTIONS or wrong not in ("lambda", "type")
    }
    assert {case: error for case, error in errors.items() if error} == {}


@pytest.mark.parametrize("name", ["compile_step", "describe"])
def test_flag_is_a_boolean(name):
    for wrong in ("None", "0", "'x'", "object", "array"):
        assert raw_error(name, "donate", wrong) is None, wrong


@pytest.mark.filterwarnings("ignore")
def test_wrong_training_argument_is_refused_by_name():
    problems = {}
    for field in dataclasses.fields(TrainingArguments):
        for wrong, value in WRONG.items() if field.init else ():
            try:
                TrainingArguments(**{field.name: value})
            except (sf.StepfoldError, TypeError) as error:
                if field.name not in str(error):
                    problems[field.name, wrong] = str(error)
            except Exception as error:  # noqa: BLE001  reported
                problems[field.name, wrong] = f"{type(error).__name__}: {error}"
    assert problems == {}


TRAINER = {
    "model_state": None, "model": lambda key: PARAMS, "data_collator": None, "finetune": True,
    "eval_loss_fn": None, "stateful": False, "tx": None, "scheduler": None, "rules": None,
    "devices": None, "evaluations": (), "hooks": (), "callbacks": (), "watchers": (),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parameter", TRAINER)
def test_wrong_argument_of_a_trainer_is_refused_by_name(parameter):
    problems, arguments = {}, TrainingArguments(max_training_steps=1, save_directory=folder())
    for wrong, value in WRONG.items():
        given = {"loss_fn": loss_fn, "dataset_train": DATA, **TRAINER, parameter: value}
        try:
            Trainer(arguments, **given)
            if isinstance(TRAINER[parameter], bool) and not isinstance(value, bool):
                problems[wrong] = "accepted"
        except (sf.StepfoldError, TypeError) as error:
            if isinstance(error, TypeError) and parameter not in str(error):
                problems[wrong] = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  reported
            problems[wrong] = f"{type(error).__name__}: {error}"
    assert problems == {}


@pytest.mark.parametrize("wrong", ["", None, 3])
def test_evaluation_without_a_function_is_refused(wrong):
    with pytest.raises(sf.errors.ConfigError, match="eval_step: expected a function"):
        sf.evaluate(wrong, state(), batches())


def test_deleted_metrics_are_continued_with_a_warning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = sf.writers.jsonl(path)
    writer.write_scalars(1, {"a": 1.0})
    path.unlink()
    with pytest.warns(RuntimeWarning, match="deleted during the run, with the rows up to step 1"):
        writer.write_scalars(2, {"a": 2.0})
    writer.close()
    assert path.read_text() == '{"step": 2, "a": 2.0}\n'


def test_blank_last_line_is_continued(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n\n')
    writer = sf.writers.jsonl(path)
    writer.write_scalars(2, {"a": 2.0})
    writer.close()
    assert path.read_text() == '{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n'
