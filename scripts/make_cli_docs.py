"""Writes docs/cli.md from the declarations of commands and options; with --check, only says whether it is current."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.cli.app import COMMANDS, command
from penstock.cli.framework.command import Declared, EngineOptions, declarations, engine_options
from penstock.config import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """\
# The command line

`penstock COMMAND --help` shows the same text. `scripts/make_cli_docs.py` generates this page: do not edit it.

- Answers go to stdout, everything else to stderr.
- Exit codes: 0 success, 1 an error, 2 wrong usage, 130 interrupted.
- `PENSTOCK_HOME` is the folder for models; default: `penstock` in the user's cache folder.
- `PENSTOCK_DEBUG=1` prints the traceback of an error.
"""
ENGINE_OPTIONS = """\
## Engine options

These options configure the engine (declared in `src/penstock/config/__init__.py`). Commands take them as flags:

```sh
penstock serve ./model.gguf --max-len 8192 --kv int8 --step-tokens 1024
```

`LLM` takes them as keyword arguments:

```python
LLM("./model.gguf", max_len=8192, kv="int8", step_tokens=1024)
```

Bytes can have a unit (in Python, as a text): `8G` and `8GiB` are 8 × 1024³, `8GB` is 8 × 1000³.
"""
NO_DEFAULT = (inspect.Parameter.empty, None, False, "", ())


def render() -> str:
    """Returns the page."""
    sections = (_section(name, command(name)) for name in COMMANDS)
    return "\n".join([HEAD, *sections, ENGINE_OPTIONS, _engine_table(), _older_names()])


def _section(name: str, function: Callable[..., None]) -> str:
    summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    examples, _, remarks = rest.partition("\n\n")
    parts = [f"## {name}", summary, f"```sh\n{inspect.cleandoc(examples)}\n```"]
    if remarks:
        parts.append(remarks)
    declared = list(declarations(function))
    own = [entry for entry in declared if not entry.of_engine]
    parts.append(_table(("option", "default", "meaning"), map(_row, own)))
    engine_flags = [f"`{entry.spelling}`" for entry in declared if entry.of_engine]
    if engine_flags:
        parts.append(textwrap.fill(f"[Engine options](#engine-options): {', '.join(engine_flags)}.", 120))
    return "\n\n".join(parts) + "\n"


def _table(heads: tuple[str, ...], rows: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows])


def _row(entry: Declared) -> str:
    return f"| `{entry.spelling}` | {_default(entry)} | {entry.annotation.help} |"


def _default(entry: Declared) -> str:
    return "" if any(entry.default is nothing for nothing in NO_DEFAULT) else f"`{entry.written(entry.default)}`"


def _engine_table() -> str:
    rows = (
        f"| `{entry.spelling}` | `{entry.name}` | {_default(entry)} | {entry.annotation.help} |"
        for entry in engine_options(EngineOptions(tuple(OPTIONS)))
    )
    return _table(("flag", "keyword", "default", "meaning"), rows) + "\n"


def _older_names() -> str:
    lines = (f"- `{older}` is now `{name}`." for name, option in OPTIONS.items() for older in option.older)
    return "Older keywords still work, with a line on stderr:\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit(f"{PAGE} is not current: run python scripts/make_cli_docs.py")
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
