"""Models of transformers are loaded, give the same logits, are fine-tuned, and are loaded there."""

import functools
import importlib.util
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import stepfold as sf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, CLOSE = 50, 1e-5
TOKENS = np.random.default_rng(0).integers(256, size=(64, 48), dtype=np.int32)
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=3, n_head=4, **SPECIAL
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **SPECIAL,
    ),
}
MODELS = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hub:
    """A model with random weights as transformers wrote it, and as the example reads it."""

    def __init__(self, name, folder):
        self.name, self.folder, self.example = name, folder, example(name)
        torch.manual_seed(0)
        model = MODELS[name](CONFIGS[name])
        with torch.no_grad():  # norms and biases begin as constants, which hide mistakes
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        self.logits = logits_of(model)
        self.config = json.loads((folder / "config.json").read_text())
        make = {"gpt2": lambda: "transformer.", "llama": lambda: self.config}
        self.names = self.example.name_map(make[name]())
        init = functools.partial(self.example.init, self.config)
        self.like = jax.eval_shape(init, jax.random.key(0))
        self.apply = functools.partial(self.example.apply, self.config)

    def load(self):
        return sf.checkpoint.load_params(self.folder, self.like, names=self.names)

    def logits_there(self, folder, params, names):
        """Export the parameters, let transformers load them, and return its logits."""
        sf.checkpoint.export_params(folder, params, names=names)
        (folder / "config.json").write_text(json.dumps(self.config))
        model, found = MODELS[self.name].from_pretrained(
            folder, use_safetensors=True, output_loading_info=True
        )
        assert not any(found.values()), found
        return logits_of(model)


def logits_of(model):
    torch.set_num_threads(1)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()


@pytest.fixture(scope="module", params=MODELS)
def hub(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Hub(request.param, tmp_path_factory.mktemp(request.param))


def difference(one, other):
    assert np.abs(other).max() > 0.1
    return np.abs(np.asarray(one) - other).max()


def test_logits_are_those_of_transformers(hub):
    assert difference(jax.jit(hub.apply)(hub.load(), TOKENS), hub.logits) < CLOSE


def test_an_export_has_the_bytes_of_transformers(hub, tmp_path):
    from safetensors.numpy import load_file

    sf.checkpoint.export_params(tmp_path, hub.load(), names=hub.names)
    theirs = load_file(hub.folder / "model.safetensors")
    mine = load_file(tmp_path / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)


def train(loss_fn, variables, tx, *, stateful):
    step = jax.jit(sf.make_train_step(loss_fn, tx, stateful=stateful), donate_argnums=0)
    state, losses = sf.init_state(variables, tx, jax.random.key(1), stateful=stateful), []
    for batch in itertools.islice(sf.batches(TOKENS, 16, seed=0), STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"].compute()))
    assert losses[-1] < losses[0] - 0.2
    return state.params


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_fine_tuned_model_goes_back(hub, kind, tmp_path):
    base, lora = hub.load(), example("llama")

    def loss_fn(params, batch, _key):
        logits, targets = hub.apply(params, batch)[:, :-1], batch[:, 1:]
        return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    def adapted(factors, batch, key, base):
        return loss_fn(lora.merge(base, factors), batch, key), {}, base

    if kind == "full":
        tuned = train(loss_fn, base, optax.adam(3e-3), stateful=False)
    else:
        variables = lora.init_factors(base, jax.random.key(2)), base
        tuned = lora.merge(base, train(adapted, variables, optax.adam(2e-2), stateful=True))
    mine = np.asarray(jax.jit(hub.apply)(tuned, TOKENS))
    assert difference(mine, hub.logits) > 0.1
    assert difference(mine, hub.logits_there(tmp_path, tuned, hub.names)) < CLOSE


def test_transformers_takes_the_names_of_the_files_on_the_hub(tmp_path):
    """The files of OpenAI's GPT-2 have no prefix, and may have masks."""
    hub = Hub("gpt2", tmp_path / "there")
    logits = hub.logits_there(tmp_path / "here", hub.load(), hub.example.name_map())
    assert np.array_equal(logits, hub.logits)
