"""Features of other trainers in the guide: each stands at the test that shows how it is served.

    python -m tests.clients.rows    writes the tables of the pages again

A test is decorated with `shows`, and a page has a line `% rows of DOCUMENT`. A feature of a new
document is added below, in the document's order, and to the decorator of one test.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

TESTS = Path(__file__).parent.parent
PAGES = TESTS.parent / "examples" / "guide" / "coming-from"
COMMAND = "python -m tests.clients.rows"
# The features that a document lists, by its headings.
DOCUMENTS = {
    "Trainer Protocol": {
        "Introduction": (
            "a protocol as the contract of trainers",
            "trainers are interchangeable",
            "a blueprint of required members",
            "type hints of the protocol",
        ),
        "Required methods: train": (
            "`train(model_parameters, state)`",
            "returns the state",
            "loads data by dataloaders",
            "iterates over epochs and steps",
            "executes a jitted step",
            "manages the state",
            "logs metrics and reports progress",
            "saves checkpoints by the arguments",
            "evaluates by the arguments",
            "resumes from `state`",
            "resumes by the arguments",
            "`model_parameters`",
            "`arguments.model_name_or_path`",
        ),
        "Required methods: evaluate": (
            "`evaluate(state, metric_calculator)`",
            "iterates, runs a jitted step and aggregates",
            "distributed evaluation",
            "`metric_calculator`",
            'keys `"eval_loss"`, `"accuracy"`',
        ),
        "Required methods: save_pretrained": (
            "`save_pretrained(ckpt_path, state=None)`",
            "model parameters",
            "optimizer state, `state.tx_state`",
            "training arguments",
            "metadata such as a tokenizer",
            "sharded and distributed saving",
            "without a state, that of the trainer",
        ),
        "Required methods: configuration": (
            "`configure_functions` returns a named tuple",
            "`TrainerConfigureFunctionOutput(train_step_fn, eval_step_fn)` by position",
            "`train_step_fn(state, batch)` returns state and metrics",
            "`eval_step_fn(state, batch)` returns metrics",
            "`configure_model` makes model, optimizer and state",
            "`TrainerConfigureModelOutput(model, state)` by position",
            "`configure_dataloaders` by the arguments and datasets",
            "`TrainerConfigureDataloaderOutput(dataloader_train, dataloader_eval)` by position",
            "the same three by keyword",
        ),
        "Required properties": (
            "`arguments`",
            "`dataset_train`",
            "`dataset_eval`",
            "`model`",
            "`_model_state`",
            "`dtype`",
            "`param_dtype`",
            "`scheduler`",
            "`optimizer`",
            "all nine belong to the protocol",
        ),
        "Implementation skeleton example": (
            "the class as printed, with abstract methods",
            "its methods filled in",
            "its `__init__`, on `Trainer`",
            "its six methods as overrides of `Trainer`",
            "`self.optimizer = …`, `self.scheduler = …` in `configure_model`",
            "its `train`, `evaluate` and `save_pretrained`, on `Trainer`",
        ),
        "Best practices for implementation": (
            "`state.step` is consistent",
            "immutable states",
            "out-of-memory errors",
            "failures of the data",
            "NaN or inf",
            "configurable logging, TensorBoard",
            "logs loss and learning rate",
            "logs memory",
            "`logging_steps`",
            "`save_strategy`, `save_steps`, epochs",
            "checkpoints hold all that a resume needs",
            "`save_total_limit`",
            "steps with `pmap` or `shmap`",
            "cleanup of resources",
        ),
    },
    "BaseTrainer": {
        "Core concepts": (
            "`BaseTrainer`",
            "SFT, DPO",
            "`TrainingArguments` is a dataclass",
            "`EasyDeLState`, a `TrainState` of flax",
            "the state holds PRNG keys",
            "`train()` is the whole loop",
            "automatic checkpoints of the state",
            "automatic saving of the arguments",
            "a limit on the number of checkpoints",
            "several devices with few changes",
        ),
        "Key methods": (
            "`__init__(arguments, …)`",
            "`configure_model` loads a pretrained model by the arguments",
            "`configure_dataloaders`",
            "`configure_functions`",
            "`create_collect_function()`",
            '`train("path")`',
            '`train(ckpt_path="path")`',
            "`eval(state)` returns a dict",
            "`train` evaluates",
            "`train` calls `eval`",
            "`train` calls `save_pretrained` by `save_strategy`",
        ),
        "Configuration example": (
            "the block as printed",
            "`model_name`",
            "`num_train_epochs`",
            "`learning_rate`",
            "`total_batch_size`",
            "`per_device_train_batch_size`",
            "`per_device_eval_batch_size`",
            "`gradient_accumulation_steps`",
            "`weight_decay`",
            "`max_steps=-1`",
            "`gradient_checkpointing`",
            "`sharding_array`",
            "`use_fast_kernels`",
            "`logging_steps`",
            "`save_steps`",
            "`save_total_limit`",
            "`evaluation_strategy`",
            "`eval_steps`",
            "`output_dir`",
            "`trainer.train()`",
        ),
        "Customization": (
            "override `configure_functions`",
            "override `create_collect_function`",
            "`on_step_start`",
            "`on_step_end`",
            "`on_log`",
            "`CustomTrainer` as printed",
            "`self.scheduler(state.step)` in a hook",
            "`super().on_step_end(…)` without `return`",
            "`state.apply_gradients(grads=grads)`",
            "a `TrainState` of flax as `model_state`",
        ),
    },
    "API reference": {
        "Constructor": (
            "seven arguments by position, from `arguments` to `finetune`",
            "`arguments=None`",
            "`model` is a class",
            "`finetune`",
            "`**deprecated_kwargs`",
        ),
        "Methods and properties": (
            "`apply_training_hooks` ends a run at a NaN",
            "`apply_training_hooks` ends a run at the time limit",
            "`apply_training_hooks` returns modified metrics",
            "`LossMetrics` objects",
            "`calculate_number_total_flops`",
            "`compile_aot`",
            "`configure_dataloaders` returns loaders and numbers of steps",
            "grain with `use_grain`",
            "tf.data without `use_grain`",
            "`configure_functions` returns steps, mesh and checkpoint manager",
            "`configure_model` returns model, `tx`, scheduler and config",
            "`pruning_module` wraps the optimizer",
            "`count_model_parameters`, also of a `FrozenDict`",
            "`create_collect_function`",
            "`create_grain_collect_function`",
            "`create_tfds_collect_function`",
            "`truncation_mode` of `keep_end` or `keep_start`",
            "`create_progress_bar` of tqdm, rich or JSON",
            "progress without a terminal",
            "`disabled=True` returns a `NullProgressBar`",
            "`eval` yields the metrics of each step",
            "`evaluation_batch_size`",
            "`training_batch_size`",
            "`finish`",
            "`initialize_trainer_utils` and its order",
            "`is_enable`",
            "`is_process_zero`",
            "`log_metrics` every `log_steps` and `report_steps`",
            "`log_metrics` filters `mlperf` and `grad_norm`",
            "`log_weight_distribution`",
            "`mesh`",
            "`model`",
            "`on_step_end(state, metrics, step)`",
            "`on_step_start(state, step)`",
            "`save_information(output_path)`",
            "`save_pretrained(state, save_directory)`",
            "`save_directory=None`",
            "`gather_fns`",
            "`to_torch`",
            "`easystate_to_huggingface_model_kwargs`",
            "`torch_save_pretrained_kwargs`",
            "`specs_to_name_sharding(tree, mesh)`",
            "`start_evaluation_hook`",
            "`start_training_hook`",
            "`train` returns a `TrainerOutput`",
            "abstract methods must be implemented",
            "an object with these members and no others",
        ),
        "Attributes": (
            "`arguments`",
            "`checkpoint_manager`",
            "`checkpoint_path`",
            "`config`",
            "`data_collator`",
            "`dataloader_train`",
            "`dataset_eval`",
            "`dataset_train`",
            "`dtype`",
            "`evalu_tracker`",
            "`finetune`",
            "`max_evaluation_steps`",
            "`max_training_steps`",
            "`memory_monitor`",
            "`model_state`",
            "`param_dtype`",
            "`pruning_module`",
            "`scheduler`",
            "`sharded_evaluation_step_function`",
            "`sharded_training_step_function`",
            "`state`",
            "`state_named_sharding`",
            "`state_partition_spec`",
            "`state_shape`",
            "`state_shardings`",
            "`timer`",
            "`train_tracker`",
            "`tx`",
            "`dataloader_eval`",
            "`wandb_runtime`",
        ),
        "TrainerConfigureDataloaderOutput": (
            "fields by keyword",
            "`from_dict`",
            "`from_json`",
            "`replace`",
            "`to_dict`",
            "`to_json`",
            "a pytree",
        ),
        "TrainerConfigureFunctionOutput": (
            "fields by keyword",
            "`from_dict`",
            "`from_json`",
            "`replace`",
            "`to_dict`",
            "`to_json`",
            "a pytree",
        ),
        "TrainerConfigureModelOutput": (
            "fields by keyword",
            "`from_dict`",
            "`from_json`",
            "`replace`",
            "`to_dict`",
            "`to_json`",
            "a pytree",
        ),
        "TrainerOutput": (
            "fields by keyword",
            "`from_dict`",
            "`from_json`",
            "`replace`",
            "`to_dict`",
            "`to_json`",
            "a pytree",
        ),
    },
    "qurious": {
        "Key features": (
            "architectures of Hugging Face and your own",
            "device detection",
            "one step, one epoch, several epochs",
            "any loss function",
            "configuration object",
            "easy to subclass",
        ),
        "Constructor": (
            "`model`",
            "`optimizer`",
            "`loss_fn(outputs, targets)`",
            "`config`",
            "`device`",
            "`scheduler`",
        ),
        "Methods": (
            "`train_step(batch)`",
            "`eval_step(batch)`",
            "`train_epoch(train_dataloader, eval_dataloader, epoch)`",
            "`evaluate(dataloader)`",
            "`train`: `train_dataloader`",
            "`num_epochs`",
            "`eval_dataloader`",
            "`save_dir`",
            "`save_freq`",
            '`best_model_metric="eval_loss"`',
            "`early_stopping_patience`",
            "`callbacks`",
            "returned history",
            "`load_checkpoint(path, load_optimizer, load_scheduler)`",
            "`_prepare_batch(batch)`",
            "`_forward_pass(inputs)`",
            "`_compute_loss(outputs, targets)`",
            "`_save_checkpoint(path, epoch, metric_value)`",
        ),
        "Advanced usage": (
            "`ClassificationTrainer` with `eval_step` and `evaluate`",
            "`callback(trainer, epoch, metrics)`",
            "basic usage",
            "Hugging Face models, `loss_fn=None`",
        ),
        "Configuration options": (
            "`training.weight_decay`",
            "`training.max_grad_norm`",
            "`training.scheduler_step_per_batch`",
        ),
        "Best practices, common issues, contributing": (
            "device placement by `_prepare_batch`",
            "checkpoints",
            "early stopping",
            "metrics by a subclass with `eval_step`",
            "callbacks for logging",
            "out of memory: accumulation, mixed precision",
            "NaN",
            "slow: workers, larger batches",
            "extending by overrides of `_prepare_batch`, `_forward_pass`, `_compute_loss`",
        ),
    },
    "Hezar": {
        "A simple example": ("the script",),
        "TrainerConfig": (
            "`task`",
            "`output_dir`",
            "`device`",
            "`num_epochs`",
            "`init_weights_from` on disk",
            "`init_weights_from` on the Hub",
            "`resume_from_checkpoint`",
            "`max_steps`",
            "`num_dataloader_workers`",
            "`dataloader_shuffle`",
            "`seed`",
            "`optimizer`",
            "`learning_rate`",
            "`weight_decay`",
            "`lr_scheduler`",
            "`lr_scheduler_kwargs`",
            "`batch_size`",
            "`eval_batch_size`",
            "`gradient_accumulation_steps`",
            "`distributed`",
            "`mixed_precision`",
            "`use_cpu`",
            "`do_evaluate`",
            "`evaluate_with_generate`",
            "`metrics`",
            "`metric_for_best_model`",
            "`save_steps`",
            "`log_steps`",
            "`checkpoints_dir`",
            "`logs_dir`",
        ),
        "Datasets and models": (
            "`train_dataset`, `eval_dataset`",
            "`__len__` and `__getitem__`",
            "placement of model and data",
            "a pretrained model",
            "weights for another head",
        ),
        "Optional parameters": (
            "`eval_dataset`",
            "`data_collator`",
            "the default of `data_collator`",
            "`preprocessor`",
            "`metrics_handler`",
            "`optimizer`",
            "`lr_scheduler`",
            "`accelerator`",
        ),
        "Initialization": (
            "weights, optimizer, steps, checkpoints, logs",
            "TensorBoard and CSV",
            "trainer state",
            "global seeding",
            "loss tracker",
        ),
        "Training loop": (
            "`inner_training_loop(epoch_num)`",
            "`create_train_dataloader(dataset)`",
            "same order among runs",
            "`prepare_input_batch`",
            "`training_step`",
            "`optimization_step`",
            "trackers",
            "moving average of the loss in the bar",
            "saves and logs by steps",
            "returned average loss",
        ),
        "Evaluation loop": (
            "`evaluate()` alone",
            "`evaluate(dataset)`",
            "`evaluate(eval_dataset=)`",
            "metrics handler by task",
            "after each epoch",
        ),
        "After an epoch, resuming": (
            "results to TensorBoard and CSV",
            "a checkpoint after each epoch",
            "also each `save_steps`",
            "steps of an epoch",
            "`resume_from_checkpoint=True`",
            "with `save_steps`",
            "in the middle of an epoch, shuffled",
            "from a path",
            "names of checkpoints",
        ),
        "Distributed, precision, accumulation": (
            "`distributed=True`",
            "`bf16`, `fp16`, `full`",
            "accumulation averages",
            "effective batch",
            "accumulation of 1",
            "custom trainer",
        ),
    },
}

Test = TypeVar("Test", bound=Callable[..., object])


def shows(document: str, heading: str, features: Mapping[str, str]) -> Callable[[Test], Test]:
    """Note at a test which features it shows, and how they are served, for the table of a page.

    All arguments are literals, since the table is made from the text of the tests.
    """
    return lambda test: test


class Row(NamedTuple):
    """A feature of a document, how it is served, and the test that shows it."""

    document: str
    heading: str
    feature: str
    here: str
    test: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self[:3]


def all_rows() -> list[Row]:
    """Return the rows of all tests."""
    paths = sorted(TESTS.rglob("test_*.py"))
    return [row for path in paths for row in read_rows(path.read_text(), path.name)]


def read_rows(source: str, name: str) -> Iterator[Row]:
    """Read the rows of a file of tests without importing it."""
    for node in ast.parse(source).body if "@shows(" in source else ():
        if not isinstance(node, ast.FunctionDef):
            continue
        calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
        names = [ast.unparse(call.func) for call in calls]
        for call in calls:
            if ast.unparse(call.func) != "shows":
                continue
            if not node.name.startswith("test_") and "row" not in names:
                raise ValueError(f"{name}:{node.lineno}: expected a test, got {node.name}")
            document, heading, features = map(ast.literal_eval, call.args)
            for feature, here in features.items():
                yield Row(document, heading, feature, here, f"{name}:{node.lineno}")


def listed() -> list[tuple[str, str, str]]:
    """Return document, heading and name of each feature, in order."""
    return [
        (document, heading, feature)
        for document, headings in DOCUMENTS.items()
        for heading, features in headings.items()
        for feature in features
    ]


def problems(rows: Iterable[Row], features: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Describe each feature that not exactly one test shows, and each that no document lists."""
    features = [*features]
    tests: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        tests.setdefault(row.key, []).append(row.test)
    for feature in sorted({*features, *tests}):
        if (count := features.count(feature)) != 1:
            yield f"{feature}: expected once in DOCUMENTS, got {count} times"
        if len(shown := tests.get(feature, [])) != 1:
            yield f"{feature}: expected one test with @shows, got {shown or 'none'}"


def table(document: str, rows: Iterable[Row]) -> str:
    """Make the tables of a document in Markdown, one for each heading."""
    here = {row.key: row.here for row in rows}
    parts = []
    for heading, features in DOCUMENTS[document].items():
        lines = [f"### {heading}", "", "| documented | here |", "| --- | --- |"]
        lines += [f"| {name} | {here[document, heading, name]} |" for name in features]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def render(page: str, rows: Iterable[Row]) -> str:
    """Return the text of a page with its tables made of the rows."""
    rows = [*rows]

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{table(match[2], rows)}\n\n{match[3]}"

    pattern = r"^(% rows of ([^\n]+))$.*?^(% end of rows)$"
    return re.sub(pattern, fill, page, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    found = all_rows()
    if errors := [*problems(found, listed())]:
        raise SystemExit("\n".join(errors))
    for path in PAGES.glob("*.md"):
        path.write_text(render(path.read_text(), found))
