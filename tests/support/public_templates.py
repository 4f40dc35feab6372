# ruff: noqa: RUF001 - DeepSeek writes its special tokens with wide bars
"""Chat templates in the styles of public model families, written for tests."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
)
_ALTERNATE = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% endfor %}"
)
_HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)

TEMPLATES = {
    "chatml": _CHATML,
    "chatml with a default system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        + _CHATML
    ),
    "llama-2": (
        _SYSTEM_FIRST + _ALTERNATE + "{% for m in rest %}{% if loop.first and system %}"
        "{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}"
        "{% else %}{% set text = m.content %}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{% for m in messages %}{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
        "m.content | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
        "{{ text }}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "llama-3.1 with tools": (
        "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool calls') }}{% endif %}"
        "{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
        "{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral": (
        _SYSTEM_FIRST + _ALTERNATE + "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
        "{% if loop.last and system %}[INST] {{ system + '\n\n' + m.content }}[/INST]"
        "{% else %}[INST] {{ m.content }}[/INST]{% endif %}"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral with tools": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.role == 'system' %}[SYSTEM_PROMPT] {{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% set rest = messages %}" + _ALTERNATE + "{{ bos_token }}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "gemma-3 with parts": (
        _SYSTEM_FIRST
        + _ALTERNATE
        + "{{ bos_token }}{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
        "{% if m.content is string %}{{ m.content | trim }}"
        "{% else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "phi-3": (
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token }}"
        "{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content + eos_token }}"
        "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}\n{% endfor %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.tool_calls %}<｜Assistant｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
        "{{ c['type'] }}<｜tool▁sep｜>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
        "<｜tool▁call▁end｜>{% endfor %}{{ eos_token }}"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% else %}{% set text = m.content %}{% if '</think>' in text %}"
        "{% set text = text.split('</think>')[-1] %}{% endif %}"
        "<｜Assistant｜>{{ text }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
    ),
    "command-r": (
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
        "{{ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m.role] }}"
        "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "qwen-3 with tools": (
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}"
        "\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"
        "{{ m.content }}" + _HERMES_CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen-3-coder with items": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "\n<tool_call>\n<function={{ c.function.name }}>{% for k, v in c.function.arguments | items %}"
        "\n<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}\n</function>\n</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "glm with names": (
        "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
        "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}"
        "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}  # fmt: skip
