"""The trainer: a run as an object, that has the parts of stepfold do all of it."""

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from stepfold.adapter import evaluating, resuming, running, saving
from stepfold.adapter.calling import Called
from stepfold.adapter.card import card
from stepfold.adapter.compiling import ForOneForm, first_batch
from stepfold.adapter.counting import count_parameters, total_flops
from stepfold.adapter.outputs import TrainerOutput
from stepfold.adapter.parts.writers import writers
from stepfold.adapter.starting import is_state
from stepfold.adapter.stepping import as_eval_step, as_train_step
from stepfold.adapter.stopping import advise
from stepfold.adapter.watching import by_epoch
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.verify import latest_step
from stepfold.errors import ConfigError
from stepfold.inspect.compiled import CompiledStep, compile_step
from stepfold.loop.result import FitResult


class Trainer(Called):
    """A run as an object, for code that expects EasyDeL's `BaseTrainerProtocol`.

    It is the one class of stepfold that changes. It holds what `fit` is given and gives back, and
    every method that a subclass may write anew is the one that is called: `configure_model`,
    `configure_dataloaders`, `configure_functions`, `create_collect_function`, `on_step_end` and so
    on. Whatever is not asked for costs nothing: without `on_step_start` and `on_step_end` of one's
    own, no Python runs between steps.

    Attributes:
      model_state: the state; `state` and `_model_state` are the same.
      history: what was measured, as of `fit`; `epoch_history` is the same by epochs.
      stopped: why the last run ended, in words.
      plan: the numbers of the run: batch sizes, steps, and when what is due.

    >>> import jax, numpy as np, stepfold as sf
    >>> from stepfold.adapter import Trainer, TrainingArguments
    >>> trainer = Trainer(
    ...     TrainingArguments(max_steps=20, total_batch_size=8, progress_bar_type="none"),
    ...     model=lambda key: jax.random.normal(key, (3,)),
    ...     dataset_train={"x": np.ones((16, 3), np.float32)},
    ...     loss_fn=lambda params, batch, key: sf.mean((batch["x"] @ params) ** 2, batch["mask"]),
    ... )
    >>> trainer.train().stopped, int(trainer.state.step)
    ('all 20 steps were done', 20)
    """

    # The run

    def train(
        self, model_parameters: Any = None, state: Any = None, ckpt_path: Any = None
    ) -> TrainerOutput:
        """Do the whole run: from the first step, or from the newest checkpoint of `output_dir`.

        A loss that is not finite, the time limit, Ctrl-C, and an exception of any method or hook
        end it after a save; the last two go on to the caller.

        Args:
          model_parameters: parameters to begin with.
          state: a state to go on from.
          ckpt_path: a checkpoint to go on from: a step's folder, a run's, or what `save_pretrained`
            wrote.

        Returns:
          The state, and where it was saved.
        """
        if not self.arguments.do_train:
            return self._output("do_train is False")
        if self.dataloader_train is None:
            raise ConfigError("dataset_train: expected data to train on, got None")
        self.writer = self.writer or writers(self.arguments)
        resuming.begin(self, model_parameters, state, ckpt_path)
        self.start_training_hook()
        result: FitResult | None = None
        try:
            with self.timer("train"):
                result = running.run(self)
        except BaseException as error:
            advise(error)
            result = getattr(error, "result", None)
            if result is None:
                self.stopped = f"{type(error).__name__}: {error}"
                self.model_state = resuming.last_good(self)
            raise
        finally:
            if result is not None:
                self.model_state, self.history = result.state, result.history or self.history
                self.stopped, self.best = str(result.stop_reason), result.best
            self.finish()
        return self._output(str(result.stop_reason))

    def _output(self, stopped: str) -> TrainerOutput:
        self.stopped = stopped
        own = resuming.own_place(self)
        newest = latest_step(own) if own is not None and own.is_dir() else None
        name = None if newest is None else str(newest)
        self.checkpoint_path = None if own is None or name is None else str(own / name)
        return TrainerOutput(
            self.model_state, self.mesh, name, self.checkpoint_path, stopped=stopped
        )

    def finish(self) -> None:
        """Close the writers and the bar; the last save was waited for. To call it twice is well."""
        bar, writer = self.progress_bar, self.writer
        self.progress_bar = self.writer = None
        if bar is not None:
            bar.close()
        if writer is not None and self.is_enable:
            writer.close()

    # Evaluation

    def eval_batches(self, dataset: Any = None) -> Any:
        """Give the batches anew, after `start_evaluation_hook`."""
        self.start_evaluation_hook()
        loader = self.dataloader_eval if dataset is None else self._evaluation_batches(dataset)
        if loader is None:
            raise ConfigError("dataset_eval: expected data to evaluate on, got None")
        return iter(loader() if callable(loader) else loader)

    def evaluate(
        self, state: Any = None, metric_calculator: Any = None, *, dataset: Any = None
    ) -> dict[str, float]:
        """Measure a state on all of the evaluation data, exactly; nothing is logged.

        Args:
          state: the state; by default the trainer's own. Something that is no state is a dataset.
          metric_calculator: a function `(state, batch) -> metrics`, or of the numbers by name, that
            gives more of them.
          dataset: other data to measure it on.

        Returns:
          Numbers by name: `eval_loss` and so on.
        """
        if state is not None and not is_state(state) and dataset is None:
            state, dataset = None, state
        state = self.model_state if state is None else state
        batches = self.eval_batches(dataset)
        with self.timer("evaluation"):
            return evaluating.measure(self._checked_step(), state, batches, metric_calculator)

    def eval(self, model_state: Any) -> Iterator[dict[str, float]]:
        """Measure a state on each batch of the evaluation data."""
        batches = self.eval_batches()
        yield from evaluating.measure_each(self._checked_step(), model_state, batches)

    def _checked_step(self) -> Any:
        if self.measuring_step is None:
            raise ConfigError(
                "eval_step_fn: expected a step (state, batch) -> metrics, got None; give one from "
                "configure_functions"
            )
        return self.measuring_step

    # Before the run

    def compile_aot(self) -> bool:
        """Compile both steps before they run, and keep what was compiled; True when it did."""
        step = self.sharded_training_step_function
        if self.dataloader_train is not None and not isinstance(step, CompiledStep):
            batch, self.dataloader_train = first_batch(self.dataloader_train, "dataloader_train")
            self.sharded_training_step_function = compile_step(
                as_train_step(step), self.model_state, batch
            )
        step = self.sharded_evaluation_step_function
        if self.dataloader_eval is not None and not isinstance(step, ForOneForm | None):
            batch, _ = first_batch(self.dataloader_eval, "dataloader_eval")
            made = ForOneForm(as_eval_step(step), self.model_state, batch)
            self.sharded_evaluation_step_function = self.measuring_step = made
        return True

    def calculate_number_total_flops(self, params: Any, is_training: bool = True) -> int:
        """Count the operations of a step: of what `compile_aot` compiled, or an estimate."""
        batch = self.training_batch_size if is_training else self.evaluation_batch_size
        steps = self.sharded_training_step_function, self.sharded_evaluation_step_function
        compiled = getattr(steps[not is_training], "compiled", None)
        tokens = batch * (self.arguments.max_length or 1)
        return total_flops(params, tokens, compiled, training=is_training)

    @staticmethod
    def count_model_parameters(prm: Any) -> int:
        """Count the parameters in any tree."""
        return count_parameters(prm)

    def specs_to_name_sharding(self, tree: Any, mesh: Any = None) -> Any:
        """Make shardings of a tree of partition specs, on this mesh or another."""
        place = functools.partial(NamedSharding, self.mesh if mesh is None else mesh)
        return jax.tree.map(place, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

    # What is kept

    def save_pretrained(
        self,
        state: Any = None,
        save_directory: Any = None,
        gather_fns: Any = None,
        to_torch: bool = False,
        easystate_to_huggingface_model_kwargs: Mapping[str, Any] | None = None,
        torch_save_pretrained_kwargs: Mapping[str, Any] | None = None,
        *,
        ckpt_path: Any = None,
    ) -> Path:
        """Save a state, to go on from, with arguments and position in the data; or for torch.

        Both `save_pretrained(path, state)` and `(state, save_directory=path)` will do, and without
        a state it is the trainer's own.

        Args:
          state: the state, or the path.
          save_directory: the path, or the state.
          gather_fns: nothing is gathered, arrays are saved where they are; it has to be None.
          to_torch: whether to write the parameters alone, as safetensors that torch loads.
          easystate_to_huggingface_model_kwargs: `names`, what torch calls parameters, by path.
          torch_save_pretrained_kwargs: `metadata` of the safetensors.
          ckpt_path: the path.

        Returns:
          The folder of the checkpoint, or that of the safetensors.
        """
        path, state = saving.path_and_state(state, save_directory, ckpt_path)
        state = self.model_state if state is None else state
        saving.refuse_gathering(gather_fns)
        if not to_torch:
            return saving.save_run(self, path, state)
        saving.save_for_torch(
            path,
            state.params,
            **saving.torch_options(easystate_to_huggingface_model_kwargs, "names"),
            **saving.torch_options(torch_save_pretrained_kwargs, "metadata"),
        )
        return path

    def save_information(self, output_path: str | os.PathLike[str]) -> None:
        """Write a card of the run as markdown, to a file or as `README.md` in a folder."""
        text = card(
            self.arguments.model_name,
            arguments=self.arguments.to_dict(),
            params=getattr(self.state_shape, "params", self.state_shape),
            mesh=self.mesh,
            history=self.history,
            stopped=self.stopped,
            notes={"checkpoint": self.checkpoint_path, "loaded": self.loaded, "left": self.left},
        )
        if self.is_process_zero:
            saving.write_card(output_path, text)

    def load_checkpoint(
        self, path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint, or parts of it, into the trainer's state.

        Args:
          path: a step's folder, a run's, or what `save_pretrained` wrote.
          load_optimizer: whether to load the optimizer's state, the step and the key.
          load_scheduler: whether to load where the schedule stands.

        Returns:
          What was loaded: the state, its step and metrics, and the paths that were and were not.
        """
        folder = self.arguments.checkpoints_dir
        found: Restored = resuming.load_parts(
            path, self.model_state, folder, optimizer=load_optimizer, scheduler=load_scheduler
        )
        self.model_state, self.loaded, self.left = found.state, found.loaded, found.left
        self.asked = "load_checkpoint"
        return found._asdict()

    # What can be asked of it

    @property
    def best_state(self) -> Any:
        """The best state so far: that of early stopping, or of the best checkpoint."""
        kept = getattr(self.early_stopping, "best_state", None)
        if kept is not None:
            return kept
        own, manager = resuming.own_place(self), self.checkpoint_manager
        if own is None or manager is None or manager.best is None:
            raise ConfigError(
                "best_state: expected metric_for_best_model and an output_dir, or "
                "early_stopping_patience, to know which state is the best"
            )
        return restore(own, resuming.abstract(self), step="best").state

    @property
    def epoch_history(self) -> dict[str, list[float]]:
        """What was measured, as a list of an element an epoch, by names as `train_loss`."""
        return by_epoch(self.history, self.plan.epoch_steps or self.max_training_steps or 1)
