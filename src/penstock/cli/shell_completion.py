"""Implements `penstock completion`, which prints a shell's completion script."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.app import COMMANDS, command
from penstock.cli.framework.command import Argument, Declared, Option, Rest, UsageError, declarations

SCRIPTS = {
    "bash": """\
_penstock() {
    local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=($(compgen -W "$(penstock completion words -- "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)" -- "$word"))
}
complete -o default -F _penstock penstock
""",
    "zsh": """\
#compdef penstock
_penstock() {
    local -a found
    found=("${(@f)$(penstock completion words -- "${(@)words[2,CURRENT-1]}" 2>/dev/null)}")
    compadd -a found
    _files
}
compdef _penstock penstock
""",
    "fish": """\
complete -c penstock -a '(penstock completion words -- (commandline -opc)[2..] 2>/dev/null)'
""",
}
WORDS = "words"


def completion(
    shell: Annotated[str, Argument(metavar="SHELL", help="bash, zsh or fish.")],
    before: Annotated[
        list[str], Rest(metavar="WORD ...", help="For `words`: the words before the one to complete.")
    ] = [],  # noqa: B006
) -> None:
    """Print a script that completes commands, options and models in a shell.

    penstock completion bash > ~/.local/share/bash-completion/completions/penstock
    penstock completion zsh > "${fpath[1]}/_penstock"
    penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    if shell == WORDS:
        print("\n".join(words_after(before)))
    elif shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
    else:
        raise UsageError(f"takes bash, zsh or fish; got {shell!r}")


def words_after(before: list[str]) -> list[str]:
    """Returns the possible next words: first commands, then the command's options and models."""
    name = next((" ".join(before[:count]) for count in (2, 1) if " ".join(before[:count]) in COMMANDS), "")
    if not name:
        return list(dict.fromkeys(_next_word(command, before) for command in COMMANDS if _begins(command, before)))
    declared = list(declarations(command(name)))
    if any(each.spelling == before[-1] and _needs_value(each) for each in declared):
        return []  # the value of an option: the shell completes files
    options = [each.spelling for each in declared if isinstance(each.annotation, Option)]
    return [*options, "--help", *(_models() if any(map(_is_model, declared)) else [])]


def _needs_value(declared: Declared) -> bool:
    bare = isinstance(declared.annotation, Option) and declared.annotation.bare
    return declared.kind is not bool and not bare


def _begins(command: str, before: list[str]) -> bool:
    return command.split()[: len(before)] == before


def _next_word(command: str, before: list[str]) -> str:
    return command.split()[len(before)]


def _is_model(declared: Declared) -> bool:
    return isinstance(declared.annotation, Argument) and "MODEL" in declared.annotation.metavar


def _models() -> list[str]:
    """Returns the names of models: in the store, then in the catalogue."""
    from penstock.store import ALIASES, CATALOGUE, stored_names

    return list(dict.fromkeys([*stored_names(), *ALIASES, *(model.full_name for model in CATALOGUE)]))
