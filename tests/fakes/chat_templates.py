"""Chat templates like those of public models, for tests of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.random_models.vocabulary import train_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's and Qwen2's: a default system prompt, no BOS."""
DATED = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}"
    "{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}"
    "{{- '<|system|>\nToday: ' + strftime_now('%d %b %Y') + '\n' }}{{- system or '' }}"
    "{%- for message in messages %}"
    "{{- '<|' + message.role + '|>\n' + message.content | trim + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
"""As Llama 3's: a BOS, the date, messages without their outer blanks."""
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start>' + message['role'] + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
)
"""As Gemma's, which has no system role."""
PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}{{ 'assistant:' }}"
)
"""As of models that see pictures: a message is a list of parts."""
DOCUMENTS = (
    "{{ bos_token }}{% for document in documents or [] %}"
    "{{ '<document ' ~ loop.index ~ '>\n' + document['text'] + '\n</document>\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '</>' }}{% endfor %}"
    "{{ '<assistant>' }}"
)
"""As Granite's: documents stand before the messages."""


def tokenizer_with(template: str | None, adds_bos: bool = True) -> Any:
    """A small tokenizer of transformers with this chat template."""
    tokenizer = train_tokenizer(1024, 4096)
    if not adds_bos:
        from tokenizers import processors

        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.chat_template = template
    return tokenizer


def write_tokenizer(folder: Path, template: str | None, adds_bos: bool = True) -> Path:
    """Write it beside a checkpoint's other files, in place of the tokenizer there."""
    tokenizer_with(template, adds_bos).save_pretrained(folder)
    return folder
