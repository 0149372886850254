"""Chat templates by name: each renders what llama.cpp's server renders under that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.text import ChatTemplate
from penstock.text.named_templates import TEMPLATES, template_text

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
TURN = "<|START_OF_TURN_TOKEN|>"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
RENDERED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "command-r": f"{TURN}<|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>{TURN}<|USER_TOKEN|>U<|END_OF_TURN_TOKEN|>"
    f"{TURN}<|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>{TURN}<|USER_TOKEN|>V<|END_OF_TURN_TOKEN|>{TURN}<|CHATBOT_TOKEN|>",
    "deepseek": "S### Instruction:\nU\n### Response:\nA\n<|EOT|>\n### Instruction:\nV\n### Response:\n",
    "deepseek2": "S\n\nUser: U\n\nAssistant: A<｜end▁of▁sentence｜>User: V\n\nAssistant:",
    "deepseek3": "S\n\n<｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>",
    "falcon3": "<|system|>\nS\n<|user|>\nU\n<|assistant|>\nA\n<|user|>\nV\n<|assistant|>\n",
    "gemma": "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "granite": "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>U"
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>A<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>V<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "llama2": "[INST] S\nU [/INST]A</s>[INST] V [/INST]",
    "llama2-sys": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]A</s>[INST] V [/INST]",
    "llama3": f"{HEADER.format('system')}S<|eot_id|>{HEADER.format('user')}U<|eot_id|>"
    f"{HEADER.format('assistant')}A<|eot_id|>{HEADER.format('user')}V<|eot_id|>{HEADER.format('assistant')}",
    "mistral-v1": " [INST] S\n\nU [/INST] A</s> [INST] V [/INST]",
    "mistral-v3": "[INST] S\n\nU[/INST] A</s>[INST] V[/INST]",
    "mistral-v3-tekken": "[INST]S\n\nU[/INST]A</s>[INST]V[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST] A</s>[INST] V[/INST]",
    "mistral-v7-tekken": "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[INST]V[/INST]",
    "openchat": "S<|end_of_turn|>GPT4 Correct User: U<|end_of_turn|>GPT4 Correct Assistant: A<|end_of_turn|>"
    "GPT4 Correct User: V<|end_of_turn|>GPT4 Correct Assistant:",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>V<|im_end|><|im_start|>assistant<|im_sep|>",
    "vicuna": "S\n\nUSER: U\nASSISTANT: A</s>\nUSER: V\nASSISTANT:",
    "zephyr": "<|system|>\nS<|endoftext|>\n<|user|>\nU<|endoftext|>\n<|assistant|>\nA<|endoftext|>\n"
    "<|user|>\nV<|endoftext|>\n<|assistant|>\n",
}


def render(name: str, **kwargs: bool) -> str:
    return ChatTemplate({"default": TEMPLATES[name]}, {}).render(CHAT, **kwargs)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat(name: str) -> None:
    assert render(name) == RENDERED[name]


def test_without_the_beginning_of_an_answer() -> None:
    assert render("llama3", add_generation_prompt=False) == RENDERED["llama3"].removesuffix(HEADER.format("assistant"))
    assert render("gemma", add_generation_prompt=False) == RENDERED["gemma"].removesuffix("<start_of_turn>model\n")


def test_a_setting_is_a_name_a_file_or_the_template_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages | length }}")
    assert template_text("llama3") == TEMPLATES["llama3"]
    assert template_text(str(tmp_path / "mine.jinja")) == "{{ messages | length }}"
    assert template_text("{{ bos_token }}") == "{{ bos_token }}"
    assert template_text("") == ""
    with pytest.raises(ConfigError, match=r"'lama3' is neither a file .* nor a known name; names are chatml,"):
        template_text("lama3")
