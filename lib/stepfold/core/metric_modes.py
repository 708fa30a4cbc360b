"""Whether a lower or a higher value of a metric is better: given, or known from its name."""

import re
from typing import Any

from stepfold.core.validation import read_choice
from stepfold.errors import refuse

_NAMES = {
    "min": """
        loss losses cost nll perplexity ppl error errors err mse rmse mae mape msle wer cer fid fvd
        lpips bpb bpc bpd brier ece crossentropy xent regret
    """,
    "max": """
        accuracy accuracies acc f1 auc auroc auprc bleu chrf rouge rougel rougelsum meteor precision
        recall sensitivity specificity iou miou dice ap map ndcg mrr psnr ssim return returns reward
        rewards success em
    """,
}
_MODES = {word: mode for mode, names in _NAMES.items() for word in names.split()}
# Names of several words, as one of the words above.
_PHRASES = {
    r"(negative|neg) log likelihood": "nll",
    r"bits per (byte|char|character|dim|dimension|token|word|pixel)": "bpb",
    r"cross entropy": "crossentropy",
    r"exact match": "em",
}
# Words after a metric that do not change which value of it is better.
_NEUTRAL = """
    mean avg average total sum micro macro weighted rate score roc top at l per token word byte char
    example sample step epoch train eval test val valid validation dev
"""
_REVERSED = re.compile(r"\b(neg|negative|minus|inverse|inverted|no|non|not|without)\b")


def mode_of(argument: str, name: str, mode: Any = None) -> str:
    """Return "min" or "max": the `mode` that was given, or the one that the metric's name implies.

    `argument` is the one that names the metric, for the message if its name does not imply one.
    """
    if not isinstance(name, str) or not name:
        refuse(argument, "the name of a metric", repr(name))
    if mode is not None:
        return read_choice("mode", mode, ("min", "max"))  # type: ignore[no-any-return]
    known = known_mode(name)
    if known is None:
        expected = "a metric whose name says which value is better, such as 'loss' or 'accuracy'"
        advice = "give mode='min' if lower is better, mode='max' if higher is"
        refuse(argument, expected, repr(name), advice)
    return known


def known_mode(name: str) -> str | None:
    """Return "min" or "max" if the words in the name of a metric leave no doubt, otherwise None.

    The last word decides, without what is neutral, as in `loss_mean`. There is doubt if another
    word belongs to the opposite, as in `accuracy_loss`, or reverses it, as in `neg_squared_error`.
    """
    text = " ".join(_words(name))
    for phrase, word in _PHRASES.items():
        text = re.sub(rf"\b{phrase}\b", word, text)
    words = text.split()
    while words and (words[-1].isdecimal() or words[-1] in _NEUTRAL.split()):
        words.pop()
    is_reversed = _REVERSED.search(text) or re.search(r"(^|/)\s*(1\s*)?-", name)
    modes = {_MODES[word] for word in words if word in _MODES}
    is_certain = not is_reversed and len(modes) == 1
    return _MODES.get(words[-1]) if words and is_certain else None


def _words(name: str) -> list[str]:
    """Split a name at punctuation and in camel case; a number at the end of a word is left out."""
    words = []
    for part in re.findall(r"[^\W_]+", name):
        is_known = _bare(part) in _MODES  # such as mAP and rougeL, which are one word
        camel = r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+|[^A-Za-z\d]+"
        words += [_bare(word) for word in ([part] if is_known else re.findall(camel, part))]
    return words


def _bare(word: str) -> str:
    """Return a word in lower case, without the number in `top5` and `rouge1`, but not in `f1`."""
    word = word.lower()
    return word if word in _MODES else word.rstrip("0123456789") or word
