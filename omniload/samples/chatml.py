"""Chat templates that are built in."""

_CHATML = r"""
{%- macro in_parts(content) %}
    {%- for part in content %}
        {%- if part['type'] == 'text' %}
            {{- part['text'] }}
        {%- elif part['type'] == 'image' %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- else %}
            {{- raise_exception('no form for a content part of type ' ~ part['type']) }}
        {%- endif %}
    {%- endfor %}
{%- endmacro %}
{%- if tools %}
    {{- raise_exception('no form for tools in chatml; set chat_template: to that of your model') }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- raise_exception('no form for tool calls in chatml; set chat_template: to that of your model') }}
    {%- endif %}
    {%- set content = message['content'] if message['content'] is string else in_parts(message['content']) %}
    {{- '<|im_start|>' }}{{ message['role'] }}{{ '\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ content }}<|im_end|>{% endgeneration %}
    {%- else %}
        {{- content }}<|im_end|>
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

CHAT_TEMPLATES = {"chatml": _CHATML}
"""Jinja text by name.

``chatml`` is ``<|im_start|>role``, a line's end, ``content<|im_end|>`` and a line's end for each message; an image is
written as Qwen2-VL does. Trained on: the content of the assistant's messages and the ``<|im_end|>`` that ends them.
"""
