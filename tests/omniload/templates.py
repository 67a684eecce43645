"""Chat templates of the kinds in use, written for the tests; ``GENERATION`` puts the assistant's turns in blocks."""

from __future__ import annotations

_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- BEGIN %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- STOP %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}
        {%- set date_string = '26 Jul 2024' %}
    {%- endif %}
{%- endif %}
{{- '<|head|>system<|tail|>\\n\\nToday is ' + date_string + '.<|eot|>' }}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|tail|>\\n\\n' }}
    {%- BEGIN %}{{ message['content'] | trim + '<|eot|>' }}{%- STOP %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{%- endif %}
"""

_INST = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- BEGIN %}{{ ' ' + message['content'] + eos_token }}{%- STOP %}
    {%- endif %}
{%- endfor %}
"""

_TURNS = """\
{{ bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<|head|>' + role + '\\n' }}
{%- BEGIN %}{{ message['content'] | trim + '<|eot|>' }}{%- STOP %}

{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|head|>model\\n' }}
{%- endif %}
"""


def template(kind: str, *, marked: bool) -> str:
    """A chat template; ``marked``: with ``{% generation %}`` blocks where the assistant speaks."""
    text = {"tools": _TOOLS, "headers": _HEADERS, "inst": _INST, "turns": _TURNS}[kind]
    if kind in ("headers", "turns") and marked:
        # One branch of the same text for the assistant, with the block, and one for the others.
        begin, stop = text.index("{%- BEGIN %}"), text.index("{%- STOP %}") + len("{%- STOP %}")
        inner = text[begin + len("{%- BEGIN %}") : stop - len("{%- STOP %}")]
        branch = (
            "{%- if message['role'] == 'assistant' %}{%- generation %}" + inner + "{%- endgeneration %}"
            "{%- else %}" + inner + "{%- endif %}"
        )
        return text[:begin] + branch + text[stop:]
    start, end = ("generation", "endgeneration") if marked else ("if true", "endif")
    return text.replace("BEGIN", start).replace("STOP", end)


KINDS = ("tools", "headers", "inst", "turns")
