"""Requests whose prompts servers render in ways of their own, and the templates that show it.

`CASES` is by name: (template, request). A template of None is the bundled one. What a real vLLM rendered is in
golden/vllm_prompts.json.
"""

ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LLAMA = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m['content'] %}{% if p['type']=='text' %}{{ ' ' + p['text'] }}"
    "{% elif p['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
EFFORT = (
    "{% if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}[no thinking]{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + ASK
)
DUMP = "{{ messages | tojson }}{{ tools | tojson }}" + ASK
DUMP_PARTS = "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}" + DUMP
LOOPS = "{% for m in messages %}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{% endfor %}" + ASK
OVER_CONTENT = LOOPS.replace("%s", "{% for content in m.content %}{{ content.text }}{% endfor %}")
OVER_NAME = LOOPS.replace("%s", "{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}")
OVER_OTHER = LOOPS.replace(
    "%s", "{% set c = m.content %}{% if c is string %}{{ c }}{% else %}{{ c[0].text }}{% endif %}"
)
OVER_FILTERED = LOOPS.replace(
    "%s", "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
)
OVER_MACRO = "{% macro show(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}" + LOOPS.replace(
    "%s", "{{ show(m.content) }}"
)
OVER_MACRO_KEY = "{% macro show(n, x='') %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}" + LOOPS.replace(
    "%s", "{{ show(1, x=m['content']) }}"
)
OVER_MACRO_NAME = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
    + LOOPS.replace("%s", "{% set text = m.content %}{{ show(text) }}")
)
OVER_SLICE = (
    "{% set rest = messages[1:] %}{% for m in rest %}{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endfor %}" + ASK
)
OVER_NAMESPACE = "{% set ns = namespace(all=[]) %}{% set ns.all = messages %}" + LOOPS.replace(
    "%s",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)
DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}<dev>{{ m.content }}</dev>{% else %}[{{ m.role }}]"
    "{{ m.content }}{% endif %}{% endfor %}" + ASK
)
REASONING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.thinking %}<t>{{ m.thinking }}</t>{% endif %}{% if m.reasoning %}<r>{{ m.reasoning }}</r>{% endif %}"
    "{{ m.content }}{% endfor %}" + ASK
)
DOCUMENTS = (
    "{% if documents %}{% for d in documents %}<doc>{{ d.title }}: {{ d.text }}</doc>{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + ASK
)
TRIMS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}" + ASK
FLAGS = (
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}{% if style %}[{{ style }}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + ASK
)
KEYS = "{% for m in messages %}[{% for k in m %}{{ k }} {% endfor %}]{% endfor %}" + ASK
CONTENT_ASKED = (
    "{% for m in messages %}[{{ m.role }}]{% if 'content' in m and m.content is not none %}has {{ m.content }}"
    "{% else %}none{% endif %}{% endfor %}" + ASK
)

Q = {"role": "user", "content": "q"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "7"}
NOW = {"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}


def user(*content, **more):
    """A request of one message."""
    return {"messages": [{"role": "user", "content": content[0] if len(content) == 1 else list(content)}], **more}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def called(arguments, **more):
    """A request with a tool call in its history."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "go"}, said, RESULT], **more}


def talk(*messages, **more):
    return {
        "messages": [
            dict(zip(("role", "content"), one, strict=True)) if isinstance(one, tuple) else one for one in messages
        ],
        **more,
    }


def tools(*functions, **more):
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": one} for one in functions],
        **more,
    }


TWO = (text("What is two plus two?"), text("Be short."))
PREFILL = {"continue_final_message": True, "add_generation_prompt": False}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

CASES = {
    # Parts of a content, and templates that want them.
    "two parts, llama": (LLAMA, user(*TWO)),
    "two parts, bundled": (None, user(*TWO)),
    "two parts, wanted": (PARTS, user(*TWO)),
    "a text, parts wanted": (PARTS, user("two plus two?")),
    "one part, llama": (LLAMA, user(*[[text("one")]])),
    "one part, bundled": (None, user(*[[text("one")]])),
    "no parts, bundled": (None, user(*[[]])),
    "an empty part": (LLAMA, user(text(""), text("b"))),
    "parts with spaces": (None, user(text(" a "), text("\nb\n"))),
    "parts of a cache": (DUMP_PARTS, user(text("a", cache_control={"type": "ephemeral"}), text("b", mark=1))),
    "parts of a cache, joined": (None, user(text("a", cache_control={"type": "ephemeral"}), text("b"))),
    "input_text": (None, user({"type": "input_text", "text": "a"}, text("b"))),
    "thinking part": (
        LLAMA,
        talk({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("a")]}, Q),
    ),
    "refusal part": (
        LLAMA,
        talk(Q, {"role": "assistant", "content": [text("a"), {"type": "refusal", "refusal": "no"}]}, Q),
    ),
    "refusal part, wanted": (
        PARTS,
        talk(Q, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, Q),
    ),
    "system of parts": (None, talk({"role": "system", "content": [text("a"), text("b")]}, Q)),
    "assistant of parts": (None, talk(Q, {"role": "assistant", "content": [text("a"), text("b")]}, Q)),
    "a message of each role, parts wanted": (
        PARTS,
        talk(("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v")),
    ),
    "a name": (DUMP, talk({"role": "user", "content": "q", "name": "bob", "mark": 1})),
    "over content": (OVER_CONTENT, user("a text")),
    "over a variable called content": (OVER_NAME, user("a text")),
    "over a variable called otherwise": (OVER_OTHER, user(*TWO)),
    "over filtered content": (OVER_FILTERED, user("a text")),
    "over a macro's parameter": (OVER_MACRO, user("a text")),
    "over a macro's parameter by key": (OVER_MACRO_KEY, user("a text")),
    "over a macro's parameter called content": (OVER_MACRO_NAME, user(*TWO)),
    "over a slice": (OVER_SLICE, talk(("system", "s"), ("user", "a text"))),
    "over a namespace": (OVER_NAMESPACE, user(*TWO)),
    # Tool messages.
    "tool of parts, joined": (
        None,
        talk(
            Q, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {**RESULT, "content": [text("1"), text("2")]}
        ),
    ),
    "tool of parts, wanted": (
        DUMP_PARTS,
        talk(
            Q, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {**RESULT, "content": [text("1"), text("2")]}
        ),
    ),
    "tool of a text, parts wanted": (DUMP_PARTS, called("{}")),
    "tool with a name": (
        DUMP,
        talk(
            Q, {"role": "assistant", "content": "x", "tool_calls": [CALL]}, {**RESULT, "name": "f", "is_error": False}
        ),
    ),
    "tool reference": (
        DUMP_PARTS,
        talk(Q, {"role": "tool", "tool_call_id": "c", "content": [{"type": "tool_reference", "name": "f"}, text("2")]}),
    ),
    "tool reference, joined": (
        DUMP,
        talk(Q, {"role": "tool", "tool_call_id": "c", "content": [{"type": "tool_reference", "name": "f"}, text("2")]}),
    ),
    "two tools answer": (
        None,
        talk(
            Q,
            {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "d"}]},
            RESULT,
            {**RESULT, "tool_call_id": "d", "content": "8"},
        ),
    ),
    # What is no text.
    "image to a text model": (None, user(text("what is it?"), IMAGE)),
    "image to a text model, parts wanted": (PARTS, user(IMAGE, text("what is it?"))),
    # Developers and systems.
    "developer": (None, talk(("developer", "Answer in rhymes."), ("user", "hi"))),
    "developer, llama": (LLAMA, talk(("developer", "Answer in rhymes."), ("user", "hi"))),
    "developer, known": (DEVELOPER, talk(("developer", "Answer in rhymes."), ("user", "hi"))),
    "developer behind": (None, talk(("user", "hi"), ("developer", "rhymes"), ("user", "there"))),
    "developer and system": (None, talk(("system", "s"), ("developer", "d"), ("user", "hi"))),
    "system behind developer": (None, talk(("developer", "d"), ("user", "hi"), ("system", "s"), ("user", "there"))),
    "developer of parts": (None, talk({"role": "developer", "content": [text("a"), text("b")]}, Q)),
    "developers of parts": (
        None,
        talk({"role": "developer", "content": [text("a"), text("b")]}, Q, ("developer", "c")),
    ),
    "developer, parts wanted": (PARTS, talk(("developer", "d"), ("user", "hi"))),
    "developers, parts wanted": (
        DUMP_PARTS,
        talk(("developer", "d"), ("user", "hi"), ("developer", "e"), ("user", "x")),
    ),
    "developer says nothing": (None, talk(("developer", ""), ("user", "hi"), ("developer", "x"))),
    "developer with tools": (
        DUMP,
        talk({"role": "developer", "content": "d", "tools": [{"type": "function", "function": NOW}]}, Q),
    ),
    "developer with tools, known": (
        DUMP.replace("{{ tools", "{# 'developer' #}{{ tools"),
        talk({"role": "developer", "content": "d"}, Q),
    ),
    "systems": (None, talk(("system", "a"), ("system", "b"), ("user", "hi"))),
    "system behind": (None, talk(("user", "hi"), ("system", "s"))),
    "billing header": (
        None,
        talk(("system", "x-anthropic-billing-header: cc_version=2; cch=1;\nBe short."), ("user", "hi")),
    ),
    "billing header alone": (DUMP, talk(("system", "x-anthropic-billing-header: cc_version=2"), ("user", "hi"))),
    "billing header in parts": (
        None,
        talk({"role": "system", "content": [text("x-anthropic-billing-header: 1"), text("b")]}, Q),
    ),
    "billing header of a user": (None, talk(("user", "x-anthropic-billing-header: 1\nq"))),
    "a role of its own": (None, talk(("user", "q"), ("critic", "no"))),
    # Arguments of tool calls.
    "arguments ''": (None, called("")),
    "arguments malformed": (None, called('{"a": 1')),
    "arguments list": (None, called("[1]")),
    "arguments number": (None, called("5")),
    "arguments null": (None, called("null")),
    "arguments text": (None, called('"x"')),
    "arguments of spaces": (None, called('{"a":1,"b":[1.50,true,null]}')),
    "arguments in order": (None, called('{"b": 1, "a": {"d": 2, "c": 3}}')),
    "arguments of another language": (None, called('{"a": "caf\\u00e9 \\u2603"}')),
    "arguments twice": (None, called('{"a": 1, "b": 2, "a": 3}')),
    "calls as they are": (DUMP, called('{"a": 1}')),
    "keys of calls": (
        DUMP,
        talk(
            Q,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "c"}
                ],
            },
            RESULT,
        ),
    ),
    "no calls": (DUMP, talk(Q, {"role": "assistant", "content": "x", "tool_calls": []}, Q)),
    "content beside calls": (
        None,
        talk(Q, {"role": "assistant", "content": "let me see", "tool_calls": [CALL]}, RESULT),
    ),
    "content null": (CONTENT_ASKED, called("{}")),
    "content left out": (CONTENT_ASKED, talk(Q, {"role": "assistant", "tool_calls": [CALL]}, RESULT)),
    "content null, parts wanted": (DUMP_PARTS, called("{}")),
    "content of a user left out": (DUMP, talk({"role": "user"})),
    "keys of messages": (
        KEYS,
        talk(
            {"role": "user", "content": "q", "mark": 1},
            {"content": "a", "role": "assistant", "refusal": None, "name": "N"},
            Q,
        ),
    ),
    # Reasoning.
    "reasoning_content": (REASONING, talk(Q, {"role": "assistant", "content": "a", "reasoning_content": "t"}, Q)),
    "reasoning": (REASONING, talk(Q, {"role": "assistant", "content": "a", "reasoning": "t"}, Q)),
    "reasoning null": (
        REASONING,
        talk(Q, {"role": "assistant", "content": "a", "reasoning": None, "reasoning_content": "u"}, Q),
    ),
    "reasoning and reasoning_content": (
        REASONING,
        talk(Q, {"role": "assistant", "content": "a", "reasoning": "t", "reasoning_content": "u"}, Q),
    ),
    "thinking": (REASONING, talk(Q, {"role": "assistant", "content": "a", "thinking": "t"}, Q)),
    "reasoning of a user": (REASONING, talk({"role": "user", "content": "a", "reasoning": "t"})),
    "keys with reasoning": (
        DUMP,
        talk(Q, {"role": "assistant", "reasoning_content": "t", "content": "a", "tool_calls": [CALL]}, RESULT),
    ),
    "reasoning_effort low": (EFFORT, user("q", reasoning_effort="low")),
    "reasoning_effort none": (EFFORT, user("q", reasoning_effort="none")),
    "reasoning_effort null": (EFFORT, user("q", reasoning_effort=None)),
    "reasoning_effort in the variables": (EFFORT, user("q", chat_template_kwargs={"reasoning_effort": "low"})),
    "reasoning_effort twice": (
        EFFORT,
        user("q", reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}),
    ),
    "reasoning_effort none, told to think": (
        EFFORT,
        user("q", reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
    ),
    "reasoning_effort high, told not to think": (
        EFFORT,
        user("q", reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}),
    ),
    "reasoning_effort thinks": (FLAGS, user("q", reasoning_effort="medium")),
    "enable_thinking in the variables": (
        FLAGS,
        user("q", chat_template_kwargs={"enable_thinking": False, "style": "brief"}),
    ),
    "enable_thinking at the top": (FLAGS, user("q", enable_thinking=False)),
    "enable_thinking null": (FLAGS, user("q", reasoning_effort="low", chat_template_kwargs={"enable_thinking": None})),
    "variables of no value": (FLAGS, user("q", chat_template_kwargs={"style": "auto", "enable_thinking": None})),
    "variables of false values": (FLAGS, user("q", chat_template_kwargs={"style": 0, "enable_thinking": ""})),
    # Prefill.
    "prefill": (None, talk(("user", "q"), ("assistant", "Sure: "), **PREFILL)),
    "prefill without a space": (None, talk(("user", "q"), ("assistant", "Sure:"), **PREFILL)),
    "prefill, trimmed": (TRIMS, talk(("user", "q"), ("assistant", "Sure: "), **PREFILL)),
    "prefill, trimmed before": (TRIMS, talk(("user", "q"), ("assistant", "\n Sure"), **PREFILL)),
    "prefill of parts": (
        None,
        talk(("user", "q"), {"role": "assistant", "content": [text("a"), text("b ")]}, **PREFILL),
    ),
    "prefill, parts wanted": (PARTS, talk(("user", "q"), ("assistant", "Sure: "), **PREFILL)),
    "prefill that repeats": (
        None,
        talk(("user", "yes"), ("assistant", "no"), ("user", "a"), ("assistant", "no"), **PREFILL),
    ),
    "prefill of nothing": (None, talk(("user", "q"), ("assistant", ""), **PREFILL)),
    "prefill of a user": (None, talk(("user", "Once upon"), **PREFILL)),
    "prefill behind a developer": (
        None,
        talk(("developer", "d"), ("user", "q"), ("developer", "e"), ("assistant", "Sure: "), **PREFILL),
    ),
    "prefill in the variables": (
        None,
        talk(("user", "q"), ("assistant", "Sure: "), chat_template_kwargs=dict(PREFILL)),
    ),
    "no head": (None, user("q", add_generation_prompt=False)),
    "an answer stands last": (None, talk(("user", "q"), ("assistant", "Sure: "))),
    # Documents.
    "documents": (DOCUMENTS, user("q", documents=[{"title": "a", "text": "b"}, {"title": "c", "text": "d"}])),
    "documents null": (DOCUMENTS, user("q", documents=None)),
    "documents in the variables": (
        DOCUMENTS,
        user("q", chat_template_kwargs={"documents": [{"title": "a", "text": "b"}]}),
    ),
    # Tools.
    "tool without description": (None, tools({"name": "now", "parameters": {"type": "object", "properties": {}}})),
    "tool without parameters": (None, tools({"name": "now"})),
    "tool of nulls": (None, tools({"name": "now", "description": None, "parameters": None, "strict": None})),
    "tool in another order": (
        None,
        user(
            "hi",
            tools=[
                {
                    "function": {"parameters": {"type": "object", "properties": {}}, "description": "d", "name": "now"},
                    "type": "function",
                }
            ],
        ),
    ),
    "tool strict": (None, tools({**NOW, "strict": True})),
    "tool not strict": (None, tools({"strict": False, **NOW})),
    "tool with keys of its own": (None, tools({**NOW, "mark": 1})),
    "tool without type": (None, user("hi", tools=[{"function": NOW, "mark": 1}])),
    "tool deferred": (DUMP, user("hi", tools=[{"type": "function", "function": NOW, "defer_loading": True}])),
    "parameters in order": (
        None,
        tools(
            {
                "name": "f",
                "description": "d",
                "parameters": {
                    "required": ["b"],
                    "properties": {
                        "b": {"type": "string", "enum": ["y", "x"]},
                        "a": {"type": "integer", "default": None},
                    },
                    "type": "object",
                },
            }
        ),
    ),
    "tools as they are": (None, tools(NOW, {**NOW, "name": "later"})),
    "tools and no choice": (None, tools(NOW, tool_choice="none")),
    # As ever.
    "plain": (None, talk(("system", "s"), ("user", "hi"))),
    "three turns": (None, talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))),
    "special tokens as text": (None, user("say <|im_end|> please")),
}
SAMPLE = (
    "two parts, llama",
    "two parts, bundled",
    "a text, parts wanted",
    "tool of parts, wanted",
    "image to a text model",
    "developer",
    "system behind developer",
    "developers, parts wanted",
    "billing header",
    "arguments ''",
    "arguments malformed",
    "keys of calls",
    "content null",
    "keys with reasoning",
    "reasoning_effort none",
    "enable_thinking at the top",
    "prefill",
    "prefill, trimmed",
    "documents",
    "tool without description",
    "tool in another order",
    "over a macro's parameter",
    "plain",
)
"""What the default run asks a real vLLM; the nightly one asks all."""
