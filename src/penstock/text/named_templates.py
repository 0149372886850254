"""Defines chat templates under llama.cpp's names, for `--chat-template` and for models without one."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import ConfigError


def _same(before: str, after: str, opening: str, *, content: str = "message.content") -> str:
    """Returns a template that writes all messages alike; {role} stands for the role."""
    return _by_role({}, (before, after), opening, content=content)


def _by_role(
    roles: dict[str, tuple[str, str]], others: tuple[str, str], opening: str, *, content: str = "message.content"
) -> str:
    """Returns a template that encloses messages of `roles` in their own two texts and others in `others`, followed by
    `opening`, which begins an answer.
    """
    chosen = _message(*others, content)
    for role, texts in roles.items():
        chosen = f"{{% if message.role == '{role}' %}}{_message(*texts, content)}{{% else %}}{chosen}{{% endif %}}"
    ending = f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}" if opening else ""
    return f"{{% for message in messages %}}{chosen}{{% endfor %}}{ending}"


def _message(before: str, after: str, content: str) -> str:
    written = [f"{text!r}".replace("{role}", "' ~ message.role ~ '") for text in (before, after)]
    return f"{{{{ {written[0]} ~ {content} ~ {written[1]} }}}}"


def _instructions(first: str, system: tuple[str, str], user: str, reply: tuple[str, str]) -> str:
    """Returns a template of turns that an assistant's reply ends, as Llama 2's and Mistral's, with `first` before each
    turn.
    """
    return (
        f"{{% set ns = namespace(inside=false) %}}{{% for message in messages %}}"
        f"{{% if not ns.inside %}}{{{{ {first!r} }}}}{{% set ns.inside = true %}}{{% endif %}}"
        f"{{% if message.role == 'system' %}}{{{{ {system[0]!r} ~ message.content ~ {system[1]!r} }}}}"
        f"{{% elif message.role == 'assistant' %}}{{{{ {reply[0]!r} ~ message.content ~ {reply[1]!r} }}}}"
        f"{{% set ns.inside = false %}}{{% else %}}{{{{ message.content ~ {user!r} }}}}{{% endif %}}{{% endfor %}}"
    )


_TRIMMED = "(message.content | trim)"
_COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
_GEMMA = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.system = ns.system ~ (message.content | trim) ~ '\\n\\n' %}{% else %}"
    "{{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}"
    "{% if message.role != 'assistant' %}{{ ns.system }}{% set ns.system = '' %}{% endif %}"
    "{{ (message.content | trim) ~ '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

CHATML = _same("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n")

TEMPLATES = {
    "chatml": CHATML,
    "command-r": _by_role(
        {
            role: (_COHERE.format(name), "<|END_OF_TURN_TOKEN|>")
            for role, name in (("system", "SYSTEM"), ("user", "USER"))
        },
        (_COHERE.format("CHATBOT"), "<|END_OF_TURN_TOKEN|>"),
        _COHERE.format("CHATBOT"),
        content=_TRIMMED,
    ),
    "deepseek": _by_role(
        {"system": ("", ""), "assistant": ("### Response:\n", "\n<|EOT|>\n")},
        ("### Instruction:\n", "\n"),
        "### Response:\n",
    ),
    "deepseek2": _by_role(
        {"system": ("", "\n\n"), "assistant": ("Assistant: ", "<｜end▁of▁sentence｜>")},
        ("User: ", "\n\n"),
        "Assistant:",
    ),
    "deepseek3": _by_role(
        {"system": ("", "\n\n"), "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")},
        ("<｜User｜>", ""),
        "<｜Assistant｜>",
    ),
    "falcon3": _same("<|{role}|>\n", "\n", "<|assistant|>\n"),
    "gemma": _GEMMA,
    "granite": _same(
        "<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "llama2": _instructions("[INST] ", ("", "\n"), " [/INST]", ("", "</s>")),
    "llama2-sys": _instructions("[INST] ", ("<<SYS>>\n", "\n<</SYS>>\n\n"), " [/INST]", ("", "</s>")),
    "llama3": _same(
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        content=_TRIMMED,
    ),
    "mistral-v1": _instructions(" [INST] ", ("", "\n\n"), " [/INST]", (" ", "</s>")),
    "mistral-v3": _instructions("[INST] ", ("", "\n\n"), "[/INST]", (" ", "</s>")),
    "mistral-v3-tekken": _instructions("[INST]", ("", "\n\n"), "[/INST]", ("", "</s>")),
    "mistral-v7": _by_role(
        {"system": ("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), "assistant": (" ", "</s>")}, ("[INST] ", "[/INST]"), ""
    ),
    "mistral-v7-tekken": _by_role(
        {"system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "assistant": ("", "</s>")}, ("[INST]", "[/INST]"), ""
    ),
    "openchat": _by_role(
        {"system": ("", "<|end_of_turn|>"), "assistant": ("GPT4 Correct Assistant: ", "<|end_of_turn|>")},
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    "phi3": _same("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _same("<|im_start|>{role}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "vicuna": _by_role(
        {"system": ("", "\n\n"), "assistant": ("ASSISTANT: ", "</s>\n")}, ("USER: ", "\n"), "ASSISTANT:"
    ),
    "zephyr": _same("<|{role}|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}


def template_text(given: str) -> str:
    """Resolves a template setting: a name in `TEMPLATES`, a file, or the template itself. Raises ConfigError for a
    single word that is neither a name nor a file.
    """
    if given in TEMPLATES:
        return TEMPLATES[given]
    if re.fullmatch(r"[\w./~:\\-]+", given):
        return template_in(Path(given))
    return given


def template_in(path: Path) -> str:
    try:
        return path.expanduser().read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the chat template {str(path)!r} is neither a file that can be read ({error}) nor a known name; "
            f"names are {', '.join(TEMPLATES)}"
        ) from error
