"""Implements `penstock eval`, which measures perplexity, and the KL divergence between two models."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from penstock.cli.framework import options
from penstock.cli.framework.command import Option, OptionGroup, UsageError
from penstock.cli.terminal import counting, obtain, print_json
from penstock.config.values import is_kv_quantized
from penstock.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.planning.evaluation import Divergence, Perplexity


class TextOptions(NamedTuple):
    """Declares the options of the evaluated text."""

    text: Annotated[
        str,
        Option(
            help="File with the text to predict. Default: a short built-in text, the one that measures a quantized KV "
            "cache at load."
        ),
    ] = ""
    context: Annotated[int, Option(minimum=8, help="Tokens in a window; only the second half is scored.")] = 512
    tokens: Annotated[
        int,
        Option(
            minimum=0,
            help="Maximum tokens of the text. 0: 8192 with a file, else 1024, or one window if that is longer.",
        ),
    ] = 0
    json: options.Json = False

    def words(self) -> str:
        from penstock.planning.evaluation import built_in_text

        return read_text(self.text) if self.text else built_in_text()

    def most_tokens(self) -> int:
        """Returns the token limit; 0: the default for files."""
        from penstock.planning.evaluation import GUARD_TOKENS

        return self.tokens or (0 if self.text else max(GUARD_TOKENS, self.context))


def ppl(
    model: options.ModelRef,
    *,
    given: Annotated[TextOptions, OptionGroup()],
    engine: options.ScoringSettings,
) -> None:
    """Measure the perplexity of a model: how well it predicts a text.

    penstock eval ppl smollm2 --text book.txt
    penstock eval ppl ./folder --quantize q4_k --text book.txt --tokens 32768 --json
    """
    words = given.words()
    path = obtain(model)

    from penstock.config import configure
    from penstock.planning.evaluation import Scorer, measure_perplexity, windows_of

    config = configure(path, engine)
    windows = windows_of(path, words, given.context, given.most_tokens(), config.config)
    scorer = Scorer(config, given.context)
    with counting("windows", len(windows)) as advance:
        found = measure_perplexity(scorer, windows, advance)
    scorer.close()
    if given.json:
        print_json({"model": model, "context": given.context, "perplexity": asdict(found)})
    else:
        windows_used = f"{len(windows)} windows of {given.context}"
        print(f"perplexity  {with_error(found)}, {found.predictions:,} predictions in {windows_used}")


def kl(
    model: options.ModelRef,
    against: Annotated[str, Option(help="Reference model, usually the one before quantization.")] = "",
    *,
    given: Annotated[TextOptions, OptionGroup()],
    engine: options.ScoringSettings,
) -> None:
    """Measure the KL divergence of a model's predictions from a reference model's.

      penstock eval kl ./model.q4_k.gguf --against ./folder --text book.txt
      penstock eval kl ./folder --quantize q4_k --against ./folder --text book.txt --json
      penstock eval kl ./folder --kv int8 --against ./folder --text book.txt
      penstock eval kl ./folder --kv int4 --against ./folder

    --quantize and a --kv of fewer than 16 bits apply only to MODEL: the reference runs with the weights in its files
    and an unquantized KV cache (--kv auto).
    """
    words = given.words()
    if not against:
        raise UsageError("--against is missing: give the reference model")
    path, reference = obtain(model), obtain(against)

    from penstock.config import configure

    found = diverge(configure(path, engine), reference, words, given.context, given.most_tokens())
    if given.json:
        print_json({"model": model, "against": against, "context": given.context, "kl": asdict(found)})
    else:
        print_divergence(found)


def diverge(config: Config, against: Path, words: str, context: int = 512, tokens: int = 0) -> Divergence:
    """Returns the KL divergence of a config's model from the model `against`, which is not quantized at load."""
    from penstock.planning.evaluation import Scorer, measure_divergence, windows_of

    model, reference_config = Path(config.model), unquantized(config, against)
    if model.is_dir() != against.is_dir():  # --config applies to the folder
        config = config if model.is_dir() else replace(config, config=())
        reference_config = reference_config if against.is_dir() else replace(reference_config, config=())
    windows = windows_of(model, words, context, tokens, config.config)
    others = windows_of(against, words, context, tokens, reference_config.config)
    if len(windows) != len(others) or any((one != other).any() for one, other in zip(windows, others, strict=True)):
        raise InvalidRequest(
            "the two models split the text into different tokens and cannot be compared: choose another --against",
            param="text",
        )
    scorer = Scorer(config, context)
    reference = Scorer(reference_config, context)
    with counting("windows", len(windows)) as advance:
        found = measure_divergence(scorer, reference, windows, advance)
    scorer.close()
    reference.close()
    return found


def unquantized(config: Config, model: Path) -> Config:
    """Returns the reference model's config: the evaluated one's without quantization at load."""
    kv = "auto" if is_kv_quantized(config.kv) else config.kv
    return replace(config, model=str(model), quantize="", kv=kv)


def print_divergence(found: Divergence) -> None:
    rows = {
        "mean KL": f"{found.mean:.5f} ± {found.error:.5f} nats, {found.predictions:,} predictions",
        "median": f"{found.median:.5f}; p90 {found.p90:.4f}, p99 {found.p99:.4f}, maximum {found.most:.3f}",
        "same top token": f"{found.same_top:.2%}",
        "perplexity": f"{with_error(found.perplexity)}; the reference's {with_error(found.reference)}",
    }
    for name, value in rows.items():
        print(f"{name:<16}{value}")


def with_error(found: Perplexity) -> str:
    return f"{found.value:.3f} ± {found.error:.3f}"


def read_text(file: str) -> str:
    try:
        return Path(file).expanduser().read_text("utf-8")
    except UnicodeError as error:
        raise InvalidRequest(f"{file} is not valid UTF-8: {error}", param="text") from error
